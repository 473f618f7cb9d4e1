"""Local search on a plan, scored by the simulated time of a step.

The slowest stage determines most of a step, but not all: forward and backward count separately while the pipeline fills
and drains, so with frozen layers or early exits two plans with the same slowest stage can differ by a few percent. Each
round shifts every boundary by one layer either way, simulates all these plans at once, and keeps the best, until none
is faster.
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

    Every round simulates two plans for each boundary between chunks.
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
    """The plans that differ in one boundary by one layer."""
    for border in range(1, len(plan.bounds) - 1):
        for step in (-1, 1):
            bounds = list(plan.bounds)
            bounds[border] += step
            if min(bounds[border] - bounds[border - 1], bounds[border + 1] - bounds[border]) >= min_layers:
                yield StagePlan.from_bounds(bounds, plan.stages, plan.method)
