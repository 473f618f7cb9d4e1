"""What Transformer Engine's Python expects of a GPU's torch, beyond what Megatron-LM does (`megatron.balanced.cpu`)."""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from megatron.balanced.cpu import device, fakes, function_mode

__all__ = ["answer_is_cuda", "dequantize_where_it_is", "gather_bytes", "have_capability", "keep_mode_in_custom_ops"]


def answer_is_cuda() -> None:
    """Transformer Engine refuses inputs that are not on CUDA. Tensors tell it that they are, and nobody else:
    Megatron-LM's moves between host and device go by that answer."""
    get = torch.Tensor.is_cuda.__get__

    def is_cuda(tensor: torch.Tensor, *unused: Any) -> bool:
        asking = sys._getframe(2).f_globals.get("__name__", "")  # past the mode that calls this
        return asking.startswith("transformer_engine.") or get(tensor)

    function_mode._ON_CPU[get] = is_cuda


def keep_mode_in_custom_ops() -> None:
    """Bodies of custom operators run with modes of torch functions off. Have the CPU device's on in them. To be called
    before operators are made."""
    original = torch.library.custom_op

    def custom_op(name: str, function: Callable | None = None, /, **options: Any) -> Any:
        def make(function: Callable) -> Any:
            @functools.wraps(function)
            def body(*args: Any, **kwargs: Any) -> Any:
                with contextlib.nullcontext() if device._active is None else device._active[0]:
                    return function(*args, **kwargs)

            body.__signature__ = inspect.signature(function, eval_str=True)  # which torch reads the schema from
            return original(name, body, **options)

        return make if function is None else make(function)

    torch.library.custom_op = custom_op


def gather_bytes() -> None:
    """gloo mixes up tensors of several types that are gathered as one, such as parameters in 8 and in 16 bits. Have it
    gather bytes."""

    def in_bytes(original: Callable) -> Callable:
        def gather(group: Any, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *rest: Any) -> Any:
            as_bytes = [[tensor.view(torch.uint8) for tensor in tensors] for tensors in (outputs, inputs)]
            return original(group, *as_bytes, *rest)

        return gather

    groups = torch.distributed.ProcessGroup
    for name in ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"):  # of older and of newer torch
        if hasattr(groups, name):
            setattr(groups, name, in_bytes(getattr(groups, name)))


def dequantize_where_it_is() -> None:
    """Have an MXFP8Tensor on the CPU not look for CUDA when it is dequantized. Called when Transformer Engine is
    imported."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.storage import mxfp8_tensor_storage as storage

    def forward(ctx: Any, tensor: Any, dtype: torch.dtype) -> torch.Tensor:
        return tex.dequantize(tensor, storage.torch_to_transformer_engine_dtype[dtype])

    storage._FromMXFP8Func.forward = staticmethod(forward)


def have_capability(major: int, minor: int) -> None:
    """Be a GPU that quantizes: from 9.0 on with one scale a tensor, from 10.0 on with one for every 32 numbers, or to
    4 bits."""
    from transformer_engine.pytorch import quantization, utils

    fakes.Properties.major, fakes.Properties.minor = major, minor
    utils._get_device_compute_capability.cache_clear()
    quantization._FP8_SUPPORT = quantization._MXFP8_SUPPORT = quantization._FP8_BLOCK_SCALING_SUPPORT = None
    quantization._NVFP4_SUPPORT = None
