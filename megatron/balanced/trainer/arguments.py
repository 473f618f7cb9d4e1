"""The command line: Megatron-LM's flags and those of this package, checked before anything is built.

The device is chosen before `megatron.core` is imported (see `megatron.balanced.cpu.device`). Some of Megatron-LM's
defaults need Transformer Engine or Apex; if these are missing, other defaults take their place. Flags that the user
gives are kept.
"""

import argparse
import contextlib
import difflib
import functools
import importlib
import importlib.util
import inspect
import io
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from balancing.doctor.broken import broken_import
from balancing.doctor.installed import find_apex
from megatron.balanced.cpu.device import choose_device, is_cpu, use_cpu
from megatron.balanced.run import Run
from megatron.balanced.shared.errors import LocalError
from megatron.balanced.trainer.agreement import check_agreement
from megatron.balanced.trainer.auto_domain import settle_domain
from megatron.balanced.trainer.balancers import check_balancers, switch_on
from megatron.balanced.trainer.checks.checkpoints import check_folders, check_load, check_saves
from megatron.balanced.trainer.checks.data import check_data, check_tokens, check_vocabulary
from megatron.balanced.trainer.checks.fill import check_fill
from megatron.balanced.trainer.checks.machine import check_machine
from megatron.balanced.trainer.checks.megatron import check_megatron
from megatron.balanced.trainer.checks.model import check_groups, check_layout, check_model, settle_graphs
from megatron.balanced.trainer.checks.ranges import check_ranges
from megatron.balanced.trainer.checks.refusal import is_refusal
from megatron.balanced.trainer.checks.report import notes_on_report
from megatron.balanced.trainer.config import BalanceConfig, add_flags, config_from_flags
from megatron.balanced.trainer.dry_run import assume_packages, assume_ranks, assumed_device, assumes_gpus, model_of
from megatron.balanced.trainer.model_extension import ModelExtension
from megatron.balanced.trainer.rendezvous import join_job, rank
from megatron.balanced.trainer.watchdog.failure import stop

__all__ = ["add_balance_flags", "parse_arguments"]


def add_balance_flags(
    parser: argparse.ArgumentParser, extension: ModelExtension | None = None
) -> argparse.ArgumentParser:
    """Add the flags of this package and of `extension` to Megatron-LM's `parser`. Bad flags then raise ValueError."""
    add_flags(parser)
    if extension is not None:
        extension.add_flags(parser)
    for action in parser._actions:  # help texts from Megatron-LM's docstrings have a bare %, a format to argparse
        action.help = action.help and re.sub(r"(?<!%)%(?![%(])", "%%", action.help)
    parser.set_defaults(**_defaults_of_this_host())
    for action in parser._actions:
        if inspect.isfunction(action.type):
            action.type = _refusing(action.type)
    parser.error = lambda message: _refuse_flags(parser, message)  # type: ignore[method-assign]
    return parser


def _refusing(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap `read`, the type of an argument: every bad text raises ValueError, which argparse reports."""

    @functools.wraps(read)
    def value(text: str) -> Any:
        try:
            return read(text)
        except (KeyError, AssertionError, SyntaxError, NameError) as error:
            raise ValueError(str(error)) from error

    return value


def _refuse_flags(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Raise ValueError. argparse itself would print the usage of some six hundred flags on each rank."""
    unknown = re.search(r"unrecognized arguments: (--[^\s=]+)", message)
    near = difflib.get_close_matches(unknown[1], parser._option_string_actions, n=1) if unknown else []
    raise ValueError(f"{message}; {f'did you mean {near[0]}?' if near else 'see --help'}")


def _defaults_of_this_host() -> dict[str, object]:
    """Replacements for defaults of Megatron-LM that need Transformer Engine, Apex or a GPU, where these are missing."""
    defaults: dict[str, object] = {}
    if assumes_gpus():
        return defaults
    has_apex = find_apex()["state"] == "ok"
    if is_cpu() or importlib.util.find_spec("transformer_engine") is None:
        defaults |= {"transformer_impl": "local", "apply_rope_fusion": False}
        if is_cpu() or not has_apex:
            defaults["no_persist_layer_norm"] = True
    if is_cpu() or importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:  # an extension of Apex
        defaults["gradient_accumulation_fusion"] = False
    if is_cpu() or not has_apex:
        defaults["masked_softmax_fusion"] = False
    if is_cpu():
        defaults["distributed_backend"] = "gloo"
    return defaults


def _is_first_rank() -> bool:
    return rank() == 0


def _quiet(device: str) -> None:
    """Silence warnings of modules about missing packages, which `python -m balancing.doctor` reports once."""
    for message in (
        ".*(Transformer Engine|Apex|transformer-engine).*(not installed|Falling back|Use local).*",
        ".*is deprecated and will be removed in future NCCL.*",
    ):
        warnings.filterwarnings("ignore", message=message)
    if device == "cpu":
        warnings.filterwarnings("ignore", message=".*'pin_memory' argument is set as true.*")


def _start_device(argv: Sequence[str]) -> str:
    if assumes_gpus():
        _quiet("cpu")
        print(f"> device: {assumed_device()}", flush=True)
        return "cuda"
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--device", default="auto")
    requested = early.parse_known_args(argv)[0].device
    device = choose_device(requested)
    _quiet(device)
    if device == "cpu":
        use_cpu()
    if _is_first_rank() and not {"-h", "--help"} & set(argv):
        threads = f"{torch.get_num_threads()} thread(s) a rank, gloo"
        where = torch.cuda.get_device_name() if device == "cuda" else threads
        print(f"> device: {device} ({where})", flush=True)
    return device


def _import_megatron() -> None:
    """Raise LocalError if a package that megatron-core imports ends with an error that it does not expect."""
    try:
        importlib.import_module("megatron.core")
    except Exception as error:
        if (line := broken_import(error)) is None:
            raise
        raise LocalError(line) from error


def _use_float64(args: argparse.Namespace) -> None:
    torch.set_default_dtype(torch.float64)
    args.params_dtype = torch.float64
    args.moe_router_dtype = "fp64"


def parse_arguments(
    argv: Sequence[str] | None = None, extension: ModelExtension | None = None
) -> tuple[argparse.Namespace, BalanceConfig]:
    """Choose the device, parse and check the command line, and set up Megatron's globals: tokenizer, writers, timers.

    argv: the command line without the program's name, by default `sys.argv[1:]`.
    extension: the model's extension, which may add flags.

    Returns Megatron-LM's arguments and the config of this package. Bad input ends the process with one line on stderr
    and exit code 2.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    sys.argv[1:] = argv  # Megatron's parser reads it
    try:
        notes_on_version = check_megatron()
        alone = "RANK" not in os.environ  # before the next line sets it
        assume_ranks(argv)
        join_job(alone=alone)
        device = _start_device(argv)
        _import_megatron()

        from megatron.core.model_parallel_config import resolve_tensor_parallel_weight_shards
        from megatron.training.arguments import parse_args, validate_args
        from megatron.training.global_vars import set_global_variables

        from megatron.balanced.trainer import patches

        if assumes_gpus():
            assume_packages()
        args = parse_args(functools.partial(add_balance_flags, extension=extension))
        left_to_us = switch_on(args)
        config, said = config_from_flags(args, device)
        if args.use_checkpoint_args:
            check_load(args)
            from megatron.training.checkpointing import load_args_from_checkpoint

            load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
            load_args_from_checkpoint(args)
        check_ranges(args)
        settle_graphs(args)
        check_layout(args)
        check_model(args)
        check_data(args)
        check_saves(args)
        check_load(args)
        # Megatron-LM derives this later, and some balancers refuse it.
        _, args.gtp_weight_remat_size = resolve_tensor_parallel_weight_shards(
            args.tensor_model_parallel_size, args.tensor_parallel_num_weight_shards, 1
        )
        parallel = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
        shards = getattr(args, "expert_tensor_parallel_num_weight_shards", None)
        names = "expert_tensor_parallel_num_weight_shards", "expert_tensor_parallel_size"
        _, args.expert_gtp_weight_remat_size = resolve_tensor_parallel_weight_shards(parallel, shards, 1, *names)
        config, notes = check_balancers(args, config, left_to_us)
        if config.balance_report is not None:
            notes = [*notes, *notes_on_report(args)]
        if _is_first_rank():
            print(*(f"> {note}\n" for note in (*notes_on_version, *said, *notes)), sep="", end="", flush=True)
        if args.sft:  # the SFT dataset asserts that no mask is requested
            args.create_attention_mask_in_dataloader = False
        with contextlib.redirect_stdout(io.StringIO()) if assumes_gpus() else contextlib.nullcontext():
            validate_args(args)  # prints some six hundred arguments
        check_groups(args)
        config, notes = settle_domain(args, config)
        config, said = check_fill(args, config)
        notes += said
        if _is_first_rank():
            print(*(f"> {note}\n" for note in notes), sep="", end="", flush=True)
        check_machine(args, config, device)
        if extension is not None:
            extension.check(args)
        if not assumes_gpus():
            check_folders(args, create=not config.balance_dry_run)
        patches.check_needed(args, config, Run())
        if config.fp64:
            _use_float64(args)
        if assumes_gpus():
            model_of(args)  # Megatron-LM refuses some flags there
        else:
            set_global_variables(args)
            check_vocabulary(args)
            notes = check_tokens(args)
            if _is_first_rank():
                print(*(f"> {note}\n" for note in notes), sep="", end="", flush=True)
            check_agreement(args, config)
    except (ValueError, AssertionError, RuntimeError, ImportError, OSError) as error:
        stop(error)
    except Exception as error:
        if is_refusal(error):
            stop(error)
        raise
    return args, config
