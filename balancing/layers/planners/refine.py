"""Local search on a plan, scored by the simulated time of a step.

The slowest stage determines most of a step, but not all: forward and backward count separately while the pipeline fills
and drains, so with frozen layers or early exits two plans with the same slowest stage can differ by a few percent. Each
round shifts every boundary by one layer either way, simulates all these plans at once, and keeps the best, until none
is faster. With several chunks a stage runs of two and of four neighbouring boundaries are shifted, too: the chunks in
between keep their layers' number, and only the two at the ends change it, which may be far apart.
"""

from collections.abc import Callable, Iterator

from numpy.typing import ArrayLike

from balancing.layers.cost import LayerSeconds
from balancing.layers.stage_plan import StagePlan

__all__ = ["refine_plan"]


def refine_plan(
    plan: StagePlan,
    cost: LayerSeconds,
    micro_batches: int,
    *,
    transfer: ArrayLike = 0.0,
    min_layers: int = 1,
    fits: Callable[[StagePlan], bool] = lambda plan: True,
    rounds: int = 20,
) -> StagePlan:
    """A plan whose simulated step is at least as fast as that of `plan`.

    plan: to start from.
    cost: seconds of the layers.
    micro_batches, transfer: of the schedule, see `simulate_schedule`.
    min_layers: fewest layers of a chunk.
    fits: whether a plan is allowed, for instance whether its `stage_memory` is within the limit.
    rounds: most changes.

    Every round simulates two plans for each boundary between chunks, six with several chunks a stage.
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds} must be at least 1")
    best, seconds = plan, cost.simulate(plan, micro_batches, transfer=transfer).step_time
    for _ in range(rounds):
        others = [other for other in _neighbours(best, min_layers) if fits(other)]
        if not others:
            break
        times = cost.step_seconds(others, micro_batches, transfer=transfer)
        if times.min() >= seconds * (1 - 1e-9):  # a smaller gain may be rounding
            break
        best, seconds = others[int(times.argmin())], float(times.min())
    return best


def _neighbours(plan: StagePlan, min_layers: int) -> Iterator[StagePlan]:
    """The plans that differ in one boundary by one layer; with several chunks also in 2 or 4 neighbouring ones."""
    for length in (1,) if plan.virtual == 1 else (1, 2, 4):
        for first in range(1, len(plan.bounds) - length):
            last = first + length  # one past the run
            for step in (-1, 1):
                bounds = [bound + step * (first <= at < last) for at, bound in enumerate(plan.bounds)]
                if min(bounds[first] - bounds[first - 1], bounds[last] - bounds[last - 1]) >= min_layers:
                    yield StagePlan.from_bounds(bounds, plan.stages, plan.method)
