"""A device clock that a test sets, for tests of decisions that depend on measured time.

A real clock measures the load of the machine as well. In a rank with this clock, the device works for exactly as long
as the test says, so that costs, plans and decisions are the same in every run.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["SetClock", "TwoStreams", "slow_layers", "slow_parts"]


class SetClock:
    """A `balancing.clock.DeviceClock` on which the device works only during calls of `work`.

    waits: work also takes wall-clock time, so that ranks wait for each other. Without it the wall-clock time of a rank
    is its own work.
    """

    def __init__(self, waits: bool = False) -> None:
        self._waits = waits
        self._worked = 0.0

    def install(self) -> "SetClock":
        """Make it the clock of this rank's CPU device. Returns itself."""
        from megatron.balanced.observe import observer

        observer.CpuClock = lambda: self
        return self

    def work(self, seconds: float) -> None:
        """The device works for `seconds`."""
        self._worked += seconds
        if self._waits:
            time.sleep(seconds)

    def count_operations(self, seconds: float) -> "SetClock":
        """From now on each operation of torch takes `seconds`. Returns itself."""
        _Counting(self, seconds).__enter__()
        return self

    def mark(self) -> tuple[float, float]:
        return time.perf_counter() if self._waits else self._worked, self._worked

    def seconds(
        self, origin: tuple[float, float], begin: tuple[float, float], end: tuple[float, float]
    ) -> tuple[float, float, float]:
        return begin[0] - origin[0], end[0] - begin[0], end[1] - begin[1]


class TwoStreams(SetClock):
    """A `SetClock` of a device with streams: work occupies the current stream, and a stream that waits for an event is
    idle until then. Megatron-LM computes on one stream and sends tokens to experts on another."""

    def __init__(self) -> None:
        super().__init__()
        self._times: dict[Any, float] = {}
        self._current: Any = None

    def install(self) -> "TwoStreams":
        super().install()
        from megatron.balanced.cpu import fakes

        clock, first = self, torch.cuda.current_stream()
        self._current = first

        def record(self: Any, stream: Any = None) -> None:
            self.at = clock._times.get(stream or clock._current, 0.0)

        def wait(self: Any, stream: Any = None) -> None:
            stream = stream or clock._current
            clock._times[stream] = max(clock._times.get(stream, 0.0), getattr(self, "at", 0.0))

        @contextlib.contextmanager
        def stream_is(stream: Any = None) -> Iterator[None]:
            before, clock._current = clock._current, stream or clock._current
            try:
                yield
            finally:
                clock._current = before

        fakes.Event.record, fakes.Event.wait = record, wait
        torch.cuda.stream, torch.cuda.current_stream = stream_is, lambda device=None: clock._current
        return self

    def work(self, seconds: float) -> None:
        self._times[self._current] = self._times.get(self._current, 0.0) + seconds

    def mark(self) -> tuple[float, float]:
        now = self._times.get(self._current, 0.0)
        return now, now


class _Counting(TorchDispatchMode):
    """The same time for every operation on the device, including those of backward passes."""

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


def slow_layers(clock: SetClock, seconds: Callable[[int], tuple[float, float]], layers: Any = None) -> None:
    """Give each layer the forward and backward time that `seconds` returns for its number (from 0), on any rank.

    layers: their class, Megatron's TransformerLayer by default.
    """
    from megatron.core.transformer.transformer_layer import TransformerLayer

    layers = layers or TransformerLayer
    original = layers.forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        there, back = seconds(self.layer_number - 1)
        clock.work(there)
        output = original(self, *args, **kwargs)
        first, *others = output if isinstance(output, tuple) else (output,)
        first = _Backward.apply(first, lambda: clock.work(back))
        return (first, *others) if isinstance(output, tuple) else first

    layers.forward = forward


def slow_parts(clock: SetClock, seconds: Callable[[int], dict[str, tuple[float, float]]]) -> None:
    """Give parts of each layer with experts forward and backward times.

    seconds: number of a layer (from 0) -> "attention", "dispatch", "experts", "combine" -> the two times.
    """
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_layer import TransformerLayer

    def slow(owner: Any, name: str, part: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            there, back = seconds(self.layer_number - 1)[part]
            clock.work(there)
            output = original(self, *args, **kwargs)
            first, *others = output if isinstance(output, tuple) else (output,)
            first = _Backward.apply(first, lambda: clock.work(back))
            return (first, *others) if isinstance(output, tuple) else first

        setattr(owner, name, run)

    slow(TransformerLayer, "_forward_attention", "attention")
    slow(MoELayer, "dispatch", "dispatch")
    slow(MoELayer, "routed_experts_compute", "experts")
    slow(MoELayer, "combine", "combine")
