"""A device clock that a test sets, for everything that is decided by what work costs.

What a second of a real clock holds depends on what else the machine does. In a rank with this clock the device works
for exactly as long as the test plants, so that costs, plans and decisions are the same in every run.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["SetClock", "slow_layers"]


class SetClock:
    """A `balancing.clock.DeviceClock`: the device works while `work` says so, and at no other time.

    waits: ranks do wait for one another, since work takes as long on the wall. Without it no time passes but the
    planted, and a rank's wall-clock is its own work.
    """

    def __init__(self, waits: bool = False) -> None:
        self._waits = waits
        self._worked = 0.0

    def install(self) -> "SetClock":
        """Make it the clock of this rank's CPU device. Returns itself."""
        from megatron.balanced import observer

        observer.CpuClock = lambda: self
        return self

    def work(self, seconds: float) -> None:
        """Have the device work for `seconds`, of the pass that is at hand."""
        self._worked += seconds
        if self._waits:
            time.sleep(seconds)

    def count_operations(self, seconds: float) -> "SetClock":
        """Have each of torch's operations take `seconds` from now on. Returns itself."""
        _Counting(self, seconds).__enter__()
        return self

    def mark(self) -> tuple[float, float]:
        return time.perf_counter() if self._waits else self._worked, self._worked

    def seconds(
        self, origin: tuple[float, float], begin: tuple[float, float], end: tuple[float, float]
    ) -> tuple[float, float, float]:
        return begin[0] - origin[0], end[0] - begin[0], end[1] - begin[1]


class _Counting(TorchDispatchMode):
    """Work of equal length for every operation that reaches the device, those of backward passes included."""

    def __init__(self, clock: SetClock, seconds: float) -> None:
        super().__init__()
        self._clock, self._seconds = clock, seconds

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._clock.work(self._seconds)
        return operation(*args, **(kwargs or {}))


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, work: Callable[[], None]) -> torch.Tensor:
        ctx.work = work
        return hidden.clone()  # Megatron frees what a stage sends on, which must not be a view

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.work()
        return gradient, None


def slow_layers(clock: SetClock, seconds: Callable[[int], tuple[float, float]]) -> None:
    """Have layers take what `seconds` gives for their number from 0: forward, and backward where they have such a pass.

    They take it wherever they move.
    """
    from megatron.core.transformer.transformer_layer import TransformerLayer

    original = TransformerLayer.forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        there, back = seconds(self.layer_number - 1)
        clock.work(there)
        output, context = original(self, *args, **kwargs)
        return _Backward.apply(output, lambda: clock.work(back)), context

    TransformerLayer.forward = forward
