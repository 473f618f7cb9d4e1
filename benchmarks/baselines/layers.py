"""DeepSpeed's partition of layers, which is planned once, before training, from numbers of parameters."""

import numpy as np
from numpy.typing import ArrayLike

from balancing.pipeline.stage_plan import StagePlan

__all__ = ["deepspeed_plan"]


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
