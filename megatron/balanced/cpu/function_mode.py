"""The `TorchFunctionMode` that maps every CUDA device given to a torch function to the CPU.

Methods of tensors that only have a meaning on a GPU (`cuda`, `pin_memory`) become no-ops, and factories do not pin
memory.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["OnCpu", "module_cuda", "module_to"]

_CPU = torch.device("cpu")


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


_CUDA_TYPE = {torch.float64: "torch.cuda.FloatTensor", torch.float32: "torch.cuda.FloatTensor"}
_CUDA_TYPE |= {torch.float16: "torch.cuda.HalfTensor", torch.bfloat16: "torch.cuda.BFloat16Tensor"}
_CUDA_TYPE |= {torch.int64: "torch.cuda.LongTensor", torch.int32: "torch.cuda.IntTensor"}


def _tensor_to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if args and _is_cuda(args[0]):
        args = (_CPU, *args[1:])
    return torch.Tensor.to(tensor, *args, **kwargs)


def _tensor_type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """The name of the CUDA tensor type, by which Megatron's optimizers recognize the precision of a parameter."""
    name = None if args or kwargs else _CUDA_TYPE.get(tensor.dtype)
    return name or torch.Tensor.type(tensor, *args, **kwargs)


def _tensor_float(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Megatron calls `float()` for full precision. In a float64 run that is float64."""
    if tensor.dtype is torch.float64 and torch.get_default_dtype() is torch.float64:
        return tensor
    return torch.Tensor.float(tensor, *args, **kwargs)


def _same_tensor(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor


_ON_CPU: dict[Any, Callable] = {
    torch.Tensor.to: _tensor_to,
    torch.Tensor.cuda: _same_tensor,
    torch.Tensor.pin_memory: _same_tensor,
    torch.Tensor.type: _tensor_type,
    torch.Tensor.float: _tensor_float,
}


class OnCpu(TorchFunctionMode):
    """Replaces CUDA devices among the arguments of torch functions. Every call of a torch function passes through it,
    so it must be fast."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        func = _ON_CPU.get(func, func)
        if not kwargs:
            return func(*args)
        device = kwargs.get("device")
        if device is not None and _is_cuda(device):
            kwargs = {**kwargs, "device": _CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


def module_to(original: Callable) -> Callable:
    """`Module.to` that stays on the CPU."""

    @functools.wraps(original)
    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        args = tuple(_CPU if i == 0 and _is_cuda(a) else a for i, a in enumerate(args))
        kwargs = {k: _CPU if k == "device" and _is_cuda(v) else v for k, v in kwargs.items()}
        return original(self, *args, **kwargs)

    return to


def module_cuda(self: torch.nn.Module, device: Any = None) -> torch.nn.Module:
    """`Module.cuda` that stays on the CPU."""
    return self
