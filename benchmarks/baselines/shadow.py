"""FasterMoE's shadowing (PPoPP'22), a baseline: replicate the hottest experts on all ranks while that saves time.

Experts are taken in the order of falling load. Each is replicated on every other rank, which then serves its own tokens
for it, as long as the estimated time of the layer falls. FasterMoE bounds neither memory nor the number of shadowed
experts; here an expert is shadowed only while every other rank has a free slot.
"""

import numpy as np

from balancing.cluster import Cluster
from balancing.cluster.links import exchange_seconds
from balancing.experts.cost import ExpertShape

__all__ = ["shadow_slots"]


def shadow_slots(
    load: np.ndarray, home: np.ndarray, cluster: Cluster, slots: int, *, shape: ExpertShape | None = None
) -> np.ndarray:
    """One layer's plan: int64 [rank, slot], the expert in each slot, -1 in empty ones.

    load: [source_rank, expert], tokens.
    home: int [expert], home ranks.
    cluster: compute and link speeds.
    slots: maximal number of replicas on a rank.
    shape: size of an expert; without it, the estimate is the largest load.
    """
    ranks = len(load)
    placed = np.full((ranks, slots), -1)
    used = np.zeros(ranks, dtype=np.int64)
    traffic = np.zeros((ranks, ranks))
    np.add.at(traffic.T, home, load.T)
    shadowed = 0
    best = _estimate(traffic, shadowed, cluster, shape)
    for expert in np.argsort(-load.sum(0), kind="stable").tolist():
        source, others = int(home[expert]), np.arange(ranks) != home[expert]
        if not others.any() or (used[others] >= slots).any():
            break
        stay = load[others, expert]
        traffic[others, source] -= stay
        traffic[others, others] += stay
        shadowed += 1
        seconds = _estimate(traffic, shadowed, cluster, shape)
        if seconds >= best:
            break
        best = seconds
        placed[others, used[others]] = expert
        used[others] += 1
    return placed


def _estimate(traffic: np.ndarray, shadowed: int, cluster: Cluster, shape: ExpertShape | None) -> float:
    """Seconds of four all-to-alls, three times the largest compute, and the transfers of each shadowed expert."""
    largest = float(traffic.sum(0).max())
    if shape is None:
        return largest
    sent = shape.weight_bytes + shape.parameters * shape.gradient_bytes
    slowest = min(cluster.bandwidth(0, rank) for rank in range(1, len(traffic))) if len(traffic) > 1 else 1.0
    moved = exchange_seconds(traffic * (shape.hidden * shape.bytes_per_parameter), cluster)
    return 4 * moved + 3 * largest * shape.forward_seconds(cluster) + shadowed * sent / slowest
