"""Lower bound of a placement's cost, for many placements at once, much faster than the split.

A planner that compares placements need not split the load over those whose bound exceeds the cost of another.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from balancing.cluster import Cluster
from balancing.cluster.links import link_seconds, node_masks
from balancing.experts.cost import ExpertShape, MoELayerCost, TransferWindow, with_transfers
from balancing.experts.placement import ReplicaPlacement

__all__ = ["CostLowerBound"]


class CostLowerBound:
    """Lower bounds of `layer_cost` over all splits of one load, for any number of placements.

    Tokens of an expert without replicas go to its home. Tokens of other experts leave their node where it has no
    instance of the expert. The busiest rank has at least the mean load.

    load: int [source_rank, expert], tokens.
    home: int [expert], home ranks in all placements.
    The other parameters are those of `layer_cost`.
    """

    def __init__(
        self,
        load: np.ndarray,
        home: np.ndarray,
        cluster: Cluster,
        shape: ExpertShape,
        window: TransferWindow,
    ) -> None:
        self._cluster, self._shape, self._window = cluster, shape, window
        self._ranks, tokens = len(load), load.astype(np.float64)
        self._per_node = min(self._ranks, cluster.ranks_per_node)
        self._nodes = -(-self._ranks // self._per_node)
        # Tokens [node, expert, rank in node], with ranks that the last node lacks; expert -1 has none.
        padded = np.pad(tokens, ((0, self._nodes * self._per_node - self._ranks), (0, 1)))
        self._by_node = padded.reshape(self._nodes, self._per_node, -1).transpose(0, 2, 1).copy()
        self._by_home = np.argsort(home, kind="stable")
        inside, outside = node_masks(cluster, self._ranks)
        self._near, far = tokens * inside[:, home], tokens * outside[:, home]
        self._arriving = np.stack([tokens.sum(0), self._near.sum(0), far.sum(0)])  # from all, near, far

    def __call__(self, placements: Sequence[ReplicaPlacement]) -> list[MoELayerCost]:
        """One bound a placement; all placements have the same number of slots.

        `slowed` is left out of the bound where transfers are exposed: with more tokens on the busiest rank more of them
        would be hidden, which may save as much.
        """
        cluster, shape = self._cluster, self._shape
        slots = np.stack([placement.slot_expert for placement in placements])
        costs = [
            with_transfers(*times, placement, cluster, shape, self._window)
            for times, placement in zip(self._exchanged(slots), placements, strict=True)
        ]
        return [replace(cost, slowed=0.0) if cost.exposed else cost for cost in costs]

    def without_transfers(self, slots: Sequence[np.ndarray]) -> list[float]:
        """Seconds of a bound without transfers, which take longest to count, by int [rank, slot] of each placement."""
        return [4 * all_to_all + 3 * forward for all_to_all, forward in self._exchanged(np.stack(slots))]

    def _exchanged(self, slots: np.ndarray) -> list[tuple[float, float]]:
        """Seconds of one exchange of tokens, and of forward compute, of each placement. slots: [plan, rank, slot]."""
        plans, ranks, number = len(slots), self._ranks, len(self._by_home)
        node, plan = np.arange(ranks) // self._per_node, np.arange(plans)[:, None, None]
        homes = np.broadcast_to(self._by_home.reshape(ranks, -1), (plans, ranks, number // ranks))
        experts = np.concatenate([homes, slots], axis=2)
        instances = np.bincount((experts + plan * (number + 1) + 1).reshape(-1), minlength=plans * (number + 1))
        alone = instances.reshape(plans, -1)[:, 1:] == 1
        nowhere = np.ones((self._nodes, plans, number + 1))
        nowhere[node[:, None], plan, experts] = 0  # the last column is for empty slots, -1
        leaving = (nowhere @ self._by_node).swapaxes(0, 1).reshape(plans, -1)[:, :ranks]
        arriving = (self._arriving[:, None] * alone)[:, :, self._by_home].reshape(3, plans, ranks, -1).sum(3)
        cluster, shape = self._cluster, self._shape
        within, across = np.stack([arriving[1], alone @ self._near.T]), np.stack([arriving[2], leaving])
        all_to_all = link_seconds(within, across, cluster).max(0) * (shape.hidden * shape.bytes_per_parameter)
        forward = np.maximum(arriving[0].max(1), self._arriving[0].sum() / ranks) * shape.forward_seconds(cluster)
        return list(zip(all_to_all.tolist(), forward.tolist(), strict=True))
