"""Megatron's 1F1B and interleaved 1F1B schedules as pure functions: the program of every pipeline rank.

Whether a move pays depends on which ranks wait for which others. A planner therefore needs the schedule itself; a
formula for equal stages is not enough. This module contains the program of one training step in megatron-core 0.19.2:
compute, post sends and receives, wait. `balancing.pipeline.timeline` computes its times.

Ranks are numbered along the pipeline. P is the pipeline size. With V chunks a rank, chunk c of rank r is virtual stage
c * P + r. Without interleaving, the warm-up of a rank has P - r - 1 forwards; then forwards and backwards alternate.
With interleaving (Narayanan et al., arXiv 2104.04473, section 2.2), a rank runs micro-batches in groups, each group
through one chunk after the other. The warm-up then has 2 (P - r - 1) + (V - 1) * group forwards.

Messages are part of the program, because a rank that waits for a message does not compute:

- Not interleaved: after each forward, a rank sends the output and receives a gradient in one blocking exchange. After
  each backward, it sends the gradient and receives an activation. Only warm-up and cool-down have separate sends and
  receives.
- Interleaved, not overlapped: forward and backward run back to back, then all four messages in one blocking exchange.
- Interleaved, overlapped (Megatron's default): receives are posted one operation ahead and waited for just before use.
  The wait for the send of a gradient is deferred until the next gradient is sent. The wait for the send of an
  activation is immediate, since training frees pipeline outputs.
- Interleaved, layers in parts (--overlap-moe-expert-parallel-comm): a forward and a backward run as one operation,
  between the waits and the sends of both. Warm-up is one forward longer, so that the two never depend on each other.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

__all__ = ["MEGATRON_DEFAULTS", "Action", "Operation", "PipelineMessage", "Schedule", "operations", "program"]

Kind = Literal["forward", "backward"]

MOST_FORWARDS = 1_000_000  # forward passes of all ranks in a step; simulating as many takes two minutes


class Operation(NamedTuple):
    """One pass of one micro-batch through one chunk of the rank that runs it."""

    kind: Kind
    chunk: int
    micro_batch: int


@dataclass(frozen=True)
class Schedule:
    """Options of the schedule, with Megatron's defaults. All except `weight_share` apply to several chunks a rank.

    group: micro-batches that pass through a chunk before the next chunk runs (Megatron's
        microbatch_group_size_per_vp_stage); the pipeline size if None.
    overlap: whether messages overlap with compute (Megatron's overlap_p2p_comm). None is Megatron's default: yes with
        interleaving, no without.
    in_parts: whether a forward and a backward run as one operation, layer part by layer part (Megatron's
        overlap_moe_expert_parallel_comm).
    weight_share: fraction of the layers' backward seconds that computes weight gradients and is deferred into waits
        (`balancing.layers.simulated_fill`). 0 defers nothing.
    """

    group: int | None = None
    overlap: bool | None = None
    in_parts: bool = False
    weight_share: float = 0.0


MEGATRON_DEFAULTS = Schedule()


class PipelineMessage(NamedTuple):
    """The output of an operation on rank `source`: an activation for the next stage or a gradient for the previous one.

    kind: "forward" for an activation, "backward" for a gradient.
    """

    kind: Kind
    source: int
    chunk: int
    micro_batch: int


class Action(NamedTuple):
    """One entry of a rank's program: run an operation, post messages, or wait for messages. Unused fields are empty."""

    compute: Operation | None = None
    send: tuple[PipelineMessage, ...] = ()
    receive: tuple[PipelineMessage, ...] = ()
    wait: tuple[PipelineMessage, ...] = ()


def operations(
    ranks: int, micro_batches: int, *, chunks: int = 1, schedule: Schedule = MEGATRON_DEFAULTS
) -> tuple[tuple[Operation, ...], ...]:
    """The order of forwards and backwards on each rank.

    ranks: pipeline size P.
    micro_batches: per step and data-parallel replica.
    chunks: model chunks a rank (virtual pipeline size); 1 is the schedule without interleaving.
    schedule: options if chunks > 1.

    Returns one tuple a rank, each with chunks * micro_batches forwards and as many backwards.
    Raises ValueError for sizes that Megatron refuses, see `program`.
    """
    return tuple(
        tuple(step.compute for step in steps if step.compute)
        for steps in (program(rank, ranks, micro_batches, chunks=chunks, schedule=schedule) for rank in range(ranks))
    )


@lru_cache(maxsize=1024)
def program(
    rank: int,
    ranks: int,
    micro_batches: int,
    *,
    chunks: int = 1,
    schedule: Schedule = MEGATRON_DEFAULTS,
) -> tuple[Action, ...]:
    """The program of pipeline rank `rank` (from 0) in one step, in order.

    ranks, micro_batches, chunks, schedule: as in `operations`.

    Raises ValueError for sizes below 1, more than MOST_FORWARDS forward passes, interleaving on one rank, overlap
    without interleaving, a group that is smaller than the pipeline or larger than the number of micro-batches, a last
    group smaller than the pipeline, and interleaving without overlap on two ranks (both neighbours are then the same
    rank, so their messages could be confused).
    """
    group = ranks if schedule.group is None else schedule.group
    overlap = chunks > 1 if schedule.overlap is None else schedule.overlap
    _check(ranks, micro_batches, chunks, group, overlap)
    assert 0 <= rank < ranks, f"rank {rank} of {ranks}"
    if ranks == 1:
        kinds: tuple[Kind, ...] = ("forward", "backward")
        return tuple(Action(Operation(kind, 0, batch)) for batch in range(micro_batches) for kind in kinds)
    if chunks == 1:
        return tuple(_plain(rank, ranks, micro_batches))
    return tuple(_interleaved(_Interleaving(rank, ranks, micro_batches, chunks, group, schedule.in_parts), overlap))


def _check(ranks: int, micro_batches: int, chunks: int, group: int, overlap: bool) -> None:
    for name, value in (("ranks", ranks), ("micro_batches", micro_batches), ("chunks", chunks)):
        if value < 1:
            raise ValueError(f"{name} is {value}, but a pipeline schedule needs at least 1")
    if (forwards := ranks * micro_batches * chunks) > MOST_FORWARDS:
        raise ValueError(
            f"{micro_batches:,} micro-batches through {ranks:,} stages of {chunks:,} chunks are {forwards:,} forward "
            f"passes, of which at most {MOST_FORWARDS:,} are simulated; use fewer micro-batches"
        )
    if chunks == 1:
        if overlap:
            raise ValueError(
                "overlap=True needs chunks > 1: the schedule without interleaving does not overlap messages"
            )
        return
    if ranks == 1:
        raise ValueError(f"chunks={chunks} needs at least 2 pipeline ranks; use chunks=1 on one rank")
    if ranks == 2 and not overlap:
        raise ValueError("interleaving without overlap needs at least 3 pipeline ranks; use overlap=True on 2")
    if not ranks <= group <= micro_batches:
        raise ValueError(
            f"interleaving takes micro-batches in groups of {group}, which must lie between the pipeline size {ranks} "
            f"and the number of micro-batches {micro_batches}; use more micro-batches or chunks=1"
        )
    if 0 < micro_batches % group < ranks:
        raise ValueError(
            f"{micro_batches} micro-batches in groups of {group} leave a last group of {micro_batches % group}, fewer "
            f"than the {ranks} pipeline ranks; use a multiple of {group} micro-batches"
        )


def _exchange(send: tuple[PipelineMessage, ...], receive: tuple[PipelineMessage, ...]) -> Iterator[Action]:
    """Post messages and wait for all of them."""
    if send or receive:
        yield Action(send=send, receive=receive)
        yield Action(wait=send + receive)


def _plain(rank: int, ranks: int, micro_batches: int) -> Iterator[Action]:
    """1F1B without interleaving, on at least two ranks."""
    warm_up = min(ranks - rank - 1, micro_batches)
    steady = micro_batches - warm_up

    def activation_in(batch: int) -> tuple[PipelineMessage, ...]:
        return (PipelineMessage("forward", rank - 1, 0, batch),) if rank > 0 else ()

    def activation_out(batch: int) -> tuple[PipelineMessage, ...]:
        return (PipelineMessage("forward", rank, 0, batch),) if rank < ranks - 1 else ()

    def gradient_in(batch: int) -> tuple[PipelineMessage, ...]:
        return (PipelineMessage("backward", rank + 1, 0, batch),) if rank < ranks - 1 else ()

    def gradient_out(batch: int) -> tuple[PipelineMessage, ...]:
        return (PipelineMessage("backward", rank, 0, batch),) if rank > 0 else ()

    for batch in range(warm_up):
        yield from _exchange((), activation_in(batch))
        yield Action(Operation("forward", 0, batch))
        yield from _exchange(activation_out(batch), ())
    if steady:
        yield from _exchange((), activation_in(warm_up))
    for batch in range(steady):
        yield Action(Operation("forward", 0, warm_up + batch))
        yield from _exchange(activation_out(warm_up + batch), gradient_in(batch))
        yield Action(Operation("backward", 0, batch))
        more = activation_in(warm_up + batch + 1) if batch < steady - 1 else ()
        yield from _exchange(gradient_out(batch), more)
    for batch in range(steady, micro_batches):
        yield from _exchange((), gradient_in(batch))
        yield Action(Operation("backward", 0, batch))
        yield from _exchange(gradient_out(batch), ())


class _Interleaving:
    """The operations and messages of the k-th forward and the k-th backward of a rank."""

    def __init__(self, rank: int, ranks: int, micro_batches: int, chunks: int, group: int, in_parts: bool):
        self.rank, self.ranks, self.chunks, self.in_parts = rank, ranks, chunks, in_parts
        self.table = [
            (chunk, batch)
            for begin in range(0, micro_batches, group)
            for chunk in range(chunks)
            for batch in range(begin, min(begin + group, micro_batches))
        ]
        self.total = len(self.table)
        self.warm_up = min(2 * (ranks - rank - 1) + (chunks - 1) * group + in_parts, self.total)

    def operation(self, k: int, kind: Kind) -> Operation:
        chunk, batch = self.table[k]
        return Operation(kind, chunk if kind == "forward" else self.chunks - 1 - chunk, batch)

    def _first_rank(self, kind: Kind) -> int:
        return 0 if kind == "forward" else self.ranks - 1

    def sent(self, k: int, kind: Kind) -> tuple[PipelineMessage, ...]:
        """The messages sent after operation k. The last virtual stage sends no activation, the first no gradient."""
        operation = self.operation(k, kind)
        final = self.chunks - 1 if kind == "forward" else 0
        if self.rank == self.ranks - 1 - self._first_rank(kind) and operation.chunk == final:
            return ()
        return (PipelineMessage(kind, self.rank, operation.chunk, operation.micro_batch),)

    def received(self, k: int, kind: Kind) -> tuple[PipelineMessage, ...]:
        """The receive posted with operation k, the input of operation k + 1. k = -1: the receive before the first one.

        The rank where a pass begins receives its inputs from the rank where the pass ends. That rank is ranks - 1
        operations behind.
        """
        if self.rank != self._first_rank(kind):
            if k + 1 == self.total:
                return ()
            operation = self.operation(k + 1, kind)
            source = self.rank - 1 if kind == "forward" else self.rank + 1
            return (PipelineMessage(kind, source, operation.chunk, operation.micro_batch),)
        if k == self.total - 1 or k < self.ranks - 1:
            return ()
        operation = self.operation(k - (self.ranks - 1), kind)
        if operation.chunk == (self.chunks - 1 if kind == "forward" else 0):
            return ()
        return (PipelineMessage(kind, self.ranks - 1 - self.rank, operation.chunk, operation.micro_batch),)

    def has_input(self, k: int, kind: Kind) -> bool:
        """Whether operation k needs a tensor from another rank."""
        first = 0 if kind == "forward" else self.chunks - 1
        return self.rank != self._first_rank(kind) or self.operation(k, kind).chunk != first


def _interleaved(order: _Interleaving, overlap: bool) -> Iterator[Action]:
    """Interleaved 1F1B. The k-th backward of the steady phase follows forward warm_up + k."""
    steady = order.total - order.warm_up
    activations: list[PipelineMessage] = []  # receives posted ahead, oldest first
    gradients: list[PipelineMessage] = []
    gradient_sent: tuple[PipelineMessage, ...] = ()  # overlapped send with a deferred wait

    yield from _exchange((), order.received(-1, "forward"))
    for k in range(order.warm_up):
        yield Action(order.operation(k, "forward"))
        receive = order.received(k, "forward")
        last = k == order.warm_up - 1 and steady > 0
        if last and not overlap:
            receive += order.received(-1, "backward")
        yield from _exchange(order.sent(k, "forward"), receive)
        if last and overlap and (ahead := order.received(-1, "backward")):
            yield Action(receive=ahead)
            gradients += ahead

    for k in range(steady):
        forward = order.warm_up + k
        activation = order.received(forward, "forward") if k < steady - 1 else ()
        gradient = order.received(k, "backward")
        if not overlap:
            yield Action(order.operation(forward, "forward"))
            yield Action(order.operation(k, "backward"))
            yield from _exchange(order.sent(forward, "forward") + order.sent(k, "backward"), activation + gradient)
            continue
        if order.has_input(forward, "forward") and activations:
            yield Action(wait=(activations.pop(0),))
        if order.in_parts and order.has_input(k, "backward") and gradients:
            yield Action(wait=(gradients.pop(0),))
        yield Action(order.operation(forward, "forward"))
        if order.in_parts:
            yield Action(order.operation(k, "backward"))
        send = order.sent(forward, "forward")
        if send or activation:
            yield Action(send=send, receive=activation)
        activations += activation
        if send:
            yield Action(wait=send)
        if not order.in_parts:
            if order.has_input(k, "backward") and gradients:
                yield Action(wait=(gradients.pop(0),))
            yield Action(order.operation(k, "backward"))
        send = order.sent(k, "backward")
        if send or gradient:
            yield Action(send=send, receive=gradient)
        gradients += gradient
        if gradient_sent:
            yield Action(wait=gradient_sent)
        gradient_sent = send

    if not steady:
        yield from _exchange((), order.received(-1, "backward"))
    for k in range(steady, order.total):
        if order.has_input(k, "backward") and gradients:
            yield Action(wait=(gradients.pop(0),))
        yield Action(order.operation(k, "backward"))
        yield from _exchange(order.sent(k, "backward"), order.received(k, "backward"))
    if gradient_sent:
        yield Action(wait=gradient_sent)
    assert not activations and not gradients, "a receive was posted that no operation waited for"
