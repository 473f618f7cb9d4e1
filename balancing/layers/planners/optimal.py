"""The optimal plan: the least time of the slowest stage, with memory as a hard limit.

With one chunk a stage this is one exact linear partition.

With several chunks, the slowest rank alone does not determine the step. The interleaved schedule runs P micro-batches
through one chunk after the other, so a rank with a cheap and an expensive chunk waits at each change of the chunk.
There are three bounds of the steady phase, in seconds of a micro-batch. The v-th chunks of all ranks form a group.

- The slowest rank, which computes all its chunks in a step.
- The slowest chunk times the chunks of a rank, since the forward pass of one group runs beside the backward pass of
  another.
- The sum over groups of their slowest chunk, as if ranks worked in lockstep.

All three equal the mean load of a rank if all chunks are equal. The objective is lexicographic: bytes over the limit,
the sum of these bounds, the bytes moved. The search is local. It starts from the best of the plan in force, a plan with
chunks as equal as possible, and, with memory, a plan with bytes as equal as possible. A step shifts one boundary or
several neighbouring ones by one layer, or partitions one group exactly with the others fixed. The search ends when no
step improves the objective. The result is never worse than the plan in force, and not always the optimum.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from balancing.layers.memory import LayerMemory
from balancing.layers.planners.linear_partition import least_over, linear_partition
from balancing.layers.planners.problem import Problem, by_chunk, room_of
from balancing.pipeline.fixed_parts import add_fixed

__all__ = ["plan_optimal"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
_DIGITS = 12  # decimal digits of the objective, so that rounding of sums in another order is no improvement


def plan_optimal(problem: Problem) -> list[int]:
    """The best partition found. Raises ValueError, with the missing bytes, if none fits the memory."""
    if problem.virtual == 1:
        best = _solve(problem, [0] * problem.stages + [problem.layers], 0)
    else:
        starts = [_even_chunks(problem), problem.start]
        if problem.memory is not None:
            starts.append(_even_bytes(problem, problem.memory))
        best = _descend(problem, min(starts, key=lambda bounds: _quality(problem, bounds)))
    if not best or (problem.virtual > 1 and _quality(problem, best)[0] > 0):
        raise _does_not_fit(problem)
    return best


def _shortfall(problem: Problem) -> float:
    """The least excess of bytes of the fullest stage over its limit; at most 0 if a plan fits.

    Exact with one chunk a stage. With more chunks, the excess of a plan that divides bytes evenly over the chunks.
    """
    memory = problem.memory
    assert memory is not None
    if problem.virtual == 1:
        room = room_of(problem, [0] * problem.stages + [problem.layers], 0)
        assert room is not None
        return least_over(room.first_stages(problem.filled(0)), problem.least)
    return _quality(problem, _even_bytes(problem, memory))[0]


def _solve(problem: Problem, bounds: list[int], group: int) -> list[int]:
    """`bounds` with chunk `group` of every stage partitioned again; [] if no partition fits."""
    stages, filled = problem.stages, problem.filled(group)
    first, last = bounds[group * stages], bounds[(group + 1) * stages]
    others = np.arange(problem.virtual) != group
    fixed = problem.fixed_load() + by_chunk(problem.cost, problem, bounds)[others].sum(0)
    room = room_of(problem, bounds, group)
    inner = linear_partition(
        problem.cost[first:last],
        fixed[:filled],
        home=problem.home[first:last],
        weight=problem.weight[first:last],
        least=problem.least,
        room=None if room is None else room.first_stages(filled),
    )
    if not inner:
        return []
    empty = [last] * (stages - filled)
    return [*bounds[: group * stages], *(first + i for i in inner), *empty, *bounds[(group + 1) * stages + 1 :]]


def _even_chunks(problem: Problem) -> list[int]:
    """Boundaries with the least load of the slowest chunk."""
    fixed = np.zeros(problem.stages * problem.virtual)
    add_fixed(problem.fixed, fixed, problem.behind)
    nowhere = np.full(problem.layers, -1)
    filled = fixed[: fixed.size - problem.behind]
    even = linear_partition(problem.cost, filled, home=nowhere, weight=problem.weight, least=problem.least)
    return [*even, *[problem.layers] * problem.behind]


def _even_bytes(problem: Problem, memory: LayerMemory) -> list[int]:
    """Boundaries that divide the bytes evenly over the chunks."""
    held = memory.static + problem.stages * memory.activation_of_layers
    return _even_chunks(replace(problem, cost=held, fixed=np.array(memory.fixed)))


def _qualities(problem: Problem, bounds: IntArray) -> FloatArray:
    """The objective of many plans, float [plan, 3], to be minimized lexicographically.

    Column 0: bytes over the limit. Column 1: the sum of the three bounds of the module docstring, over the mean load of
    a rank. Column 2: bytes moved.

    bounds: [plan, virtual * stages + 1], along the pipeline.
    """
    plans, stages, virtual, behind = len(bounds), problem.stages, problem.virtual, problem.behind

    def sums(values: FloatArray) -> FloatArray:
        """Sums of `values` [layer] over chunks, [plan, chunk, stage]."""
        prefix = np.concatenate([[0.0], np.cumsum(values)])
        return np.diff(prefix[bounds]).reshape(plans, virtual, stages)

    chunk = sums(problem.cost)
    add_fixed(problem.fixed, chunk.reshape(plans, -1), behind)
    slowest = chunk.sum(1).max(1) + virtual * chunk.max((1, 2)) + chunk.max(2).sum(1)
    mean = (problem.cost.sum() + problem.fixed_load().sum()) / stages
    elsewhere = (problem.home != np.arange(stages)[:, None]) & (problem.home >= 0)
    arriving = np.zeros((stages, problem.layers + 1))
    np.cumsum(np.where(elsewhere, problem.weight, 0.0), axis=1, out=arriving[:, 1:])
    holder = np.arange(stages * virtual) % stages
    moved = (arriving[holder, bounds[:, 1:]] - arriving[holder, bounds[:, :-1]]).sum(1)
    over, memory = np.zeros(plans), problem.memory
    if memory is not None and problem.limit is not None:
        static, held = sums(memory.static).sum(1), sums(memory.activation_of_layers)
        add_fixed(memory.fixed, static, behind)
        add_fixed(memory.fixed_activation, held.reshape(plans, -1), behind)
        moments = problem.in_flight()
        peak = np.einsum("smv,pvs->psm", moments, held).max(2)
        over = np.maximum((static + peak - problem.limit).max(1), 0.0)
    return np.stack([over, np.round(slowest / (mean or 1.0), _DIGITS), moved], axis=1)


def _quality(problem: Problem, bounds: Sequence[int]) -> tuple[float, ...]:
    """The objective of one plan, to be minimized."""
    return tuple(_qualities(problem, np.array([bounds]))[0].tolist())


def _descend(problem: Problem, bounds: list[int]) -> list[int]:
    """Shift boundaries, and partition single groups of chunks again, until nothing improves."""
    quality = _quality(problem, bounds)
    while True:
        for propose in (_shifted, _partitioned):
            others = propose(problem, bounds)
            qualities = _qualities(problem, others)
            best = int(np.lexsort(qualities.T[::-1])[0])
            if tuple(qualities[best].tolist()) < quality:
                bounds, quality = others[best].tolist(), tuple(qualities[best].tolist())
                break
        else:
            return bounds


def _shifted(problem: Problem, bounds: list[int]) -> IntArray:
    """`bounds`, and those with 1, 2, 4, ... neighbouring boundaries shifted by one layer: int64 [plan, chunk + 1]."""
    inner = len(bounds) - 2 - problem.behind  # boundaries that may move
    runs = [
        (first, first + length)
        for length in (1 << power for power in range(inner.bit_length()))
        for first in range(1, inner - length + 2)
    ]
    number = np.arange(len(bounds))
    moves = np.array([(number >= first) & (number < last) for first, last in runs], dtype=np.int64)
    moves = moves.reshape(-1, len(bounds))
    others = np.concatenate([[bounds], bounds + moves, bounds - moves])
    keeps = (np.diff(others[:, : inner + 2]) >= problem.least).all(1)
    keeps[0] = True
    return np.asarray(others[keeps])


def _partitioned(problem: Problem, bounds: list[int]) -> IntArray:
    """`bounds`, and those with one group partitioned again: int64 [plan, chunk + 1]."""
    return np.array([bounds, *(_solve(problem, bounds, group) or bounds for group in range(problem.virtual))])


def _does_not_fit(problem: Problem) -> ValueError:
    assert problem.limit is not None
    missing = _shortfall(problem)
    limits = " or ".join(f"{limit:,.0f}" for limit in sorted(set(problem.limit.tolist())))
    at_least = "at least " if problem.virtual == 1 else ""
    return ValueError(
        f"no plan keeps to memory_limit {limits} bytes on {problem.stages} stages: a stage is {at_least}"
        f"{missing:,.0f} bytes short; use more stages, more tensor parallelism, or recompute activations"
    )
