"""Placement of replicas from a load, with any planner of `PLANNERS`.

Planning is pure and deterministic: all ranks call it with the same load and get the same placement. The placement
carries its planner's rule for dividing tokens over instances, so `split_tokens` works with all of them.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from balancing.cluster import Cluster
from balancing.experts.cost import ExpertShape, TransferWindow
from balancing.experts.load_history import drifted_loads
from balancing.experts.placement import ReplicaPlacement, contiguous_homes
from balancing.experts.planners.problem import Problem
from balancing.experts.planners.prophet import plan_prophet
from balancing.experts.planners.quota.planner import plan_quota
from balancing.experts.split.split import Splitter

__all__ = ["CALM", "METHODS", "MIN_GAIN", "PLANNERS", "Planner", "plan_replicas", "plan_replicas_layers"]

MIN_GAIN = 0.02  # of the busiest rank's tokens, by default
CALM = 1.01  # busiest rank over the mean: a placement that keeps the predicted load within it stays


class Planner(Protocol):
    def __call__(self, loads: np.ndarray, problem: Problem) -> Sequence[ReplicaPlacement]:
        """One placement a layer, from loads [layer, source_rank, expert]. Pure: all ranks get the same."""


PLANNERS: dict[str, Planner] = {
    "none": lambda loads, problem: [problem.placement(problem.empty)] * len(loads),
    "quota": plan_quota,
    "prophet": plan_prophet,
}
METHODS = tuple(PLANNERS)


def plan_replicas(
    load: ArrayLike,
    cluster: Cluster,
    *,
    slots: int,
    shape: ExpertShape | None = None,
    window: TransferWindow | None = None,
    home: ArrayLike | None = None,
    method: str = "quota",
    drift: float = 0.0,
    min_gain: float = MIN_GAIN,
    keep: ReplicaPlacement | None = None,
) -> ReplicaPlacement:
    """Plan the replicas of one layer, as training does.

    load: int [source_rank, expert], tokens on each rank that choose each expert; predictions may be fractional.
    cluster: its first ranks are the expert-parallel group; Cluster.relabel describes groups with another layout.
    slots: largest number of replicas on a rank, at least 0.
    shape: size of an expert, for the cost model; replicas that cost more than they save are then left out. None plans
        for balance alone, as training does without `--cluster`.
    window: what overlaps the transfers, and how many micro-batches they serve. Comes with `shape`.
    home: int [expert], home rank of each expert; by default contiguous blocks.
    method: one of `METHODS`.
    drift: expected total variation between `load` and the load that the placement meets, 0 to 1. With a cost model,
        "quota" then also counts what unused slots would save after such a drift.
    min_gain: fraction of the busiest rank's tokens. Without replicas unless they save that much, now and after the
        drift.
    keep: the placement in force. It is returned if it divides the load within `CALM` of the mean, after twice the
        drift, and its replicas, if any, still gain `min_gain`. Otherwise three of four replicas would move, and graphs
        be captured again, for nothing.

    Raises ValueError for a load that is not two-dimensional, is negative or not finite; for a number of experts that is
    no multiple of the ranks; for more ranks than the cluster has; for negative slots; for `shape` or `window` alone;
    for a drift out of range; and for an unknown method.
    """
    if keep is not None and _still_fits(np.asarray(load), keep, cluster, drift, min_gain):
        return keep
    return plan_replicas_layers(
        np.asarray(load)[None], cluster, slots=slots, shape=shape, window=window, home=home, method=method, drift=drift,
        min_gain=min_gain,
    )[0]  # fmt: skip


def _busiest(loads: Sequence[np.ndarray], placement: ReplicaPlacement) -> int:
    """Tokens of the busiest rank, the sum of all loads [source_rank, expert], each split over `placement`."""
    split = Splitter(placement)
    return sum(int(split(load).sum(0).reshape(len(load), -1).sum(1).max()) for load in loads)


def plan_replicas_layers(
    load: ArrayLike,
    cluster: Cluster,
    *,
    slots: int,
    shape: ExpertShape | None = None,
    window: TransferWindow | None = None,
    home: ArrayLike | None = None,
    method: str = "quota",
    drift: float = 0.0,
    min_gain: float = MIN_GAIN,
) -> tuple[ReplicaPlacement, ...]:
    """`plan_replicas` for several layers at once. Returns one placement a layer.

    load: int [layer, source_rank, expert].
    window: of the first of these layers. Later ones are not the first MoE layer of the model.
    The other parameters are those of `plan_replicas`.
    """
    loads, homes = _checked(np.asarray(load), cluster, slots, home, method)
    if (shape is None) != (window is None):
        raise ValueError("shape, the size of an expert, and window, what overlaps its transfers, come together")
    if not 0 <= drift <= 1:
        raise ValueError(f"drift={drift} is a fraction of all tokens: at least 0 and at most 1")
    problem = Problem(cluster, homes, slots, shape, window or TransferWindow(), drift)
    alone = problem.placement(problem.empty)
    if slots == 0 or problem.ranks == 1:
        return (alone,) * len(loads)
    return tuple(
        placement if min_gain <= 0 or _gain(load, placement, alone, drift) >= min_gain else alone
        for load, placement in zip(loads, PLANNERS[method](loads, problem), strict=True)
    )


def _gain(load: np.ndarray, placement: ReplicaPlacement, alone: ReplicaPlacement, drift: float) -> float:
    """The fraction of the busiest rank's tokens that replicas spare it, now and after the drift."""
    if not placement.replicas:
        return 0.0
    loads = drifted_loads(np.rint(load).astype(np.int64), drift)
    return 1 - _busiest(loads, placement) / max(_busiest(loads, alone), 1)


def _still_fits(load: np.ndarray, keep: ReplicaPlacement, cluster: Cluster, drift: float, min_gain: float) -> bool:
    """Whether `keep` of `plan_replicas` may stay: one split of the load, and of what it may become."""
    per_node = min(keep.num_ranks, cluster.ranks_per_node)
    if load.shape != (keep.num_ranks, keep.experts) or (per_node, cluster.nics_per_node) != (
        keep.ranks_per_node, keep.nics_per_node
    ):  # fmt: skip
        return False
    loads = drifted_loads(np.rint(load).astype(np.int64), 2 * drift)
    if _busiest(loads, keep) > CALM * sum(int(each.sum()) for each in loads) / keep.num_ranks + len(loads):
        return False
    alone = ReplicaPlacement(keep.home, np.full_like(keep.slot_expert, -1), ranks_per_node=per_node)
    return not keep.replicas or _gain(load, keep, alone, drift) >= min_gain


def _checked(
    load: np.ndarray, cluster: Cluster, slots: int, home: ArrayLike | None, method: str
) -> tuple[np.ndarray, np.ndarray]:
    """Check the arguments. Returns the load, float64 [layer, source_rank, expert], and the homes, int64 [expert]."""
    if method not in PLANNERS:
        raise ValueError(f"unknown method {method!r}; known: {', '.join(PLANNERS)}")
    if isinstance(slots, bool) or not isinstance(slots, int | np.integer) or slots < 0:
        raise ValueError(f"slots={slots!r} must be a whole number of at least 0")
    if load.ndim != 3 or 0 in load.shape or load.dtype.kind not in "iuf":
        raise ValueError(f"load must be numbers [source_rank, expert], not {load.dtype} of shape {load.shape[1:]}")
    counts = load.astype(np.float64)
    if not np.isfinite(counts).all() or (counts < 0).any():
        raise ValueError("load must be finite token counts that are not negative")
    ranks, experts = counts.shape[1:]
    if ranks > cluster.world_size:
        raise ValueError(
            f"a load from {ranks} ranks does not fit a cluster of {cluster.world_size}; describe the nodes that the "
            "expert-parallel group runs on, for instance with Cluster.relabel(nodes, ranks_per_node)"
        )
    blocks = contiguous_homes(experts, ranks)
    homes = blocks if home is None else np.asarray(home)
    if homes.shape != blocks.shape:
        raise ValueError(f"home has shape {homes.shape}, but the load has {experts} experts")
    return counts, ReplicaPlacement(homes, np.full((ranks, 0), -1)).home
