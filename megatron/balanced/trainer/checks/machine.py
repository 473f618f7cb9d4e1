"""Checks of what the machine has: a GPU, Transformer Engine and other packages, and a precision that these support.

Megatron-LM finds most of this while it builds the model or in the first step, on some of the ranks.
"""

import argparse
import importlib

import torch

from balancing.doctor.broken import broken_import
from balancing.launch import detect_launch
from megatron.balanced.cpu.device import is_cpu
from megatron.balanced.sequences.graphs import check_graphs
from megatron.balanced.shared.errors import LocalError
from megatron.balanced.shared.incompatible import FP64, check_compatible, shown
from megatron.balanced.trainer.checks.engine_parts import check_engine
from megatron.balanced.trainer.config import BalanceConfig, cluster_from_flags
from megatron.balanced.trainer.dry_run import assumes_gpus

__all__ = ["check_machine"]


def check_machine(args: argparse.Namespace, config: BalanceConfig, device: str) -> None:
    """Raise ValueError for flags that this machine cannot run. Called after Megatron-LM has validated `args`.

    device: "cuda" or "cpu".
    """
    if config.fp64 and device != "cpu":
        raise ValueError("--fp64 is for reference runs on the CPU; add --device cpu or drop --fp64")
    if device == "cpu":
        _refuse_without_gpu(args)
    if args.async_save and args.async_strategy == "nvrx" and not assumes_gpus() and not _has_resiliency():
        raise ValueError(
            "--async-save with --async-strategy nvrx needs nvidia-resiliency-ext, which is not installed or too old; "
            "install it, or use --async-strategy mcore"
        )
    if args.transformer_impl == "transformer_engine" and not assumes_gpus() and not _has_transformer_engine():
        raise _without_transformer_engine()
    if not assumes_gpus():
        check_engine(args, config)
    if args.use_ring_exchange_p2p and not hasattr(torch.distributed, "ring_exchange"):
        raise ValueError(
            "--use-ring-exchange-p2p needs torch.distributed.ring_exchange, which this build of PyTorch lacks; drop it"
        )
    check_graphs(config.sequences, args, nccl=device != "cpu", timed=config.balance_report is not None)
    exchanges = config.balances or config.balance_report is not None
    if args.fake_process_group and (exchanges or device == "cpu"):
        raise ValueError(
            "--fake-process-group is incompatible with balancers, --balance-report and --device cpu: its messages "
            "never arrive, so ranks would make different decisions; drop it"
        )
    if config.fp64:
        check_compatible(args, FP64, "--fp64")
    if config.balance_report is not None or config.balances:
        detect_launch()  # raises ValueError if it is unknown which ranks share a node
    cluster_from_flags(config, args.world_size)
    if args.transformer_impl == "local" and args.context_parallel_size > 1 and not args.balance_sequences:
        raise ValueError(
            f"--context-parallel-size {args.context_parallel_size} needs Transformer Engine's attention, which is not "
            "installed or not selected; add --balance-sequences, or use --context-parallel-size 1"
        )
    if args.transformer_impl == "local" and args.multi_latent_attention and args.qk_layernorm and not args.q_lora_rank:
        raise ValueError(
            "--multi-latent-attention with --qk-layernorm needs --q-lora-rank without Transformer Engine, whose fused "
            "norm and projection is not installed or not selected; give --q-lora-rank or drop --qk-layernorm"
        )


# Megatron-LM's flags that need a GPU, and what each does. --profile needs none with --use-pytorch-profiler.
_OF_GPUS = {
    "async_save": "writes checkpoints in a process that chooses a GPU",
    "gpu_sniff_test_interval": "measures the speed of GPUs",
    "log_straggler": "logs temperature and clock of GPUs",
    "nccl_ub": "registers buffers of GPUs with NCCL",
    "optimizer_cuda_graph": "captures the step of an optimizer on a GPU",
    "profile": "starts CUDA's profiler",
}


def _has_resiliency() -> bool:
    """Whether Megatron-LM can import its asynchronous writers."""
    from megatron.core.dist_checkpointing.strategies.nvrx import has_nvrx_async_support

    return has_nvrx_async_support()


def _has_transformer_engine() -> bool:
    """Whether Megatron-LM could import it."""
    from megatron.core.tensor_parallel.random import HAVE_TE

    return HAVE_TE


def _without_transformer_engine() -> ValueError:
    flag = "--transformer-impl transformer_engine"
    if is_cpu():
        return ValueError(f"{flag} needs a GPU, which this run does not have; use --transformer-impl local")
    try:
        importlib.import_module("transformer_engine.pytorch")
    except ImportError as error:  # which Megatron-LM takes for its absence
        if line := broken_import(error):
            return LocalError(f"{line}, or use --transformer-impl local")
    return ValueError(
        f"{flag} needs Transformer Engine, which is not installed; install it, or use --transformer-impl local"
    )


def _refuse_without_gpu(args: argparse.Namespace) -> None:
    for name, what in _OF_GPUS.items():
        value = getattr(args, name)
        if value is None or value is False or (name == "profile" and args.use_pytorch_profiler):
            continue
        instead = "add --use-pytorch-profiler, or drop it" if name == "profile" else "drop it"
        raise ValueError(f"{shown(name, value)} {what}, which this run does not have; {instead}")
    # A graph can hold the state of Transformer Engine's random generator on any device.
    if args.cuda_graph_impl == "local" or (
        args.cuda_graph_impl == "transformer_engine" and not _has_transformer_engine()
    ):
        raise ValueError(
            f"--cuda-graph-impl {args.cuda_graph_impl} needs the random generator of a GPU, which this run does not "
            "have; use --cuda-graph-impl none"
        )
