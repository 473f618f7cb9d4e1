"""Which kernels a run has: a line that also says why not faster ones, and those that plans assume before the choice."""

import argparse
import warnings

import torch

from balancing.cluster import Cluster
from balancing.kernels import merging
from balancing.kernels.choice import kernels_of_gpu, planned_kernels
from balancing.sequences.config import SequenceConfig
from megatron.balanced.cpu.device import is_cpu

__all__ = ["kernels_line", "with_planned_kernel"]

_ASSUMED: tuple[str, ...] = ("cudnn", "fa2")  # on the machines of a dry run, which have Transformer Engine


def kernels_line(args: argparse.Namespace) -> str:
    """One line on attention and experts of this run. Compiles the kernels that merge attention results."""
    engine = args.transformer_impl == "transformer_engine"
    own = "Megatron-LM's own" + (", as --transformer-impl local asks" if not engine else "")
    attention = "Transformer Engine's" if engine else f"{own}, in matrix products"
    if args.balance_sequences:
        attention = _balanced_attention()
    experts = ""
    if args.num_experts:
        grouped = engine and args.moe_grouped_gemm
        experts = f"; experts: {'Transformer Engine, grouped' if grouped else 'one after the other'}"
        if args.balance_experts and not is_cpu():
            experts += ", or PyTorch's grouped product, as settings and measurement have it when the model is built"
    return f"kernels: attention: {attention}{experts}"


def with_planned_kernel(cluster: Cluster, sequences: SequenceConfig, *, assumes_gpus: bool) -> Cluster:
    """The cluster with attention as the kernel computes it that `sequences` will choose, for plans before the choice:
    the fastest of those that it names and that are installed on this rank.

    assumes_gpus: whether this is a dry run for GPUs that the machine does not have.
    """
    there = _ASSUMED
    if not assumes_gpus:
        if is_cpu():  # whose only kernel has no rates in a preset
            return cluster
        there = tuple(name for name, *_ in kernels_of_gpu(torch.device("cuda", torch.cuda.current_device())))
    return cluster.with_kernel(*planned_kernels(sequences.kernel, there))


def _balanced_attention() -> str:
    device = torch.device("cpu" if is_cpu() else "cuda")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fused = merging.choose_merge(device) is not merging.merge_rows
    name = "torch's flash attention for CPUs" if is_cpu() else "the fastest here, measured when the model is built"
    merges = "merged by a Triton kernel" if fused else "merged by operations of torch"
    return "; ".join([f"{name}, {merges}", *(str(warning.message) for warning in caught)])
