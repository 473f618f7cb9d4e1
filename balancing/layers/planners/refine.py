"""Local search on a plan, scored by the simulated time of a step.

The slowest stage determines most of a step, but not all. Forward and backward count separately in warm-up and
cool-down, so with frozen layers or early exits two plans with the same slowest stage can differ by a few percent.

Each round shifts every boundary by one layer in both directions, simulates all these plans at once, and keeps the best,
until none is faster. With several chunks a stage, runs of neighbouring boundaries are also shifted together. The chunks
between them then keep their numbers of layers, and only the two chunks at the ends change.

The plan in force is a second start. It is the result of the last search, and costs drift only slowly, so the search
continues where the last one stopped.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancing.layers.cost import LayerSeconds
from balancing.pipeline.schedule import MEGATRON_DEFAULTS, Schedule
from balancing.pipeline.stage_plan import StagePlan
from balancing.pipeline.timeline import simulate_steps

__all__ = ["refine_plan"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
_ROUNDS = 20  # most rounds from each start
_AT_ONCE = 256  # plans that are simulated at a time
_RUNS = (1, 2, 3, 4, 6, 8)  # lengths of runs of boundaries that are shifted together


def refine_plan(
    plan: StagePlan,
    cost: LayerSeconds,
    micro_batches: int,
    *,
    transfer: ArrayLike = 0.0,
    schedule: Schedule = MEGATRON_DEFAULTS,
    current: StagePlan | None = None,
    min_layers: int = 1,
    fits: Callable[[StagePlan], bool] = lambda plan: True,
) -> StagePlan:
    """A plan whose simulated step is at least as fast as that of `plan`.

    plan: the plan to start from.
    cost: seconds of the layers.
    micro_batches, transfer, schedule: as in `simulate_schedule`.
    current: the plan in force. The search starts from it if it is faster than `plan`; if no plan near it is faster, the
        search also starts from `plan`. It is used only if it is of the same pipeline with several chunks a stage, keeps
        to `min_layers`, and fits.
    min_layers: fewest layers of a chunk.
    fits: whether a plan is allowed, for instance whether its `stage_memory` is within the limit.

    Every round simulates two plans for each boundary between chunks, up to twelve with several chunks a stage.
    """
    shifts = _shifts(plan)

    def simulate(bounds: IntArray) -> FloatArray:
        forward, backward = cost.seconds_of_bounds(bounds, plan.stages, plan.behind)
        return simulate_steps(forward, backward, micro_batches, transfer=transfer, schedule=schedule)

    def promising(bounds: IntArray, below: float) -> IntArray:
        """The plans of `bounds` whose step may take less than `below` seconds, the most even ones first."""
        forward, backward = cost.seconds_of_bounds(bounds, plan.stages, plan.behind)
        able = _least_seconds(forward, backward, micro_batches) < below
        both = (forward + backward)[able]
        uneven = both.sum(2).max(1) + plan.virtual * both.max((1, 2)) + both.max(1).sum(1)
        return np.asarray(bounds[able][np.argsort(uneven, kind="stable")])

    def with_bounds(bounds: IntArray) -> StagePlan:
        return StagePlan.from_bounds(bounds.tolist(), plan.stages, plan.method).with_tail_of(plan)

    def quickest(some: IntArray, below: float) -> tuple[float, IntArray, StagePlan] | None:
        """The fastest plan of `some` that fits, with its seconds; None if it takes at least `below` seconds."""
        times = simulate(some)
        for number in np.argsort(times, kind="stable"):
            if times[number] >= below * (1 - 1e-9):  # a smaller gain may be rounding
                return None
            other = with_bounds(some[number])
            if fits(other):
                return float(times[number]), some[number], other
        return None

    def descend(start: StagePlan) -> tuple[float, StagePlan]:
        best, reached = np.array(start.bounds), start
        seconds = float(simulate(best[None])[0])
        for _ in range(_ROUNDS):
            others = best + shifts
            others = others[(np.diff(others)[:, : len(best) - 1 - plan.behind] >= min_layers).all(1)]
            others = promising(others, seconds)
            for first in range(0, len(others), _AT_ONCE):
                some = others[first : first + _AT_ONCE]
                better = quickest(some, seconds)
                if better is not None:
                    seconds, best, reached = better
                    break
            else:
                break
        return seconds, reached

    starts = [plan]
    if current is not None and plan.virtual > 1 and _can_start(current, plan, min_layers) and fits(current):
        starts.append(replace(current, method=plan.method))
    starts.sort(key=lambda start: float(simulate(np.array([start.bounds]))[0]))
    seconds, result = descend(starts[0])
    if result is not plan and result is starts[0]:  # no plan near the plan in force is faster
        other_seconds, other = descend(plan)
        if other_seconds < seconds * (1 - 1e-9):
            result = other
    return result


def _least_seconds(forward: FloatArray, backward: FloatArray, micro_batches: int) -> FloatArray:
    """A lower bound of the step, seconds [plan].

    It is the compute of a rank plus the first chunks of the ranks before it: their forwards of the first micro-batch
    come before the rank's first operation, and their backwards of the last micro-batch after its last.

    forward, backward: [plan, stage, chunk], seconds.
    """
    both = forward + backward
    before = np.cumsum(both[:, :, 0], axis=1) - both[:, :, 0]
    return np.asarray((micro_batches * both.sum(axis=2) + before).max(axis=1))


def _can_start(current: StagePlan, plan: StagePlan, min_layers: int) -> bool:
    """Whether `current` is of the same pipeline as `plan`, keeps to `min_layers` and differs from `plan`."""
    same = (current.stages, current.virtual, current.behind) == (plan.stages, plan.virtual, plan.behind)
    filled = current.order[: len(current.order) - current.behind]
    return same and current.chunks != plan.chunks and all(len(chunk) >= min_layers for chunk in filled)


def _shifts(plan: StagePlan) -> IntArray:
    """Shifts of one boundary or, with several chunks, a run of boundaries by one layer: int64 [shift, chunks + 1]."""
    inner = len(plan.bounds) - 2 - plan.behind  # boundaries that may move
    number = np.arange(len(plan.bounds))
    shifts = [
        step * ((number >= first) & (number < first + length))
        for length in ((1,) if plan.virtual == 1 else _RUNS)
        for first in range(1, inner - length + 2)
        for step in (-1, 1)
    ]
    return np.array(shifts, dtype=np.int64).reshape(-1, len(number))
