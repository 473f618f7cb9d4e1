"""Plans of sequences under the data sheet's one rate and under measured rates, both costed with measured rates.

4k tokens a rank, H200 nodes, a layer of an 8B model with grouped queries 8:1, lengths of published training sets. Steps
are over the limit of whole documents at measured rates. "host" is the host's time over the same limit: where it is
larger than the device's, the step takes the host's time.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from balancing.cluster import Cluster
from balancing.sequences import AttentionShape, limit_seconds, plan_sequences, step_cost
from balancing.sequences.cost import extra_pairs
from benchmarks.sequences.lengths import DISTRIBUTIONS, draw_batch

__all__ = ["Planned", "planned"]

_SHAPE = AttentionShape(4096, 32, 4, 32, 14336)
_TOKENS, _BATCHES = 4096, 2


class Planned(NamedTuple):
    """Means over distributions.

    method: of the plan, with the costs that it was planned with.
    device, host: over the limit.
    time, area: of attention, maximum over mean.
    """

    ranks: int
    method: str
    device: float
    host: float
    time: float
    area: float


def planned(sizes: tuple[int, ...] = (16, 64)) -> Iterator[Planned]:
    """Rows of all sizes."""
    for ranks in sizes:
        cluster = Cluster.preset("h200-8x400g", nodes=ranks // 8)
        for name, method, machine in (
            ("chunks, sheet", "chunks", replace(cluster, rates=None)),
            ("chunks, measured", "chunks", cluster),
            ("zones", "zones", cluster),
            ("ring", "ring", cluster),
        ):
            found = []
            for distribution in DISTRIBUTIONS:
                for seed in range(_BATCHES):
                    lengths = draw_batch(distribution, _TOKENS * ranks, np.random.default_rng(seed))
                    plan = plan_sequences(lengths, machine, shape=_SHAPE, method=method)
                    cost, limit = step_cost(plan, cluster, _SHAPE), limit_seconds(lengths, cluster, _SHAPE)
                    seconds = plan.area + extra_pairs(plan, cluster, _SHAPE)
                    level = float(seconds.max() / seconds.mean())
                    found.append((cost.device / limit, cost.host / limit, level, plan.area.max() / plan.area.mean()))
            yield Planned(ranks, name, *map(float, np.mean(found, axis=0)))
