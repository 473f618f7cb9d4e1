"""Estimated costs of many placements at once, without splitting the load over each of them.

A split of a load over one placement (`balancing.experts.split.split`) takes a millisecond at 64 ranks. The estimate
divides the tokens over the instances of all placements together, in fractions. In each round, instances on ranks with
more tokens give some to instances of the same expert on ranks with fewer.

The time of the weight transfers is a lower bound, that of the busiest link. Weights enter each node that has a replica
and is not the home's node. If the node has only one replica, they enter on its rank, otherwise on any rank with a
replica. They leave the home's node in the same way.
"""

import numpy as np

from balancing.cluster import Cluster
from balancing.cluster.links import link_seconds
from balancing.experts.cost import ExpertShape, MoELayerCost, TransferWindow, with_transfers

__all__ = ["CostEstimate"]

_ROUNDS = 6  # more are nearer to the split
_CELLS = 1 << 15  # elements of [placement, node, expert] that are computed at once, so that they stay in the CPU cache


class CostEstimate:
    """Estimates of `layer_cost` for one load. The estimate of a placement without replicas is exact.

    load: int [source_rank, expert], tokens.
    home: int [expert], home ranks in all placements.
    The other parameters are those of `layer_cost`.
    """

    def __init__(
        self, load: np.ndarray, home: np.ndarray, cluster: Cluster, shape: ExpertShape, window: TransferWindow
    ) -> None:
        self._cluster, self._shape, self._window = cluster, shape, window
        self._ranks, self._experts = load.shape
        self._per_node = min(self._ranks, cluster.ranks_per_node)
        self._nodes = -(-self._ranks // self._per_node)
        self._node = np.arange(self._ranks) // self._per_node
        self._homes = np.argsort(home, kind="stable").reshape(self._ranks, -1).T  # [home expert, rank]
        # The last column stands for empty slots. Ranks are added to fill the last node.
        self._load = np.zeros((self._nodes * self._per_node, self._experts + 1))
        self._load[: self._ranks, :-1] = load
        by_node = self._load.reshape(self._nodes, self._per_node, -1)
        self._wanted = by_node.sum(1)  # [node, expert]
        # Tokens of each rank over those of its node, [node, expert, rank in node].
        self._part = (by_node / np.maximum(self._wanted, 1e-300)[:, None]).transpose(0, 2, 1).copy()
        self._at_home = np.arange(self._nodes)[:, None] == np.append(home // self._per_node, -1)
        self._away = ~self._at_home
        self._away[:, -1] = False

    def __call__(self, slots: np.ndarray) -> MoELayerCost:
        """Costs of the layer, with arrays [placement]. slots: int [placement, rank, slot], -1 in empty slots."""
        at_once = max(1, _CELLS // (self._nodes * (self._experts + 1)))
        parts = [self._seconds(slots[begin : begin + at_once]) for begin in range(0, len(slots), at_once)]
        exchange, forward, copied = np.concatenate(parts, axis=1)
        return with_transfers(exchange, forward, copied, self._shape, self._window)

    def _seconds(self, slots: np.ndarray) -> np.ndarray:
        """Seconds of one all-to-all, of forward compute, and of copies (`copy_seconds`): float [3, placement]."""
        plans, columns = len(slots), self._experts + 1
        homes = np.broadcast_to(self._homes, (plans, *self._homes.shape))
        replicas = np.where(slots < 0, self._experts, slots).swapaxes(1, 2)
        held = np.concatenate([homes, replicas], axis=1)  # [placement, instance, rank]
        plan = np.arange(plans)[:, None, None]
        in_node = held + (plan * self._nodes + self._node) * columns
        counted = np.bincount(in_node.reshape(-1), minlength=plans * self._nodes * columns)
        number = counted.reshape(plans, self._nodes, columns)
        served = self._served(held + plan * columns, number.sum(1))
        if self._cluster.rates is None:
            forward = served.sum(1).max(1) * self._shape.forward_seconds(self._cluster)
        else:
            computed = len(self._homes) + (slots >= 0).sum(2)  # experts, [placement, rank]
            forward = self._shape.rank_seconds(served.sum(1), computed, self._cluster).max(1)
        exchange = self._exchange(held, in_node, served) * (self._shape.hidden * self._shape.bytes_per_parameter)
        return np.stack([exchange, forward, self._copied(replicas, in_node, number)])

    def _served(self, cell: np.ndarray, number: np.ndarray) -> np.ndarray:
        """Tokens of each instance: float [placement, instance, rank].

        cell: flat index of each instance's placement and expert in [placement, expert].
        number: [placement, expert], number of instances.
        """
        total = np.broadcast_to(self._load.sum(0), number.shape).reshape(-1)
        flat = cell.reshape(-1)
        served = (total / np.maximum(number.reshape(-1), 1)).take(cell)
        for _ in range(_ROUNDS):
            height = np.maximum(served.sum(1), 1.0)
            served /= (height * np.sqrt(height))[:, None]  # with a power of 2 two ranks would swap their tokens
            weight = np.bincount(flat, served.reshape(-1), minlength=len(total))
            served *= (total / np.maximum(weight, 1e-300)).take(cell)
        return served

    def _exchange(self, held: np.ndarray, in_node: np.ndarray, served: np.ndarray) -> np.ndarray:
        """Tokens over the speed of the busiest link in one all-to-all: float [placement]. Tokens stay in their node as
        far as its instances serve them."""
        shape = len(held), *self._wanted.shape
        served_in_node = np.bincount(in_node.reshape(-1), served.reshape(-1), minlength=int(np.prod(shape)))
        kept = np.minimum(served_in_node.reshape(shape), self._wanted)
        sent = self._load.sum(1)
        sent_far = sent - (kept.swapaxes(0, 1) @ self._part).swapaxes(0, 1).reshape(len(held), -1)
        staying = served * (kept.take(in_node) / np.maximum(served_in_node.take(in_node), 1e-300))
        received = served.sum(1)
        far = np.stack([sent_far[:, : self._ranks], received - staying.sum(1)])
        own = np.minimum(staying, self._load[np.arange(self._ranks), held]).sum(1)
        tokens = np.stack([np.broadcast_to(sent[: self._ranks], own.shape), received])
        return link_seconds(np.maximum(tokens - far - own, 0.0), far, self._cluster).max(0)

    def _copied(self, replicas: np.ndarray, in_node: np.ndarray, number: np.ndarray) -> np.ndarray:
        """Estimate of `copy_seconds`, float [placement].

        replicas: int [placement, slot, rank].
        in_node: flat index [placement, instance, rank] in [placement, node, expert].
        number: int [placement, node, expert], instances.

        Chains (`ReplicaPlacement.chains`) enter a node on its only replica, or on a replica with a free NIC. They leave
        it for the next node on its only replica (in the home's node, the only one beside the home), or on a replica
        with a free NIC.
        """
        entered = (number > 0) & self._away
        left = np.zeros_like(entered)  # nodes that the chain leaves for a later node
        later = entered[:, -1].copy()
        for node in range(self._nodes - 2, -1, -1):
            left[:, node] = later & entered[:, node]
            later |= entered[:, node]
        left |= later[:, None] & self._at_home
        homes = len(self._homes)
        here, enters = number.take(in_node), entered.take(in_node[:, homes:])
        last = here == 1
        last[:, homes:] |= ~enters & (here[:, homes:] == 2)
        last &= left.take(in_node)
        # Within a node, the home sends and replicas receive.
        near = [((replicas < self._experts) & ~enters).sum(1), (here[:, :homes] > 1).sum(1)]
        far = [(enters & (here[:, homes:] == 1)).sum(1), last.sum(1)]
        seconds = link_seconds(np.stack(near), np.stack(far), self._cluster).max(0)
        most = np.maximum(np.count_nonzero(entered, 2), np.count_nonzero(left, 2)).max(1)
        nics = self._cluster.nics_per_node
        together = np.ceil(most / min(nics, self._per_node)) / max(1, -(-nics // self._per_node))
        return np.maximum(seconds, together / self._cluster.nic_bandwidth)
