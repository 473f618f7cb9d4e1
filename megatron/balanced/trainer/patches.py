"""The table of all patches: every attribute of Megatron-LM that is replaced.

A patch is the last resort (docs/internals/overlay.md lists the alternatives). Each row has the target, the replacement,
the reason and the signature it expects. `install` applies the rows that a run needs. A missing target or another
signature stops the run: a patch that silently does nothing is worse than none.
"""

import argparse
import functools
import importlib
import importlib.util
import inspect
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron.core
import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import get_rerun_state_machine

from megatron.balanced.experts.known_counts import with_known_counts
from megatron.balanced.fill.schedule import with_filled_waits
from megatron.balanced.layers.recapture import remembered
from megatron.balanced.run import Run
from megatron.balanced.sequences.packed_messages import with_flat_batches, with_known_shapes
from megatron.balanced.sequences.prediction import with_planned_losses
from megatron.balanced.shared.counters import with_exact_counters
from megatron.balanced.shared.loss_scale import with_one_loss_scale
from megatron.balanced.trainer.checks.megatron import MEGATRON_VERSIONS
from megatron.balanced.trainer.config import BalanceConfig
from megatron.balanced.trainer.dry_run import assumes_gpus
from megatron.balanced.trainer.model import replaces_in_tail
from megatron.balanced.trainer.prediction import has_tail, with_the_models_modules
from megatron.balanced.trainer.sequence_rules import why_whole
from megatron.balanced.trainer.train_step import with_callbacks

__all__ = ["PATCHES", "Patch", "check", "check_needed", "install", "masks_losses", "rows", "uninstall"]

Condition = Callable[[argparse.Namespace, BalanceConfig], bool]


@dataclass(frozen=True)
class Patch:
    """One replaced attribute of Megatron-LM. `replacement` maps the original to its replacement. If the row is
    `of_run`, it takes the run first, and any callback of the run needs it."""

    target: str  # "package.module:attribute" or "package.module:Class.attribute"
    replacement: Callable[..., Callable]
    why: str
    signature: tuple[str, ...]  # parameter names of the original
    needed: Condition
    of_run: bool = False

    def replace(self, original: Callable, run: Run) -> Callable:
        """What replaces `original` in this run."""
        return self.replacement(run, original) if self.of_run else self.replacement(original)

    def is_needed(self, args: argparse.Namespace, config: BalanceConfig, run: Run) -> bool:
        """Whether this run needs the row."""
        return self.needed(args, config) or (self.of_run and bool(run.callbacks))

    def owner(self) -> tuple[Any, str]:
        """The object that has the target, and the target's name. Raises LookupError when it does not exist."""
        module, _, path = self.target.partition(":")
        *parents, name = path.split(".")
        try:
            owner = functools.reduce(getattr, parents, importlib.import_module(module))
            getattr(owner, name)
        except (ImportError, AttributeError) as error:
            raise LookupError(f"{self.target} does not exist in megatron-core {megatron.core.__version__}") from error
        return owner, name


def _keep_shipped_helper(original: Callable) -> Callable:
    @functools.wraps(original)
    def compile_helpers() -> None:
        """Do nothing: the wheel has the compiled helper and no Makefile."""

    return compile_helpers


def _helper_is_shipped(args: argparse.Namespace, config: BalanceConfig) -> bool:
    spec = importlib.util.find_spec("megatron.core.datasets")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(next(iter(spec.submodule_search_locations)))
    compiled = folder / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    return compiled.exists() and not (folder / "Makefile").exists()


def _with_filled_state(original: Callable) -> Callable:
    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        """Fill in the state of a new optimizer first: without state, torch's optimizer has no common step to read."""
        if self.optimizer is not None and not self.optimizer.state:
            self._init_optimizer_states_with_dummy_values()
        return original(self)

    return state_dict


def _with_own_step(original: Callable) -> Callable:
    @functools.wraps(original)
    def _set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        """Give the parameter a step counter of its own. Upstream has just given all parameters the same tensor, so
        torch's Adam would increment it once for every parameter in each step. Upstream also reads `step` from
        `tensors`, where not every checkpoint format has it; None makes upstream skip it. Float32 parameters are leaves
        of the graph, so they are set without gradients."""
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state:
            state["step"] = state["step"].clone()
        with torch.no_grad():
            original(self, model_param, {**tensors, "step": None})

    return _set_main_param_and_optimizer_states


def _in_any_precision(original: Callable) -> Callable:
    @functools.wraps(original)
    def __post_init__(self: Any) -> None:
        """Run upstream's checks as for bfloat16; these set nothing that depends on the precision."""
        self.bf16 = True
        original(self)
        self.bf16 = False

    return __post_init__


def _overlaps_in_full_precision(args: argparse.Namespace, config: BalanceConfig) -> bool:
    return args.overlap_moe_expert_parallel_comm and not (args.bf16 or args.fp16)


def _only_drawn(original: Callable) -> Callable:
    @functools.wraps(original)
    def dummy_train_step(data_iterator: Any) -> None:
        """Draw the micro-batches of an iteration that is skipped, and do nothing else with them. Upstream also cuts
        them for its ranks, which fails for other batches than its own, and draws from one iterator only, which fails
        in an interleaved pipeline and on a stage without data."""
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        rerun = get_rerun_state_machine()
        while rerun.should_run_forward_backward(data_iterator):
            for iterator in [one for one in iterators if one is not None] * get_num_microbatches():
                next(iterator)

    return dummy_train_step


def _loads_torch_adam(args: argparse.Namespace, config: BalanceConfig) -> bool:
    from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE

    return bool(args.load and args.use_distributed_optimizer and not (HAVE_APEX_OR_TE or assumes_gpus()))


def _watches_steps(args: argparse.Namespace, config: BalanceConfig) -> bool:
    features = config.balances or config.fill_with_weight_gradients
    return config.balance_report is not None or features or masks_losses(args)


def masks_losses(args: argparse.Namespace) -> bool:
    """True if every token of a step can be masked (`observe.empty_steps` warns of it)."""
    return bool(args.sft or args.eod_mask_loss)


def _flattens_batches(args: argparse.Namespace, config: BalanceConfig) -> bool:
    packs = args.sft or args.dataloader_inter_document_masking or config.sequences.enabled
    return packs and max(args.micro_batch_size, args.eval_micro_batch_size or 1) > 1


def _splits_experts(args: argparse.Namespace, config: BalanceConfig) -> bool:
    return config.experts.enabled and args.moe_token_dispatcher_type == "alltoall"


def _counts_in_16_bits(args: argparse.Namespace, config: BalanceConfig) -> bool:
    kinds = args.moe_router_load_balancing_type  # one, or a list
    counts = args.moe_router_enable_expert_bias or "global_aux_loss" in kinds
    return bool(args.num_experts and counts and (args.bf16 or args.fp16))


def _has_several_scales(args: argparse.Namespace, config: BalanceConfig) -> bool:
    several = args.expert_model_parallel_size > 1 or args.overlap_param_gather_with_optimizer_step
    return args.fp16 and several and not args.loss_scale


def _captures_layers(args: argparse.Namespace, config: BalanceConfig) -> bool:
    return config.layers.enabled and args.cuda_graph_impl == "transformer_engine"


PATCHES = (
    Patch(
        target="megatron.core.datasets.utils:compile_helpers",
        replacement=_keep_shipped_helper,
        why="the wheel has the compiled dataset helper but no Makefile; make would end the run",
        signature=(),
        needed=_helper_is_shipped,
    ),
    Patch(
        target="megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.state_dict",
        replacement=_with_filled_state,
        why="without Transformer Engine and Apex, a distributed optimizer does not load its own checkpoint",
        signature=("self",),
        needed=_loads_torch_adam,
    ),
    Patch(
        target="megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._set_main_param_and_optimizer_states",
        replacement=_with_own_step,
        why="without Transformer Engine and Apex, a loaded distributed optimizer counts its steps wrong, or fails",
        signature=("self", "model_param", "tensors"),
        needed=_loads_torch_adam,
    ),
    Patch(
        target="megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
        replacement=_in_any_precision,
        why="Megatron-LM overlaps messages of experts in half precision only, although its schedule works in any",
        signature=("self",),
        needed=_overlaps_in_full_precision,
    ),
    Patch(
        target="megatron.core.transformer.moe.token_dispatcher:gather_from_sequence_parallel_region",
        replacement=with_known_counts,
        why="the dispatcher gathers counts of tokens that the expert balancer has already gathered",
        signature=("input_", "tensor_parallel_output_grad", "group", "output_split_sizes", "use_global_buffer"),
        needed=_splits_experts,
    ),
    Patch(
        target="megatron.core.transformer.moe.router:TopKRouter._maintain_float32_expert_bias",
        replacement=with_exact_counters,
        why="Megatron-LM rounds the numbers of tokens that expert bias and global aux losses follow to 16 bits",
        signature=("self",),
        needed=_counts_in_16_bits,
    ),
    Patch(
        target="megatron.core.optimizer.optimizer:ChainedOptimizer.prepare_grads",
        replacement=with_one_loss_scale,
        why="after an overflow Megatron-LM lowers the loss scale of experts or of other layers, but not of both",
        signature=("self",),
        needed=_has_several_scales,
    ),
    Patch(
        target="megatron.training.models.gpt:mtp_block_spec",
        replacement=with_the_models_modules,
        why="layers of multi-token prediction do not follow the model's layer spec, which has other modules",
        signature=("config", "transformer_layer_spec", "vp_stage"),
        needed=lambda args, config: replaces_in_tail(args, config.experts, config.sequences),
    ),
    Patch(
        target="megatron.core.models.gpt.gpt_model:process_mtp_loss",
        replacement=with_planned_losses,
        why="losses of multi-token prediction shift and average the rows of a rank, but these are pieces of documents",
        signature=(
            "hidden_states",
            "labels",
            "loss_mask",
            "output_layer",
            "output_weight",
            "runtime_gather_output",
            "is_training",
            "compute_language_model_loss",
            "config",
            "cp_group",
            "tp_group",
            "packed_seq_params",
            "scale_logits_fn",
            "input_ids",
        ),
        needed=lambda args, config: config.sequences.enabled and has_tail(args),
    ),
    Patch(
        target="megatron.training.training:TECudaGraphHelper",
        replacement=remembered,
        why="Megatron-LM captures CUDA graphs once, and layers that move need new ones",
        signature=("model", "config", "seq_length", "micro_batch_size", "optimizers", "pg_collection"),
        needed=_captures_layers,
    ),
    Patch(
        target="megatron.training.training:get_forward_backward_func",
        replacement=with_flat_batches,
        why="Megatron-LM packs the samples of a micro-batch into one sequence, but not its messages between stages",
        signature=("pp_size", "vp_size", "schedule_pg_collection"),
        needed=_flattens_batches,
    ),
    Patch(
        target="megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate_shapes",
        replacement=with_known_shapes,
        why="pipeline stages exchange the size of every message and wait; balanced stages know the sizes",
        signature=("self", "tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next"),
        needed=lambda args, config: config.sequences.micro_batches and not why_whole(args),
    ),
    Patch(
        target="megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate",
        replacement=with_filled_waits,
        why="pipeline stages wait for each message once it is posted; weight gradients are computed meanwhile",
        signature=(
            "self",
            "tensor_send_next",
            "tensor_send_prev",
            "recv_prev",
            "recv_next",
            "tensor_shape",
            "wait_on_reqs",
        ),
        needed=lambda args, config: config.fill_with_weight_gradients,
    ),
    Patch(
        target="megatron.training.training:dummy_train_step",
        replacement=_only_drawn,
        why="Megatron-LM cuts the batches of an iteration that it skips as its own, and draws from one data iterator",
        signature=("data_iterator",),
        needed=lambda args, config: bool(args.iterations_to_skip),
    ),
    Patch(
        target="megatron.training.training:train_step",
        replacement=with_callbacks,
        why="Megatron-LM has no callbacks, and the report and the balancers act between micro-batches and steps",
        signature=(
            "forward_step_func",
            "data_iterator",
            "model",
            "optimizer",
            "opt_param_scheduler",
            "config",
            "forward_backward_func",
            "iteration",
            "pg_collection",
            "p2p_communicator",
        ),
        needed=_watches_steps,
        of_run=True,
    ),
)

_installed: list[tuple[Any, str, Any]] = []


def check(patch: Patch) -> None:
    """Raise ValueError unless this patch fits the installed Megatron-LM."""
    try:
        owner, name = patch.owner()
    except LookupError as error:
        raise ValueError(f"{error.args[0]}; install megatron-core {MEGATRON_VERSIONS[-1]}") from error
    has = tuple(inspect.signature(inspect.getattr_static(owner, name)).parameters)
    if has != patch.signature:
        raise ValueError(
            f"{patch.target} takes {has}, not {patch.signature}; install megatron-core {MEGATRON_VERSIONS[-1]}"
        )


def rows(args: argparse.Namespace, config: BalanceConfig, run: Run) -> list[str]:
    """One line for each row of the table: whether this run needs it, its reason, and the error if it does not fit."""
    lines = []
    for patch in PATCHES:
        line = f"{'patch' if patch.is_needed(args, config, run) else 'no   '}  {patch.target}: {patch.why}"
        try:
            check(patch)
        except ValueError as error:
            line += f" (cannot be applied: {error})"
        lines.append(line)
    return lines


def check_needed(args: argparse.Namespace, config: BalanceConfig, run: Run) -> list[Patch]:
    """The patches that this run needs. Raises ValueError when one does not fit the installed Megatron-LM."""
    wanted = [patch for patch in PATCHES if patch.is_needed(args, config, run)]
    for patch in wanted:
        check(patch)
    return wanted


def install(args: argparse.Namespace, config: BalanceConfig, run: Run) -> list[str]:
    """Check all patches that this run needs, then apply them. Returns one line for each. Idempotent.

    Raises ValueError, without applying any, when one does not fit the installed Megatron-LM.
    """
    if _installed:
        return []
    wanted = check_needed(args, config, run)
    for patch in wanted:
        owner, name = patch.owner()
        original = inspect.getattr_static(owner, name)
        _installed.append((owner, name, original))
        setattr(owner, name, patch.replace(original, run))
    return [f"patched {patch.target}: {patch.why}" for patch in wanted]


def uninstall() -> None:
    """Restore every original that `install` replaced."""
    while _installed:
        owner, name, original = _installed.pop()
        setattr(owner, name, original)
