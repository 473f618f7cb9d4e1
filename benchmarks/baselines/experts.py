"""Planners of replicas that benchmarks compare: those of training, FasterMoE's shadowing, DeepSeek's EPLB and fixed
graph of ranks, and the alias method on exact loads."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from balancing.cluster import Cluster
from balancing.experts import plan, traffic
from balancing.experts.placement import ReplicaPlacement
from benchmarks.baselines.alias import alias_slots
from benchmarks.baselines.eplb import eplb_slots
from benchmarks.baselines.rank_graph import graph_slots
from benchmarks.baselines.shadow import shadow_slots

__all__ = ["METHODS", "plan_replicas"]

_LEVELLED = {"alias": alias_slots, "graph": graph_slots}  # planners whose placements get the split of training
METHODS = (*plan.METHODS, "shadow", "eplb", *_LEVELLED)


def plan_replicas(
    load: ArrayLike, cluster: Cluster, *, slots: int, method: Any = "quota", **options: Any
) -> ReplicaPlacement:
    """As `balancing.experts.plan_replicas`, with "shadow", "eplb", "alias" and "graph" among the methods.

    These know no schedule: of the options they take `home` and `min_gain`, which is 0 unless it is given, and "shadow"
    also `shape`; the others change nothing.
    """
    if method not in ("shadow", "eplb", *_LEVELLED):
        return plan.plan_replicas(load, cluster, slots=slots, method=method, **options)
    none = plan.plan_replicas(load, cluster, slots=slots, method="none", **options)
    counts = np.asarray(load, dtype=np.float64)
    if slots == 0 or len(counts) == 1:
        return none
    if method == "shadow":
        placed, split = shadow_slots(counts, none.home, cluster, slots, shape=options.get("shape")), "own"
    elif method in _LEVELLED:
        placed, split = _LEVELLED[method](counts, none.home, slots), "level"
    else:
        placed, split = eplb_slots(counts, none.home, slots), "even"
    placement = ReplicaPlacement(none.home, placed, split, none.ranks_per_node, none.nics_per_node)
    busiest = [traffic(np.rint(counts).astype(np.int64), each).sum(0).max() for each in (placement, none)]
    return placement if busiest[0] <= (1 - options.get("min_gain", 0.0)) * busiest[1] else none
