"""One line at the start of a run: which kernels it runs, and why not faster ones."""

import argparse
import warnings

import torch

from balancing.sequences.engine import merging
from megatron.balanced.cpu.device import is_cpu

__all__ = ["kernels_line"]


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
    return f"kernels: attention: {attention}{experts}"


def _balanced_attention() -> str:
    device = torch.device("cpu" if is_cpu() else "cuda")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fused = merging.choose_merge(device) is not merging.merge_rows
    name = "torch's flash attention for CPUs" if is_cpu() else "the fastest here, measured when the model is built"
    merges = "merged by a Triton kernel" if fused else "merged by operations of torch"
    return "; ".join([f"{name}, {merges}", *(str(warning.message) for warning in caught)])
