"""A host beside the device, for `HybridDeviceOptimizer` of Megatron-LM on the CPU device.

It asks tensors whether they are on CUDA, copies some to the host and steps these there. On the CPU device a tensor is
on neither side. `install` has tensors that were brought to the host be of a class of their own, and keep it: it is what
tensors on a GPU's host have in `is_cuda` and `device`. Everything else is the optimizer's own code.
"""

import sys
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from megatron.balanced.cpu import function_mode

__all__ = ["HOST", "OnHost", "install", "is_on_host"]

HOST = torch.device("cpu", 0)  # the device that the CPU plays has no number


class OnHost(torch.Tensor):
    """A tensor in the memory of the host. What torch makes of it is there, too."""


def is_on_host(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, OnHost)


def _to_host(tensor: torch.Tensor, *unused: Any) -> torch.Tensor:
    return tensor if is_on_host(tensor) else tensor.detach().clone().as_subclass(OnHost)


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    where = args[0] if args and isinstance(args[0], (str, int, torch.device)) else None
    if where == "cpu" or where == HOST:
        return _to_host(tensor)
    if where is not None and is_on_host(tensor):
        tensor = tensor.detach().clone().as_subclass(torch.Tensor)
    return function_mode._tensor_to(tensor, *args, **kwargs)


def install() -> None:
    """Have the CPU device of this process have a host beside it, for good."""
    get_device, get_is_cuda = torch.Tensor.device.__get__, torch.Tensor.is_cuda.__get__

    def is_cuda(tensor: torch.Tensor, *unused: Any) -> bool:
        asking = sys._getframe(2).f_globals.get("__name__", "")  # past the mode that calls this
        if asking == HybridDeviceOptimizer.__module__ or asking.startswith("transformer_engine."):
            return not is_on_host(tensor)
        return get_is_cuda(tensor)

    function_mode._ON_CPU |= {
        torch.Tensor.cpu: _to_host,
        torch.Tensor.to: _to,
        get_is_cuda: is_cuda,
        get_device: lambda tensor, *unused: HOST if is_on_host(tensor) else get_device(tensor),
    }
