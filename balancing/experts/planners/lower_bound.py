"""What a placement costs at least, found for many placements at once and much faster than the split itself.

A planner that compares placements need not split tokens over those whose bound is above the cost of another.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from balancing.cluster import Cluster
from balancing.cluster.links import link_seconds, node_masks
from balancing.experts.cost import ExpertShape, LayerCost, with_transfers
from balancing.experts.placement import ReplicaPlacement

__all__ = ["LeastCost"]


class LeastCost:
    """A cost that `layer_cost` cannot fall below however tokens are split, for placement after placement of one load.

    load: int [source_rank, expert]. home: int [expert], of all placements. Others as in `layer_cost`.

    Tokens of an expert without replicas go home. All others leave their node at least where no instance of their expert
    is there. Ranks cannot be more than level.
    """

    def __init__(
        self,
        load: np.ndarray,
        home: np.ndarray,
        cluster: Cluster,
        shape: ExpertShape,
        *,
        hidden_under: float | None = None,
        first: bool = False,
        micro_batches: int = 1,
    ) -> None:
        self._cluster, self._shape = cluster, shape
        self._hidden_under, self._first, self._micro_batches = hidden_under, first, micro_batches
        self._ranks = len(load)
        self._by_expert = np.append(load.T, np.zeros((1, self._ranks)), axis=0)  # and no tokens of the expert -1
        tokens = self._by_expert[:-1].T
        self._by_home = np.argsort(home, kind="stable")
        inside, outside = node_masks(cluster, self._ranks)
        self._near, far = tokens * inside[:, home], tokens * outside[:, home]
        self._arriving = np.stack([tokens.sum(0), self._near.sum(0), far.sum(0)])  # in all, from the node, others

    def __call__(self, placements: Sequence[ReplicaPlacement]) -> list[LayerCost]:
        """One bound a placement; all have equally many slots. Where transfers are exposed, what they hold up is left
        out: on fuller ranks more of them are hidden, which may save as much."""
        plans, ranks, number = len(placements), self._ranks, len(self._by_home)
        node, plan = np.arange(ranks) // placements[0].ranks_per_node, np.arange(plans)[:, None, None]
        experts = np.stack([each.phys2log for each in placements]).reshape(plans, ranks, -1)
        held = np.bincount((experts + plan * (number + 1) + 1).reshape(-1), minlength=plans * (number + 1))
        alone = held.reshape(plans, -1)[:, 1:] == 1
        nowhere = np.ones((plans, node[-1] + 1, number + 1))
        nowhere[plan, node[:, None], experts] = 0  # empty slots, -1, go into the last column
        leaving = (nowhere.reshape(-1, number + 1) @ self._by_expert).reshape(plans, -1, ranks)
        leaving = leaving[:, node, np.arange(ranks)]
        arriving = (self._arriving[:, None] * alone)[:, :, self._by_home].reshape(3, plans, ranks, -1).sum(3)
        cluster, shape = self._cluster, self._shape
        within, across = np.stack([arriving[1], alone @ self._near.T]), np.stack([arriving[2], leaving])
        all_to_all = link_seconds(within, across, cluster).max(0) * (shape.hidden * shape.bytes_per_parameter)
        forward = np.maximum(arriving[0].max(1), self._arriving[0].sum() / ranks) * shape.forward_seconds(cluster)
        costs = [
            with_transfers(*times, cluster, shape, True, self._hidden_under, self._first, self._micro_batches)
            for times in zip(all_to_all.tolist(), forward.tolist(), placements, strict=True)
        ]
        return [replace(cost, slowed=0.0) if cost.exposed else cost for cost in costs]
