"""The optimal plan: the slowest stage as fast as possible, with memory as a hard limit, for one chunk a stage or more.

With one chunk a stage this is one exact cut. With several, the parts of a rank's load stand far apart in the model, and
the exact optimum is out of reach in milliseconds. So one group of chunks (the v-th of every rank) after the other is
cut exactly with the others held fixed, and the borders between groups are tried one layer either way, until nothing
improves: first the slowest rank counts, since a rank computes all its chunks in a step, then the slowest chunk, since
that sets the pace while the pipeline fills, then the bytes moved. It is a descent from several starting points, the
more the smaller the model: never worse than any of them, not always the optimum.
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
_STARTS = 2048  # chunks times layers times starting points tried either way: keeps the largest models at 50 ms


@dataclass(frozen=True, eq=False)
class Problem:
    """What there is to divide.

    cost: [layer], seconds. embedding, head: seconds fixed to the first and the last stage. memory, limit: bytes, limit
    as [stage]; None if memory does not matter. home: [layer], the stage that holds each layer now, -1 if none does.
    weight: [layer], bytes to move a layer. least: fewest layers a chunk. micro_batches: of a step, None for many.
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

    @property
    def layers(self) -> int:
        return len(self.cost)

    def fixed(self) -> FloatArray:
        """Seconds of each stage that no plan moves."""
        load = np.zeros(self.stages)
        load[0] += self.embedding
        load[-1] += self.head
        return load


def _by_chunk(values: FloatArray, problem: Problem, bounds: Sequence[int]) -> FloatArray:
    """[chunk, stage], the sum of `values` [layer] over each chunk; bounds [virtual * stages + 1] run along the
    pipeline."""
    prefix = np.concatenate([[0.0], np.cumsum(values)])
    return np.diff(prefix[np.asarray(bounds)]).reshape(problem.virtual, problem.stages)


def room_of(problem: Problem, bounds: Sequence[int], group: int) -> Room | None:
    """Where chunk `group` of each stage fits beside the stage's other chunks in `bounds`."""
    memory, limit, virtual = problem.memory, problem.limit, problem.virtual
    if memory is None or limit is None:
        return None
    moments = in_flight(problem.stages, virtual, problem.micro_batches)
    others = np.arange(virtual) != group
    static = _by_chunk(memory.static, problem, bounds)[others].sum(0)
    held = _by_chunk(memory.activation_of_layers, problem, bounds) * others[:, None]
    static[[0, -1]] += memory.embedding, memory.head
    held[0, 0] += memory.embedding_activation
    held[-1, -1] += memory.head_activation
    part = slice(bounds[group * problem.stages], bounds[(group + 1) * problem.stages])
    base = static[:, None] + np.einsum("smv,vs->sm", moments, held)
    return Room(memory.static[part], memory.activation_of_layers[part], base, moments[:, :, group].astype(float), limit)


def optimal_bounds(problem: Problem, start: Sequence[int]) -> list[int]:
    """Borders [virtual * stages + 1] of the best partition found; [] if none is found that fits the memory.

    start: a partition to begin from besides those tried anyway, used only with several chunks a stage.
    """
    if problem.virtual == 1:
        return _solve(problem, [0] * problem.stages + [problem.layers], 0)
    found = [_descend(problem, list(each)) for each in (_even_chunks(problem), start, *_even_numbers(problem))]
    best = min(found, key=lambda bounds: _quality(problem, bounds))
    return best if _quality(problem, best)[0] <= 0 else []


def memory_shortfall(problem: Problem) -> float:
    """How many bytes over its limit the fullest stage is, at the least; not above 0 if a plan fits.

    Exact with one chunk a stage. With more, of a plan that divides the bytes evenly over the chunks.
    """
    memory = problem.memory
    assert memory is not None
    if problem.virtual == 1:
        room = room_of(problem, [0] * problem.stages + [problem.layers], 0)
        assert room is not None
        return least_over(room, problem.least)
    held = memory.static + problem.stages * memory.activation_of_layers
    even = _even_chunks(replace(problem, cost=held, embedding=memory.embedding, head=memory.head))
    return _quality(problem, even)[0]


def _solve(problem: Problem, bounds: list[int], group: int) -> list[int]:
    """`bounds` with chunk `group` of every stage cut anew; [] if that cannot fit."""
    stages = problem.stages
    first, last = bounds[group * stages], bounds[(group + 1) * stages]
    others = np.arange(problem.virtual) != group
    fixed = problem.fixed() + _by_chunk(problem.cost, problem, bounds)[others].sum(0)
    inner = linear_partition(
        problem.cost[first:last],
        fixed,
        home=problem.home[first:last],
        weight=problem.weight[first:last],
        least=problem.least,
        room=room_of(problem, bounds, group),
    )
    return (
        [*bounds[: group * stages], *(first + i for i in inner), *bounds[(group + 1) * stages + 1 :]] if inner else []
    )


def _even_chunks(problem: Problem) -> list[int]:
    """Borders that make the slowest chunk fastest, as if each were a stage of its own."""
    fixed = np.zeros(problem.stages * problem.virtual)
    fixed[[0, -1]] += problem.embedding, problem.head
    nowhere = np.full(problem.layers, -1)
    return linear_partition(problem.cost, fixed, home=nowhere, weight=problem.weight, least=problem.least)


def _even_numbers(problem: Problem) -> Iterator[list[int]]:
    """Borders of chunks that are equal within each group of chunks, for several positions of the groups' borders."""
    layers, stages, virtual = problem.layers, problem.stages, problem.virtual
    reach = min(_STARTS // (stages * virtual * layers), layers)
    for shift in range(-reach, reach + 1) if reach else ():
        inner = [group * layers // virtual + shift for group in range(1, virtual)]
        groups = list(pairwise([0, *inner, layers]))
        if min(last - first for first, last in groups) >= problem.least * stages:
            equal = [first + (last - first) * stage // stages for first, last in groups for stage in range(stages)]
            yield [*equal, layers]


def _quality(problem: Problem, bounds: Sequence[int]) -> tuple[float, float, float, float]:
    """Less is better: bytes over the limit, the slowest rank, the slowest chunk, bytes moved."""
    over = 0.0
    room = room_of(problem, bounds, 0)
    if room is not None:
        borders = np.asarray(bounds[: problem.stages + 1])
        over = max(float(np.diagonal(room.over(borders[:-1], borders[1:])).max()), 0.0)
    chunk = _by_chunk(problem.cost, problem, bounds)
    chunk[0, 0] += problem.embedding
    chunk[-1, -1] += problem.head
    home = np.repeat(np.arange(chunk.size) % problem.stages, np.diff(bounds))
    moved = problem.weight[(home != problem.home) & (problem.home >= 0)].sum()
    # Twelve digits: sums in another order must not pass for an improvement.
    return over, float(f"{chunk.sum(0).max():.12g}"), float(f"{chunk.max():.12g}"), float(moved)


def _descend(problem: Problem, bounds: list[int]) -> list[int]:
    """Cut one group of chunks after the other, and try the borders between groups, until nothing improves."""
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
