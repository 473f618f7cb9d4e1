"""Late replicas: a few more, at once, where the current load shows that its prediction was wrong.

Predictions can fail; early in training an expert may become hot within a few steps. Where even the best split of the
current micro-batch over the planned placement is imbalanced, a few more replicas of hot experts may pay although all
ranks wait for them. It is the only transfer on the critical path. The number of replicas is therefore bounded, and they
are placed only if they save more time than they take.
"""

import numpy as np
from numpy.typing import ArrayLike

from balancing.cluster import Cluster
from balancing.cluster.links import exchange_seconds
from balancing.experts.cost import ExpertShape
from balancing.experts.placement import ReplicaPlacement
from balancing.experts.split.split import Splitter, check_counts

__all__ = ["repair"]


def repair(
    load: ArrayLike,
    placement: ReplicaPlacement,
    cluster: Cluster,
    *,
    shape: ExpertShape | None = None,
    tolerance: float = 0.05,
    copies: int = 4,
    micro_batches: int = 1,
) -> ReplicaPlacement:
    """A placement with a few more replicas in empty slots, or `placement` itself if they would gain nothing.

    load: int [source_rank, expert], tokens of the current micro-batch.
    placement: the planned placement.
    cluster: compute and link speeds.
    shape: size of an expert, to compare the exposed transfers with the time saved; without it, any gain counts.
    tolerance: nothing is done while the busiest rank exceeds the mean by at most this part.
    copies: maximal number of new replicas.
    micro_batches: number of micro-batches that will use the new replicas.

    Raises ValueError for a load of another shape, negative bounds, and a placement with another split than "level",
    which would not use new replicas as assumed here.
    """
    if placement.split != "level":
        raise ValueError(f"a placement with split={placement.split!r} cannot be repaired; plan with method='quota'")
    if tolerance < 0 or copies < 0:
        raise ValueError(f"tolerance={tolerance} and copies={copies} must not be negative")
    counts = check_counts(load, placement)
    if not placement.slots:
        return placement
    candidate, best = placement, placement
    served = _served(counts, candidate)
    least = start = _seconds(served, shape, cluster)
    for _ in range(copies):
        if served.sum(1).max() <= (1 + tolerance) * counts.sum() / placement.num_ranks:
            break
        changed = _one_more(candidate, served)
        if changed is None:
            break
        candidate = ReplicaPlacement(
            placement.home, changed, "level", placement.ranks_per_node, placement.nics_per_node
        )
        served = _served(counts, candidate)
        seconds = _seconds(served, shape, cluster) + _exposed(placement, candidate, shape, cluster) / micro_batches
        if seconds < least:
            best, least = candidate, seconds
    return best if least < start else placement


def _served(counts: np.ndarray, placement: ReplicaPlacement) -> np.ndarray:
    """Tokens of each instance: int64 [rank, local]."""
    return Splitter(placement)(counts).sum(0).reshape(placement.num_ranks, -1)


def _seconds(served: np.ndarray, shape: ExpertShape | None, cluster: Cluster) -> float:
    """Seconds of expert compute, forward and backward, on the busiest rank; its tokens where sizes are not known."""
    fullest = int(served.sum(1).max())
    return float(fullest) if shape is None else 3 * fullest * shape.forward_seconds(cluster)


def _exposed(old: ReplicaPlacement, new: ReplicaPlacement, shape: ExpertShape | None, cluster: Cluster) -> float:
    """Seconds to send the new replicas' weights from their homes, and to return their gradients."""
    if shape is None:
        return 0.0
    known, table = {copy[:3] for copy in old.copies()}, np.zeros((new.num_ranks, new.num_ranks))
    for copy in new.copies():
        if copy[:3] not in known:
            table[copy.source, copy.rank] += 1
    weights, gradients = shape.weight_bytes, shape.parameters * shape.gradient_bytes
    return exchange_seconds(table * weights, cluster) + exchange_seconds(table.T * gradients, cluster)


def _one_more(placement: ReplicaPlacement, served: np.ndarray) -> np.ndarray | None:
    """Slots [rank, slot] with one more replica of an expert of the busiest rank; None if no rank can take one."""
    load, experts = served.sum(1), placement.phys2log.reshape(served.shape)
    fullest, mean = int(load.argmax()), load.mean()
    node = np.arange(len(load)) // placement.ranks_per_node
    empty = placement.slot_expert < 0
    first_empty = empty.argmax(1)
    for local in np.argsort(-served[fullest], kind="stable").tolist():
        expert, tokens = int(experts[fullest, local]), int(served[fullest, local])
        if tokens <= 0:
            break
        open_to = (placement.log2phys[expert] < 0) & empty.any(1) & (load < mean)
        if not open_to.any():
            continue
        near = open_to & (node == node[fullest])
        target = int(np.where(near if near.any() else open_to, load, np.inf).argmin())
        slots = placement.slot_expert.copy()
        slots[target, first_empty[target]] = expert
        return slots
    return None
