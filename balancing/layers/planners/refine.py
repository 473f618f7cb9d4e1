"""The last percents of a plan, by simulation.

The slowest stage decides most of a step, not all of it: forward and backward count apart while the pipeline fills and
drains, and with frozen layers or early exits two plans with the same slowest stage can differ by a few percent. So the
borders of a plan are tried one layer either way in the simulated schedule, and the best change is kept, until none
helps. All tries of a round are simulated at once.
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

    micro_batches, transfer: of the schedule, see `simulate_schedule`. min_layers: fewest layers of a chunk. fits: for
    instance whether the plan's `stage_memory` is within the limit. rounds: most changes.

    Every round simulates two plans for each border between chunks.
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds} must be at least 1")
    best, seconds = plan, cost.simulate(plan, micro_batches, transfer=transfer).step_time
    for _ in range(rounds):
        others = [other for other in _neighbours(best, min_layers) if fits(other)]
        if not others:
            break
        times = cost.step_seconds(others, micro_batches, transfer=transfer)
        if times.min() >= seconds * (1 - 1e-9):  # rounding must not pass for a gain
            break
        best, seconds = others[int(times.argmin())], float(times.min())
    return best


def _neighbours(plan: StagePlan, min_layers: int) -> Iterator[StagePlan]:
    """The plans with one border one layer further."""
    for border in range(1, len(plan.bounds) - 1):
        for step in (-1, 1):
            bounds = list(plan.bounds)
            bounds[border] += step
            if min(bounds[border] - bounds[border - 1], bounds[border + 1] - bounds[border]) >= min_layers:
                yield StagePlan.from_bounds(bounds, plan.stages, plan.method)
