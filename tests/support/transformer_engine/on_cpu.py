"""What Transformer Engine's Python expects of a GPU's torch, beyond what Megatron-LM does (`megatron.balanced.cpu`)."""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from megatron.balanced.cpu import device, fakes, function_mode

__all__ = ["answer_is_cuda", "gather_types_apart", "have_capability", "keep_mode_in_custom_ops"]


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


def gather_types_apart() -> None:
    """Gloo gathers tensors of several types in one operation as if all were of the first one's, and Megatron-LM gathers
    weights in 8 bits together with those in 16. Have it gather them one after the other."""
    name = "all_gather_single_coalesced"
    gather = getattr(torch.distributed.ProcessGroup, name)

    def apart(group: Any, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *options: Any) -> Any:
        if len({output.dtype for output in outputs}) == 1:
            return gather(group, outputs, inputs, *options)
        works = [gather(group, [output], [each], *options) for output, each in zip(outputs, inputs, strict=True)]
        for work in works:
            work.wait()
        return works[-1]

    setattr(torch.distributed.ProcessGroup, name, apart)


def have_capability(major: int, minor: int) -> None:
    """Be a GPU that quantizes: from 9.0 on with one scale a tensor, from 10.0 on with one for every 32 numbers."""
    from transformer_engine.pytorch import quantization, utils

    fakes.Properties.major, fakes.Properties.minor = major, minor
    utils._get_device_compute_capability.cache_clear()
    quantization._FP8_SUPPORT = quantization._MXFP8_SUPPORT = None
