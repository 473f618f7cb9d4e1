"""Simulation of deferred weight gradients, which fill the idle time of a pipeline.

The backward of a layer computes two gradients. The previous stage waits for the gradient of the layer's input. The
gradient of the layer's weights is not needed before gradients are reduced (zero bubble, arXiv 2401.10241, section 2).
Here a backward computes the input gradient, sends it, and defers the weight gradient. A rank computes deferred weight
gradients, oldest first,

- while it waits for a message, and after its last backward;
- before a forward, as many as needed to stay within the memory budget.

Everything else is Megatron's schedule, action by action (`balancing.pipeline.schedule`): the order of forwards
and backwards, and when messages are posted. So in cool-down, stages wait only for input gradients, and stages with
little work wait less.

Until its weight gradient is computed, a layer keeps the inputs and output gradients of its matrices. That is nearly as
much as it keeps between forward and backward (32 of 34 bytes an element with a feed-forward width of 4 h, ibid., table
1), and more if it keeps tensors gathered from other ranks (`kept_share`). In 1F1B, late stages keep the activations of
fewer micro-batches than early ones, and deferred gradients use this memory.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancing.layers.memory import in_flight
from balancing.pipeline.schedule import MEGATRON_DEFAULTS, Action, PipelineMessage, Schedule, program

__all__ = ["FilledStep", "SplitPasses", "kept_share", "simulate_fill", "weight_share"]

FloatArray = NDArray[np.float64]


def kept_share(*, gathered_by: int = 1) -> float:
    """Bytes kept until a layer's weight gradient is computed, output gradients included, over the bytes of activations
    that the layer keeps between forward and backward.

    gathered_by: number of ranks of sequence parallelism if each rank keeps two tensors whole: the inputs of the first
        matrix, and the output gradients of the second matrix, of attention and MLP. They are 8 of the 32 bytes an
        element.
    """
    return (24 + 8 * gathered_by) / 34


def weight_share(*, recomputes: bool) -> float:
    """The fraction of a layer's backward seconds that computes weight gradients.

    Weight gradients, input gradients and a forward pass are assumed to take equally long.

    recomputes: whether a backward pass begins with another forward pass.
    """
    return 1 / 3 if recomputes else 1 / 2


@dataclass(frozen=True, eq=False)
class SplitPasses:
    """The costs of one micro-batch on each rank and chunk, with the backward pass split in two.

    forward, input_gradient, weight_gradient: float arrays [rank, chunk], seconds.
    activation: float array [rank, chunk] or one number, size of the activations that the micro-batch keeps between
        forward and backward, in any unit. The fraction `kept` of it stays until the weight gradient is computed.
    pieces: int array [rank, chunk] or one number, number of parts in which the weight gradient of a chunk may be
        computed, such as its layers.
    kept: see `kept_share`.

    Raises ValueError for arrays of wrong shape, and negative or not finite values.
    """

    forward: FloatArray
    input_gradient: FloatArray
    weight_gradient: FloatArray
    activation: FloatArray | float = 1.0
    pieces: NDArray[np.int64] | int = 1
    kept: float = kept_share()

    def __post_init__(self) -> None:
        names = ("forward", "input_gradient", "weight_gradient")
        seconds = [np.asarray(getattr(self, name), dtype=float) for name in names]
        shape = seconds[0].shape
        if len(shape) != 2 or any(part.shape != shape for part in seconds):
            raise ValueError(f"seconds have shapes {[part.shape for part in seconds]}; give three arrays [rank, chunk]")
        activation = np.broadcast_to(np.asarray(self.activation, dtype=float), shape)
        for values in (*seconds, activation):
            _check_finite(values)
        pieces = np.broadcast_to(np.asarray(self.pieces, dtype=np.int64), shape)
        if pieces.min() < 1:
            raise ValueError(f"pieces={pieces.min()} must be at least 1")
        for name, values in zip((*names, "activation", "pieces"), (*seconds, activation, pieces), strict=True):
            object.__setattr__(self, name, values)


def _check_finite(values: FloatArray) -> None:
    if not (np.isfinite(values) & (values >= 0)).all():
        raise ValueError(f"{float(values.min())} is among the seconds and sizes; they must be finite and at least 0")


@dataclass(frozen=True, eq=False)
class FilledStep:
    """One simulated step with deferred weight gradients.

    step_time: seconds from the common start to the last weight gradient.
    peak: float array [rank], most activations at a time, in the unit of `activation`.
    peak_without: float array [rank], the same if no weight gradient is deferred.
    fills: for each rank, the number of pieces of weight gradients computed before each of its forwards and backwards,
        in the order of the schedule. The last number of a rank is for the end of the step.
    """

    step_time: float
    peak: FloatArray
    peak_without: FloatArray
    fills: tuple[tuple[int, ...], ...] = field(repr=False)


class _Stage:
    """The state of one rank while the simulation runs."""

    def __init__(self, actions: tuple[Action, ...], weight: FloatArray, kept: FloatArray, pieces: NDArray[np.int64]):
        self.actions, self.next, self.clock = actions, 0, 0.0
        self.fills = [0]  # pieces computed before each operation so far, and since the last operation
        self.activations = self.peak = 0.0
        self._piece, self._kept_by_piece, self._pieces = weight / pieces, kept / pieces, pieces
        self._deferred: deque[int] = deque()  # the chunk of each piece, oldest first

    def piece(self) -> float | None:
        """Seconds of the oldest piece; None if there is none."""
        return float(self._piece[self._deferred[0]]) if self._deferred else None

    def keep(self, amount: float) -> None:
        self.activations += amount
        self.peak = max(self.peak, self.activations)

    def defer(self, chunk: int) -> None:
        if self._piece[chunk] > 0:
            self._deferred.extend([chunk] * int(self._pieces[chunk]))
        else:
            self.activations -= float(self._kept_by_piece[chunk] * self._pieces[chunk])

    def fill(self) -> None:
        """Compute the oldest piece."""
        chunk = self._deferred.popleft()
        self.clock += float(self._piece[chunk])
        self.activations -= float(self._kept_by_piece[chunk])
        self.fills[-1] += 1


class _Mail:
    """Messages. A message is transferred once both sides have posted it."""

    def __init__(self, transfer: FloatArray):
        self._transfer = transfer
        self._posted: dict[PipelineMessage, float] = {}
        self._there: dict[PipelineMessage, float] = {}
        self._waiting: dict[int, tuple[PipelineMessage, ...]] = {}  # by rank

    def post(self, message: PipelineMessage, now: float) -> list[int]:
        """One side posts `message` at the time `now`. Returns the ranks that waited for this post."""
        if message not in self._posted:
            self._posted[message] = now
            return []
        link = message.source if message.kind == "forward" else message.source - 1
        self._there[message] = max(self._posted[message], now) + float(self._transfer[link])
        woken = [rank for rank, messages in self._waiting.items() if message in messages]
        for rank in woken:
            del self._waiting[rank]
        return woken

    def arrival(self, messages: tuple[PipelineMessage, ...]) -> float | None:
        """The time when all of `messages` have been transferred; None until both sides have posted each of them."""
        if all(message in self._there for message in messages):
            return max(self._there[message] for message in messages)
        return None

    def wake(self, rank: int, messages: tuple[PipelineMessage, ...]) -> None:
        """Make `post` return `rank` when both sides have posted one of `messages`."""
        self._waiting[rank] = messages


def simulate_fill(
    passes: SplitPasses,
    micro_batches: int,
    *,
    spare: float = 0.0,
    transfer: ArrayLike = 0.0,
    schedule: Schedule = MEGATRON_DEFAULTS,
) -> FilledStep:
    """Simulate one step of Megatron's schedule in which weight gradients are deferred.

    micro_batches: per step and pipeline.
    spare: the memory budget of every rank is (1 + spare) times the activations of the fullest rank without deferring.
    transfer, schedule: as in `simulate_schedule`.

    Raises ValueError for negative or not finite values, and sizes that Megatron refuses.
    """
    ranks, chunks = passes.forward.shape
    links = np.broadcast_to(np.asarray(transfer, dtype=float), (ranks,))
    for values in (links, np.asarray(spare)):
        _check_finite(values)
    programs = [program(rank, ranks, micro_batches, chunks=chunks, schedule=schedule) for rank in range(ranks)]
    moments = in_flight(ranks, chunks, micro_batches, replace(schedule, weight_share=0.0))  # [rank, moment, chunk]
    without = np.einsum("rmc,rc->rm", moments, passes.activation).max(axis=1)
    stages = [
        _Stage(actions, weights, passes.kept * row, count)
        for actions, weights, row, count in zip(
            programs, passes.weight_gradient, np.asarray(passes.activation), np.asarray(passes.pieces), strict=True
        )
    ]
    _run(stages, _Mail(links), passes, (1 + spare) * float(without.max()))
    return FilledStep(
        step_time=max(stage.clock for stage in stages),
        peak=np.array([stage.peak for stage in stages]),
        peak_without=without,
        fills=tuple(tuple(stage.fills) for stage in stages),
    )


def _run(stages: list[_Stage], mail: _Mail, passes: SplitPasses, budget: float) -> None:
    """Advance the rank with the earliest clock by one action, until all ranks have ended. A rank therefore never acts
    before an earlier event of another rank is simulated."""
    forward, input_gradient, activation = passes.forward, passes.input_gradient, np.asarray(passes.activation)
    ready = [(0.0, rank) for rank in range(len(stages))]
    while ready:
        _, rank = heapq.heappop(ready)
        stage = stages[rank]
        if stage.next == len(stage.actions):
            if stage.piece() is None:
                continue
            stage.fill()
        elif (operation := stage.actions[stage.next].compute) is not None:
            size = float(activation[rank, operation.chunk])
            if operation.kind == "forward":
                while stage.activations + size > budget * (1 + 1e-9) and stage.piece() is not None:
                    stage.fill()
                stage.keep(size)
                stage.clock += float(forward[rank, operation.chunk])
            else:
                more = (passes.kept - 1) * size
                while more > 0 and stage.activations + more > budget * (1 + 1e-9) and stage.piece() is not None:
                    stage.fill()
                stage.clock += float(input_gradient[rank, operation.chunk])
                stage.keep(more)
                stage.defer(operation.chunk)
            stage.fills.append(0)
            stage.next += 1
        else:
            action = stage.actions[stage.next]
            for message in action.send + action.receive:
                for woken in mail.post(message, stage.clock):
                    stages[woken].clock = max(stages[woken].clock, stage.clock)
                    heapq.heappush(ready, (stages[woken].clock, woken))
            if not action.wait:
                stage.next += 1
            elif (arrival := mail.arrival(action.wait)) is not None:
                piece = stage.piece()
                if piece is not None and stage.clock + piece / 2 < arrival:  # at least half of the piece fits the wait
                    stage.fill()
                else:
                    stage.clock = max(stage.clock, arrival)
                    stage.next += 1
            elif stage.piece() is not None:
                stage.fill()
            else:
                mail.wake(rank, action.wait)
                continue
        heapq.heappush(ready, (stage.clock, rank))
    assert all(stage.next == len(stage.actions) for stage in stages), "the schedule deadlocks"
