"""The optimal plan: the least time of the slowest stage, with memory as a hard limit.

With one chunk a stage this is one exact linear partition. With several, the load of a rank is the sum of distant parts
of the model, and the exact optimum takes more than milliseconds. So one group of chunks (the v-th of every rank) after
the other is partitioned exactly with the others fixed, and the boundaries between groups are shifted by one layer
either way, until nothing improves. The objective is lexicographic: the slowest rank, since a rank computes all its
chunks in a step; the slowest chunk, which limits the pipeline while it fills; the bytes moved. This is a local search
from several starting points (more for smaller models): never worse than any of them, not always the optimum.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from balancing.layers.memory import LayerMemory, in_flight
from balancing.layers.planners.linear_partition import Room, least_over, linear_partition

__all__ = ["Problem", "memory_shortfall", "optimal_bounds"]

FloatArray = NDArray[np.float64]
_STARTS = 2048  # chunks x layers x starting points in either direction: keeps the largest models at 50 ms


@dataclass(frozen=True, eq=False)
class Problem:
    """The checked input of a planner.

    cost: [layer], seconds.
    stages, virtual: pipeline size, and chunks a stage.
    embedding, head: seconds fixed to the first and the last stage.
    memory, limit: bytes of layers, and of each stage [stage]; None if memory does not matter.
    home: [layer], the stage that holds each layer now, -1 for none.
    weight: [layer], bytes to move it.
    least: fewest layers of a chunk.
    micro_batches: of a step, None for many.
    mtp: seconds of multi-token prediction.
    behind: chunks at the end of the pipeline that have no layers; multi-token prediction is on the one before.
    """

    cost: FloatArray
    stages: int
    virtual: int
    embedding: float
    head: float
    memory: LayerMemory | None
    limit: FloatArray | None
    home: NDArray[np.int64]
    weight: FloatArray
    least: int
    micro_batches: int | None = None
    mtp: float = 0.0
    behind: int = 0

    @property
    def layers(self) -> int:
        return len(self.cost)

    def fixed(self) -> FloatArray:
        """Float array [stage]: seconds that no plan moves."""
        load = np.zeros(self.stages)
        load[0] += self.embedding
        load[-1] += self.head
        load[-1 - self.behind] += self.mtp
        return load

    def filled(self, group: int) -> int:
        """The number of stages whose chunk `group` may have layers."""
        return self.stages - (self.behind if group == self.virtual - 1 else 0)


def _by_chunk(values: FloatArray, problem: Problem, bounds: Sequence[int]) -> FloatArray:
    """The sums of `values` [layer] over chunks, [chunk, stage]; bounds: [virtual * stages + 1], along the pipeline."""
    prefix = np.concatenate([[0.0], np.cumsum(values)])
    return np.diff(prefix[np.asarray(bounds)]).reshape(problem.virtual, problem.stages)


def room_of(problem: Problem, bounds: Sequence[int], group: int) -> Room | None:
    """The memory limits of chunk `group` of each stage, beside the other chunks of the stage in `bounds`."""
    memory, limit, virtual = problem.memory, problem.limit, problem.virtual
    if memory is None or limit is None:
        return None
    moments = in_flight(problem.stages, virtual, problem.micro_batches)
    others = np.arange(virtual) != group
    static = _by_chunk(memory.static, problem, bounds)[others].sum(0)
    held = _by_chunk(memory.activation_of_layers, problem, bounds) * others[:, None]
    static += memory.buffers
    static[[0, -1]] += memory.embedding, memory.head
    static[-1 - problem.behind] += memory.mtp
    held[0, 0] += memory.embedding_activation
    held[-1, -1] += memory.head_activation
    part = slice(bounds[group * problem.stages], bounds[(group + 1) * problem.stages])
    base = static[:, None] + np.einsum("smv,vs->sm", moments, held)
    return Room(memory.static[part], memory.activation_of_layers[part], base, moments[:, :, group].astype(float), limit)


def optimal_bounds(problem: Problem, start: Sequence[int]) -> list[int]:
    """Boundaries [virtual * stages + 1] of the best partition found; [] if none fits the memory.

    start: an additional starting point, used only with several chunks a stage.
    """
    if problem.virtual == 1:
        return _solve(problem, [0] * problem.stages + [problem.layers], 0)
    found = [_descend(problem, list(each)) for each in (_even_chunks(problem), start, *_even_numbers(problem))]
    best = min(found, key=lambda bounds: _quality(problem, bounds))
    return best if _quality(problem, best)[0] <= 0 else []


def memory_shortfall(problem: Problem) -> float:
    """The fewest bytes by which the fullest stage exceeds its limit; at most 0 if a plan fits.

    Exact with one chunk a stage. With more, that of a plan that divides the bytes evenly over the chunks.
    """
    memory = problem.memory
    assert memory is not None
    if problem.virtual == 1:
        room = room_of(problem, [0] * problem.stages + [problem.layers], 0)
        assert room is not None
        return least_over(room.of_first(problem.filled(0)), problem.least)
    held = memory.static + problem.stages * memory.activation_of_layers
    even = _even_chunks(replace(problem, cost=held, embedding=memory.embedding, head=memory.head, mtp=memory.mtp))
    return _quality(problem, even)[0]


def _solve(problem: Problem, bounds: list[int], group: int) -> list[int]:
    """`bounds` with chunk `group` of every stage partitioned anew; [] if that cannot fit."""
    stages, filled = problem.stages, problem.filled(group)
    first, last = bounds[group * stages], bounds[(group + 1) * stages]
    others = np.arange(problem.virtual) != group
    fixed = problem.fixed() + _by_chunk(problem.cost, problem, bounds)[others].sum(0)
    room = room_of(problem, bounds, group)
    inner = linear_partition(
        problem.cost[first:last],
        fixed[:filled],
        home=problem.home[first:last],
        weight=problem.weight[first:last],
        least=problem.least,
        room=None if room is None else room.of_first(filled),
    )
    if not inner:
        return []
    empty = [last] * (stages - filled)
    return [*bounds[: group * stages], *(first + i for i in inner), *empty, *bounds[(group + 1) * stages + 1 :]]


def _even_chunks(problem: Problem) -> list[int]:
    """Boundaries with the least load of the slowest chunk, as if each were a stage."""
    fixed = np.zeros(problem.stages * problem.virtual)
    fixed[[0, -1]] += problem.embedding, problem.head
    fixed[-1 - problem.behind] += problem.mtp
    nowhere = np.full(problem.layers, -1)
    filled = fixed[: fixed.size - problem.behind]
    even = linear_partition(problem.cost, filled, home=nowhere, weight=problem.weight, least=problem.least)
    return [*even, *[problem.layers] * problem.behind]


def _even_numbers(problem: Problem) -> Iterator[list[int]]:
    """Boundaries of chunks that are equal within each group, for several positions of the boundaries between groups."""
    layers, stages, virtual = problem.layers, problem.stages, problem.virtual
    reach = min(_STARTS // (stages * virtual * layers), layers)
    for shift in range(-reach, reach + 1) if reach else ():
        inner = [group * layers // virtual + shift for group in range(1, virtual)]
        groups = list(pairwise([0, *inner, layers]))
        if min(last - first for first, last in groups) >= problem.least * stages:
            equal = [
                first + (last - first) * min(stage, filled) // filled
                for group, (first, last) in enumerate(groups)
                for filled in [problem.filled(group)]
                for stage in range(stages)
            ]
            yield [*equal, layers]


def _quality(problem: Problem, bounds: Sequence[int]) -> tuple[float, float, float, float]:
    """The objective, to be minimized: bytes over the limit, slowest rank, slowest chunk, bytes moved."""
    over = 0.0
    room = room_of(problem, bounds, 0)
    if room is not None:
        borders = np.asarray(bounds[: problem.stages + 1])
        over = max(float(np.diagonal(room.over(borders[:-1], borders[1:])).max()), 0.0)
    chunk = _by_chunk(problem.cost, problem, bounds)
    chunk[0, 0] += problem.embedding
    chunk[-1, -1] += problem.head
    chunk[-1, -1 - problem.behind] += problem.mtp
    home = np.repeat(np.arange(chunk.size) % problem.stages, np.diff(bounds))
    moved = problem.weight[(home != problem.home) & (problem.home >= 0)].sum()
    # Twelve digits, so that the rounding of sums in another order is no improvement.
    return over, float(f"{chunk.sum(0).max():.12g}"), float(f"{chunk.max():.12g}"), float(moved)


def _descend(problem: Problem, bounds: list[int]) -> list[int]:
    """Partition one group of chunks after the other, and shift boundaries between groups, until nothing improves."""
    stages, virtual = problem.stages, problem.virtual
    tries = [(group, 0) for group in range(virtual)]
    tries += [(group, step) for group in range(virtual - 1) for step in (-1, 1)]
    quality = _quality(problem, bounds)
    since = 0  # tries without success
    while since < len(tries):
        for group, step in tries:
            since += 1
            other = list(bounds)
            if step:
                border = (group + 1) * stages
                other[border] += step
                if min(np.diff(other)[border - 1 : border + 1]) < problem.least:
                    continue
                other = _solve(problem, other, group + (step > 0)) or other
            other = _solve(problem, other, group) or other
            better = _quality(problem, other)
            if better < quality:
                bounds, quality, since = other, better, 0
    return bounds
