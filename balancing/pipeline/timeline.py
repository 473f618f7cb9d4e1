"""Exact simulation of the schedules in `schedule`: the times when each rank computes and waits.

A rank starts an operation when its previous operation has ended and every message that it waits for has arrived. A
message is transferred when both sides have posted it: Megatron's sends are synchronous, over gloo as over NCCL, so a
late receiver delays the sender. Times are maxima and sums over an acyclic graph. The graph depends only on the sizes of
the pipeline, not on the seconds. It is built once for each combination of sizes, and a simulation is one sweep over its
levels.

Assumptions:

- Host time is zero, and operations of one rank never overlap. All ranks begin together, and the step ends with the last
  operation or awaited message. Optimizer and gradient reduction are not included.
- Each message takes the transfer seconds of its link, however many are in flight. Messages do not share bandwidth, and
  neither do the two directions of a link.
- Training frees pipeline outputs (Megatron's deallocate_pipeline_outputs). Warm-up and cool-down do not overlap their
  messages (overlap_p2p_comm_warmup_flush is off, as by default).
"""

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancing.pipeline.schedule import MEGATRON_DEFAULTS, Operation, PipelineMessage, Schedule, program

__all__ = ["Timeline", "simulate_schedule", "simulate_steps"]

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Timeline:
    """One simulated training step.

    operations: the operations of each rank, in execution order.
    start, end: float arrays [rank, operation], seconds.
    step_time: seconds from the common start to the end of the last operation or message.
    """

    operations: tuple[tuple[Operation, ...], ...] = field(repr=False)
    start: FloatArray = field(repr=False)
    end: FloatArray = field(repr=False)
    step_time: float


def simulate_schedule(
    forward: ArrayLike,
    backward: ArrayLike,
    micro_batches: int,
    *,
    transfer: ArrayLike = 0.0,
    schedule: Schedule = MEGATRON_DEFAULTS,
) -> Timeline:
    """Simulate one step of Megatron's 1F1B schedule, or of the interleaved one if there are several chunks a rank.

    forward, backward: seconds per micro-batch, at least 0 and finite, as [rank], [rank, chunk] or
        [rank, chunk, micro_batch]; the two may differ in the number of axes. Recompute is part of backward.
    micro_batches: per step and pipeline.
    transfer: seconds of a message between ranks, one number or an array [rank] with the link from each rank to the
        next (the last entry is the link back to rank 0, which interleaving uses).
    schedule: options if there are several chunks a rank.

    The first call for a combination of sizes builds the graph (tenths of a second for 32 ranks and 128 micro-batches).
    Later calls take milliseconds.
    Raises ValueError for arrays of wrong shape, negative or not finite seconds, and sizes that Megatron refuses.
    """
    forward, backward = np.asarray(forward, dtype=float), np.asarray(backward, dtype=float)
    if forward.ndim < 1 or forward.size < 1:
        raise ValueError(
            f"forward has shape {forward.shape}; give seconds as [rank], [rank, chunk] or [rank, chunk, micro_batch]"
        )
    ranks, chunks = forward.shape[0], forward.shape[1] if forward.ndim > 1 else 1
    graph = _graph(ranks, micro_batches, chunks, schedule)
    shape = (ranks, chunks, micro_batches)
    seconds = np.stack([_seconds("forward", forward, shape), _seconds("backward", backward, shape)])
    links = _links(transfer, ranks)
    duration = np.concatenate([seconds.reshape(-1), links, [0.0]])[graph.duration_index]
    start, end = _sweep(graph, duration)
    return Timeline(
        operations=graph.operations,
        start=start[graph.node_of_operation],
        end=end[graph.node_of_operation],
        step_time=float(end.max()),
    )


def simulate_steps(
    forward: ArrayLike,
    backward: ArrayLike,
    micro_batches: int,
    *,
    transfer: ArrayLike = 0.0,
    schedule: Schedule = MEGATRON_DEFAULTS,
) -> FloatArray:
    """Step seconds of many pipelines of one size at once: float [pipeline].

    forward, backward: seconds per micro-batch as [pipeline, rank, chunk].
    micro_batches, transfer, schedule: as in `simulate_schedule`. Raises the same errors.

    Sixteen pipelines of 8 ranks and 32 micro-batches take about twice as long as one.
    """
    both = np.stack([np.asarray(forward, dtype=float), np.asarray(backward, dtype=float)])
    if both.ndim != 4 or 0 in both.shape:
        raise ValueError(f"forward has shape {both.shape[1:]}; give seconds as [pipeline, rank, chunk]")
    if not (np.isfinite(both) & (both >= 0)).all():
        raise ValueError(f"seconds have {both.min()} among them; they must be finite and at least 0")
    _, pipelines, ranks, chunks = both.shape
    graph = _graph(ranks, micro_batches, chunks, schedule)
    every = both.transpose(0, 2, 3, 1).reshape(-1, pipelines)  # [kind x rank x chunk, pipeline]
    links = np.broadcast_to(_links(transfer, ranks)[:, None], (ranks, pipelines))
    operations = len(every) * micro_batches  # all micro-batches take the same seconds
    index = graph.duration_index
    index = np.where(index < operations, index // micro_batches, index - operations + len(every))
    _, end = _sweep(graph, np.concatenate([every, links, np.zeros((1, pipelines))])[index])
    return np.asarray(end.max(axis=0))


def _links(transfer: ArrayLike, ranks: int) -> FloatArray:
    """Seconds of a message on each link, [rank]."""
    links = np.asarray(transfer, dtype=float)
    if links.shape not in ((), (ranks,)):
        raise ValueError(f"transfer has shape {links.shape}; give one number or one per rank, ({ranks},)")
    if not (np.isfinite(links) & (links >= 0)).all():
        raise ValueError(f"transfer is {links.tolist()}; seconds must be finite and at least 0")
    return np.broadcast_to(links, (ranks,))


def _sweep(graph: "_Graph", duration: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Start and end of each node, seconds [node, ...]. duration: [node, ...], seconds."""
    end = np.zeros((len(duration) + 1, *duration.shape[1:]))  # the last entry is the beginning of the step
    start = np.empty(duration.shape)
    for first, last, before in graph.levels:
        begin = np.maximum.reduce(end.take(before, axis=0, mode="clip"), axis=0, out=start[first:last])
        np.add(begin, duration[first:last], out=end[first:last])
    return start, end


def _seconds(name: str, given: FloatArray, shape: tuple[int, int, int]) -> FloatArray:
    """Seconds as a full [rank, chunk, micro_batch] array."""
    if given.ndim > 3 or given.shape != shape[: given.ndim] or (given.ndim < 2 and shape[1] > 1):
        raise ValueError(f"{name} has shape {given.shape}, which does not fit [rank, chunk, micro_batch] = {shape}")
    if not (np.isfinite(given) & (given >= 0)).all():
        raise ValueError(f"{name} has {given.min()} among its seconds; they must be finite and at least 0")
    return np.broadcast_to(given.reshape(given.shape + (1,) * (3 - given.ndim)), shape)


@dataclass(frozen=True, eq=False)
class _Graph:
    """The dependencies. Nodes are operations and messages, numbered so that each level is one slice.

    levels: (first node, one past the last node, int array [predecessor, node]). In the array, the number of nodes
        stands for no predecessor.
    duration_index: int array [node], index of the node's seconds in the flattened forward, backward and link seconds.
    node_of_operation: int array [rank, operation].
    """

    operations: tuple[tuple[Operation, ...], ...]
    levels: tuple[tuple[int, int, NDArray[np.intp]], ...]
    duration_index: NDArray[np.intp]
    node_of_operation: NDArray[np.intp]


@lru_cache(maxsize=16)
def _graph(ranks: int, micro_batches: int, chunks: int, schedule: Schedule) -> _Graph:
    nodes: dict[tuple[int, Operation] | PipelineMessage, int] = {}  # number in order of appearance
    before: list[set[int]] = []  # predecessors of each node
    source: list[int] = []  # duration_index of each node
    posts: dict[PipelineMessage, list[int]] = {}  # ranks that posted a message: sender and receiver, once each

    def node(key: tuple[int, Operation] | PipelineMessage, index: int) -> int:
        if key not in nodes:
            nodes[key] = len(before)
            before.append(set())
            source.append(index)
        return nodes[key]

    def seconds_of(rank: int, operation: Operation) -> int:
        kind = 0 if operation.kind == "forward" else 1
        return ((kind * ranks + rank) * chunks + operation.chunk) * micro_batches + operation.micro_batch

    def link_of(message: PipelineMessage) -> int:
        step = 0 if message.kind == "forward" else -1
        return 2 * ranks * chunks * micro_batches + (message.source + step) % ranks

    programs = [program(rank, ranks, micro_batches, chunks=chunks, schedule=schedule) for rank in range(ranks)]
    for rank, steps in enumerate(programs):
        now: set[int] = set()  # nodes whose latest end is the rank's current time
        at_post: dict[PipelineMessage, set[int]] = {}
        for step in steps:
            if step.compute is not None:
                this = node((rank, step.compute), seconds_of(rank, step.compute))
                before[this] |= now
                now = {this}
            for message in step.send + step.receive:
                assert (message in step.send) == (message.source == rank), (
                    f"rank {rank} posts {message} on the wrong side"
                )
                posts.setdefault(message, []).append(rank)
                before[node(message, link_of(message))] |= now
                at_post[message] = now
            for message in step.wait:  # nodes before the post also precede the end of the message
                now = (now - at_post.pop(message)) | {nodes[message]}
    for message, posted in posts.items():
        assert len(posted) == 2, f"{message} is posted by ranks {posted}, not by a sender and a receiver"

    level = _levels(before)
    order = np.argsort(level, kind="stable")
    number = np.empty(len(order) + 1, dtype=np.intp)
    number[order] = np.arange(len(order))
    number[-1] = len(order)
    edges = np.searchsorted(level[order], np.arange(level.max() + 2))
    levels = []
    for first, last in pairwise(edges):
        members = [before[old] for old in order[first:last]]
        table = np.full((max(1, *map(len, members), 1), last - first), -1)
        for column, needed in enumerate(members):
            table[: len(needed), column] = sorted(needed)
        levels.append((int(first), int(last), number[table]))
    ordered = tuple(tuple(step.compute for step in steps if step.compute) for steps in programs)
    return _Graph(
        operations=ordered,
        levels=tuple(levels),
        duration_index=np.asarray(source, dtype=np.intp)[order],
        node_of_operation=np.array([[number[nodes[rank, op]] for op in row] for rank, row in enumerate(ordered)]),
    )


def _levels(before: list[set[int]]) -> NDArray[np.intp]:
    """The length of the longest path to each node."""
    after: list[list[int]] = [[] for _ in before]
    missing = [len(needed) for needed in before]
    for this, needed in enumerate(before):
        for other in needed:
            after[other].append(this)
    level = np.zeros(len(before), dtype=np.intp)
    ready = [this for this, count in enumerate(missing) if count == 0]
    done = 0
    while ready:
        this = ready.pop()
        done += 1
        for other in after[this]:
            level[other] = max(level[other], level[this] + 1)
            missing[other] -= 1
            if missing[other] == 0:
                ready.append(other)
    assert done == len(before), "the schedule deadlocks: its graph has a cycle"
    return level
