"""Lower bound of a placement's cost, for many placements at once, much faster than the split.

A search for the best of all placements need not split the load over those whose bound exceeds the cost of another.
"""

import numpy as np

from balancing.cluster import Cluster
from balancing.cluster.links import link_seconds, node_masks
from balancing.experts.cost import ExpertShape, TransferWindow, with_transfers

__all__ = ["CostLowerBound"]


class CostLowerBound:
    """Lower bounds of `layer_cost` over all splits of one load, for any number of placements.

    Tokens of an expert without replicas go to its home. Tokens of other experts leave their node where it has no
    instance of the expert. The busiest rank has at least the mean load. Weights enter each node that has a replica and
    not the home, on the only rank that has one, or on any; they leave the home's node, from the home or from any rank.

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
        nodes = -(-self._ranks // self._per_node)
        # Tokens [node, expert, rank in node], with ranks that the last node lacks.
        padded = np.pad(tokens, ((0, nodes * self._per_node - self._ranks), (0, 0)))
        self._by_node = padded.reshape(nodes, self._per_node, -1).transpose(0, 2, 1).copy()
        self._node = np.arange(self._ranks) // self._per_node
        self._at_home = np.arange(nodes)[:, None] == home // self._per_node  # [node, expert]
        self._by_home = np.argsort(home, kind="stable")
        inside, outside = node_masks(cluster, self._ranks)
        self._near, far = tokens * inside[:, home], tokens * outside[:, home]
        self._arriving = np.stack([tokens.sum(0), self._near.sum(0), far.sum(0)])  # from all, near, far

    def __call__(self, slots: np.ndarray) -> np.ndarray:
        """Seconds [placement] of slots int [placement, rank, slot], -1 in empty ones.

        The delay of exchanges is left out where transfers are exposed: with more tokens on the busiest rank more of
        them would be hidden, which may save as much.
        """
        plans, (nodes, experts) = len(slots), self._at_home.shape
        # Instances [placement, node, expert]; the column behind the last expert counts empty slots.
        expert = np.where(slots < 0, experts, slots)
        cell = (np.arange(plans)[:, None] * nodes + self._node)[:, :, None] * (experts + 1) + expert
        replicas = np.bincount(cell.reshape(-1), minlength=plans * nodes * (experts + 1))
        held = replicas.reshape(plans, nodes, experts + 1)[:, :, :experts] + self._at_home
        total = held.sum(1)
        exchange, forward = self._exchanged(held, total == 1)
        cost = with_transfers(exchange, forward, self._copied(slots, held, total), self._shape, self._window)
        return cost.total - np.where(cost.exposed > 0, cost.slowed / cost.micro_batches, 0.0)

    def _exchanged(self, held: np.ndarray, alone: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of one exchange of tokens and of forward compute, [placement] each.

        held: int [placement, node, expert], instances. alone: bool [placement, expert], only at home.
        """
        leaving = (held == 0).swapaxes(0, 1).astype(np.float64) @ self._by_node
        leaving = leaving.swapaxes(0, 1).reshape(len(held), -1)[:, : self._ranks]
        everywhere, near, far = (self._at_homes(alone * tokens) for tokens in self._arriving)
        within, across = np.stack([near, alone @ self._near.T]), np.stack([far, leaving])
        exchange = link_seconds(within, across, self._cluster).max(0)
        most = np.maximum(everywhere.max(1), self._arriving[0].sum() / self._ranks)
        sent = self._shape.hidden * self._shape.bytes_per_parameter
        return exchange * sent, most * self._shape.forward_seconds(self._cluster)

    def _copied(self, slots: np.ndarray, held: np.ndarray, total: np.ndarray) -> np.ndarray:
        """At most `copy_seconds` of each placement. total: int [placement, expert], instances."""
        plan, node = np.arange(len(slots))[:, None, None], self._node[:, None]
        at_home = self._at_home[node, slots]
        arriving = ~at_home & (held[plan, node, slots] == 1)
        stay = np.broadcast_to((held * self._at_home).sum(1), total.shape)  # instances in the home's node
        leaving = self._at_homes((stay == 1) & (total > 1))
        near = ((slots >= 0) & at_home).sum(2)
        far = np.stack([((slots >= 0) & arriving).sum(2), leaving])
        seconds = link_seconds(np.stack([near, np.zeros_like(near)]), far, self._cluster).max(0)
        nics = self._cluster.nics_per_node
        ends = np.maximum(
            ((held > 0) & ~self._at_home).sum(2).max(1), ((total > stay)[:, None] & self._at_home).sum(2).max(1)
        )
        together = np.ceil(ends / min(nics, self._per_node)) / max(1, -(-nics // self._per_node))
        return np.maximum(seconds, together / self._cluster.nic_bandwidth)

    def _at_homes(self, values: np.ndarray) -> np.ndarray:
        """Sums [placement, rank] over the experts that are at home on each rank, of values [placement, expert]."""
        return values[:, self._by_home].reshape(len(values), self._ranks, -1).sum(2)
