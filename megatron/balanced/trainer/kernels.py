"""One line at the start of a run: which kernels it runs, and why not faster ones."""

import argparse
import warnings

import torch

from balancing.sequences.engine import kernels, merging
from megatron.balanced.cpu.device import is_cpu

__all__ = ["kernels_line"]

_NAMES = {
    kernels._CPU: "torch's flash attention for CPUs",
    kernels._PRODUCTS: "matrix products, since flash attention does not support this dtype and head size",
    kernels._PACKAGE: "the flash-attn package's",
}


def kernels_line(args: argparse.Namespace) -> str:
    """One line on attention and experts of this run. Compiles the kernels that merge attention results."""
    engine = args.transformer_impl == "transformer_engine"
    own = "Megatron-LM's own" + (", as --transformer-impl local asks" if not engine else "")
    attention = "Transformer Engine's" if engine else f"{own}, in matrix products"
    if args.balance_sequences:
        attention = _balanced_attention(args)
    experts = ""
    if args.num_experts:
        grouped = engine and args.moe_grouped_gemm
        experts = f"; experts: {'Transformer Engine, grouped' if grouped else 'one after the other'}"
    return f"kernels: attention: {attention}{experts}"


def _balanced_attention(args: argparse.Namespace) -> str:
    device = torch.device("cpu" if is_cpu() else "cuda")
    keys, values = args.kv_channels, None
    if args.multi_latent_attention:
        keys, values = args.qk_head_dim + args.qk_pos_emb_head_dim, args.v_head_dim
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        chosen = kernels.choose_kernel(device, args.params_dtype, keys, values)
        fused = merging.choose_merge(device) is not merging.merge_rows
    if isinstance(chosen, kernels.OfOneSize):
        chosen = chosen._kernel
    name = _NAMES.get(chosen) or f"torch's {torch.nn.attention.current_flash_attention_impl() or 'flash attention'}"
    merges = "merged by a Triton kernel" if fused else "merged by operations of torch"
    return "; ".join([f"{name}, {merges}", *(str(warning.message) for warning in caught)])
