"""Names in NVIDIA's Nsight and in PyTorch's profiler for what balancers do: plans, transfers, moves, changes of layout.

Off until `name_ranges`, as with `--balance-report`: a profile is read beside a report, and other runs pay nothing.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["name_ranges", "named"]

_on = False


def name_ranges(on: bool = True) -> None:
    """Name what functions marked with `named` do from now on, or stop."""
    global _on
    _on = on


def named(what: str) -> Callable[[Callable], Callable]:
    """Marks a function: its calls are a range called "balance: WHAT" on the thread that makes them."""
    name = f"balance: {what}"

    def mark(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not _on:
                return function(*args, **kwargs)
            with torch.profiler.record_function(name):
                if not torch.cuda.is_available():
                    return function(*args, **kwargs)
                torch.cuda.nvtx.range_push(name)
                try:
                    return function(*args, **kwargs)
                finally:
                    torch.cuda.nvtx.range_pop()

        return call

    return mark
