"""Named ranges in NVIDIA's Nsight and in PyTorch's profiler for the balancers' plans, transfers and layout changes.

They are off until `name_ranges` is called, as `--balance-report` does. While off, each call costs one check.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["name_ranges", "named"]

_on = False


def name_ranges(on: bool = True) -> None:
    """Switch the ranges of all functions marked with `named` on or off."""
    global _on
    _on = on


def named(what: str) -> Callable[[Callable], Callable]:
    """Decorator: each call of the function is a profiler range "balance: WHAT" on the calling thread."""
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
