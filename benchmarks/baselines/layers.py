"""Layer planners of other systems: DeepSpeed's partition, and first fit for fewer stages (DynMo's code).

Both plan once, DeepSpeed before training, from numbers of parameters.
"""

import numpy as np
from numpy.typing import ArrayLike

from balancing.pipeline.stage_plan import StagePlan

__all__ = ["deepspeed_plan", "first_fit"]


def deepspeed_plan(cost: ArrayLike, stages: int, *, embedding: float = 0.0, head: float = 0.0) -> StagePlan:
    """The plan of DeepSpeed's PipelineModule: dynamic programming on max - min of the stages.

    cost: [layer], seconds or numbers of parameters; DeepSpeed takes the latter.
    stages: pipeline size.
    embedding, head: the cost of what the first and the last stage have besides their layers.

    The difference does not decompose (the best partition of the front depends on the back), so the result does not
    always have the least difference, and the least difference does not always have the least maximum.
    """
    fixed = np.zeros(stages)
    fixed[0] += embedding
    fixed[-1] += head
    prefix = np.concatenate([[0.0], np.cumsum(np.asarray(cost, dtype=float))])
    layers = len(prefix) - 1
    place = np.arange(layers + 1)
    span = np.where(place[None, :] > place[:, None], prefix[None, :] - prefix[:, None], np.inf)
    largest, smallest = np.full(layers + 1, np.inf), np.full(layers + 1, np.inf)
    largest[0] = 0.0
    chosen = []
    for stage in range(stages):
        load = span + fixed[stage]
        most, fewest = np.maximum(largest[:, None], load), np.minimum(smallest[:, None], load)
        with np.errstate(invalid="ignore"):
            difference = np.where(np.isfinite(most), most - fewest, np.inf)
        chosen.append(difference.argmin(axis=0))
        largest, smallest = most[chosen[-1], place], fewest[chosen[-1], place]
    bounds = [layers]
    for choice in reversed(chosen):
        bounds.append(int(choice[bounds[-1]]))
    assert bounds[-1] == 0, f"{layers} layers on {stages} stages: {bounds}"
    return StagePlan.from_bounds(bounds[::-1], stages, "deepspeed")


def first_fit(current: StagePlan, bytes_of_stage: ArrayLike, limit: float, stages: int) -> tuple[tuple[int, ...], ...]:
    """Merge stages as DynMo's published code does. Returns the layers of each stage that remains.

    current: the plan in force, of one chunk a stage.
    bytes_of_stage: float array [stage].
    limit: bytes of a rank.
    stages: number to reach.

    The layers of each stage, in order, go to the first later stage with which they fit into `limit`, until `stages`
    remain. More remain if nothing else fits. Raises ValueError for several chunks a stage.
    """
    if current.virtual > 1:
        raise ValueError(f"first fit merges stages of one chunk, not of {current.virtual}")
    held = np.asarray(bytes_of_stage, dtype=float).tolist()
    layers = [list(chunk) for (chunk,) in current.chunks]
    active = list(range(current.stages))
    for source in range(current.stages):
        for target in range(source + 1, current.stages):
            if len(active) <= stages:
                break
            if target in active and held[source] + held[target] < limit:
                layers[target] = sorted(layers[source] + layers[target])
                held[target] += held[source]
                active.remove(source)
                break
    return tuple(tuple(layers[stage]) for stage in active)
