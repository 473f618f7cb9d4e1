"""Baselines: equal numbers of layers, as in Megatron-LM, and DeepSpeed's partition.

Both are static in these projects. DeepSpeed's partition by parameters is `deepspeed` with numbers of parameters as
costs.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["deepspeed_bounds", "uniform_bounds"]


def uniform_bounds(layers: int, chunks: int) -> list[int]:
    """Boundaries [chunks + 1] of chunks with equal numbers of layers.

    If the numbers do not divide, which Megatron refuses, the first chunks have one layer more.
    """
    size, more = divmod(layers, chunks)
    return [chunk * size + min(chunk, more) for chunk in range(chunks + 1)]


def deepspeed_bounds(cost: NDArray[np.float64], fixed: Sequence[float]) -> list[int]:
    """Boundaries [stages + 1] of DeepSpeed's PipelineModule: dynamic programming on max - min of the stages.

    cost: [layer], seconds. fixed: [stage], seconds of a stage besides its layers.

    The difference does not decompose (the best partition of the front depends on the back), so the result does not
    always have the least difference, and the least difference does not always have the least maximum.
    """
    layers, stages = len(cost), len(fixed)
    prefix = np.concatenate([[0.0], np.cumsum(cost)])
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
    return bounds[::-1]
