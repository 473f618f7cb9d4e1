"""The best cut of a model into pipeline stages, in slow, plain Python. The first file to read of this folder, and the
oracle of its tests.

DynMo (section 3) measures what each layer costs and moves layers between stages, so that the slowest stage is as quick
as it can be. Layers stay in their order, so a plan is a line of costs, cut into stages. Either the last stage has no
layer but those after a cut, or there is no such stage: the best cut before it is a smaller problem of the same kind.

    best(stages, layers) = min over cuts of max(best(stages - 1, cut), the cost of layers cut to layers - 1)

`planners/linear_partition.py` computes the same with arrays, under limits of memory, and of all best cuts it takes the
one that moves the fewest bytes. `planners/optimal.py` looks further where a stage has several chunks.
"""

from collections.abc import Sequence
from functools import cache

__all__ = ["best_cut"]


def best_cut(
    cost: Sequence[float], stages: int, *, fixed: Sequence[float] | None = None, least: int = 1
) -> tuple[float, list[int]]:
    """The load of the slowest stage, in seconds, and the cuts [stages + 1]: stage s has layers cuts[s] to
    cuts[s + 1] - 1.

    cost: [layer], seconds.
    fixed: [stage], seconds of a stage beside its layers, such as the embedding and the head; None for none.
    least: fewest layers of a stage.

    Raises ValueError if there are too few layers.
    """
    if len(cost) < stages * least:
        raise ValueError(f"{len(cost)} layers are too few for {stages} stages of at least {least}")
    beside = [0.0] * stages if fixed is None else fixed

    @cache
    def best(stage: int, layers: int) -> tuple[float, list[int]]:
        """For stages 0 to `stage`, with the first `layers` layers."""
        if stage == 0:
            return beside[0] + sum(cost[:layers]), [0, layers]
        plans = []
        for cut in range(stage * least, layers - least + 1):
            before, cuts = best(stage - 1, cut)
            plans.append((max(before, beside[stage] + sum(cost[cut:layers])), [*cuts, layers]))
        return min(plans)

    return best(stages - 1, len(cost))
