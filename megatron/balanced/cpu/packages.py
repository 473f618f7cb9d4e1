"""Packages for GPUs, which imports do not find while the CPU is the device.

megatron-core chooses by what can be imported: with Transformer Engine it clips gradients, multiplies in routers and
normalizes by Transformer Engine's functions, with Apex or flash-attn by theirs, whatever device the tensors are on. On
tensors of the CPU these crash. Without the packages it takes functions of PyTorch, as on a machine that lacks them.
"""

import sys
from types import ModuleType

__all__ = ["GPU_PACKAGES", "hide_packages", "show_packages"]

# What a supported release of megatron-core imports where it is installed, and what computes on GPUs only.
GPU_PACKAGES = (
    "amp_C", "apex", "causal_conv1d", "cudnn", "deep_ep", "fast_hadamard_transform", "fla", "flash_attn",
    "flash_attn_3", "flash_mla", "flashattn_hopper", "flashinfer", "flashinfer_cubin", "flashinfer_jit_cache",
    "fused_weight_gradient_mlp_cuda", "mamba_ssm", "nvidia_kitchen", "scaled_masked_softmax_cuda",
    "scaled_softmax_cuda", "scaled_upper_triang_masked_softmax_cuda", "tilelang", "transformer_engine",
    "transformer_engine_torch",
)  # fmt: skip


def hide_packages() -> dict[str, ModuleType]:
    """Have imports of `GPU_PACKAGES` raise ModuleNotFoundError. Returns their modules that were imported before."""
    aside = {name: module for name, module in sys.modules.items() if name.split(".")[0] in GPU_PACKAGES}
    for name in aside:
        del sys.modules[name]
    # None is Python's own mark of a module that imports do not find; importlib.util.find_spec returns None.
    sys.modules.update(dict.fromkeys(GPU_PACKAGES))  # type: ignore[arg-type]
    return aside


def show_packages(aside: dict[str, ModuleType]) -> None:
    """Undo `hide_packages`, which returned `aside`."""
    for name in GPU_PACKAGES:
        if sys.modules.get(name, name) is None:  # otherwise something stands in for the package
            del sys.modules[name]
    sys.modules.update(aside)
