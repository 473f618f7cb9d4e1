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

_ROUNDS, _POWER = 6, 1.5  # more rounds are nearer to the split; with a power of 2 two ranks would swap their tokens
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
        self._homes = np.argsort(home, kind="stable").reshape(self._ranks, -1)  # [rank, home expert]
        # The last column stands for empty slots. Ranks are added to fill the last node.
        missing = self._nodes * self._per_node - self._ranks
        self._load = np.pad(load.astype(np.float64), ((0, missing), (0, 1)))
        self._by_node = self._load.reshape(self._nodes, self._per_node, -1).transpose(0, 2, 1).copy()
        self._wanted = self._by_node.sum(2)  # [node, expert]
        self._total = self._load.sum(0)
        self._at_home = np.arange(self._nodes)[:, None] == np.pad(home // self._per_node, (0, 1), constant_values=-1)

    def __call__(self, slots: np.ndarray, copied: np.ndarray | None = None) -> np.ndarray:
        """Seconds of the layer, float [placement].

        slots: int [placement, rank, slot], -1 in empty slots.
        copied: float [placement], `copy_seconds` of each placement; None estimates them, too.
        """
        at_once = max(1, _CELLS // (self._nodes * (self._experts + 1)))
        parts = [slice(at, at + at_once) for at in range(0, len(slots), at_once)]
        return np.concatenate(
            [self._costs(slots[part], copied if copied is None else copied[part]).total for part in parts]
        )

    def _costs(self, slots: np.ndarray, copied: np.ndarray | None) -> MoELayerCost:
        plans, columns = len(slots), self._experts + 1
        homes = np.broadcast_to(self._homes, (plans, *self._homes.shape))
        held = np.concatenate([homes, np.where(slots < 0, self._experts, slots)], axis=2)  # [placement, rank, instance]
        plan = np.arange(plans)[:, None, None]
        in_node = (plan * self._nodes + self._node[:, None]) * columns + held
        size = plans * self._nodes * columns
        number = np.bincount(in_node.reshape(-1), minlength=size).reshape(plans, self._nodes, columns)
        served = self._served(plan * columns + held, number.sum(1))
        forward = served.sum(2).max(1) * self._shape.forward_seconds(self._cluster)
        exchange = self._exchange(held, in_node, served) * (self._shape.hidden * self._shape.bytes_per_parameter)
        copied = self._copied(held, number) if copied is None else copied
        return with_transfers(exchange, forward, copied, self._shape, self._window)

    def _served(self, cell: np.ndarray, number: np.ndarray) -> np.ndarray:
        """Tokens of each instance: float [placement, rank, instance].

        cell: flat index of each instance's placement and expert in [placement, expert].
        number: [placement, expert], number of instances.
        """
        total = np.broadcast_to(self._total, number.shape).reshape(-1)
        flat = cell.reshape(-1)
        served = (total / np.maximum(number.reshape(-1), 1))[cell]
        for _ in range(_ROUNDS):
            served *= (np.maximum(served.sum(2), 1.0) ** -_POWER)[:, :, None]
            weight = np.bincount(flat, served.reshape(-1), minlength=len(total))
            served *= (total / np.maximum(weight, 1e-300))[cell]
        return served

    def _exchange(self, held: np.ndarray, in_node: np.ndarray, served: np.ndarray) -> np.ndarray:
        """Tokens over the speed of the busiest link in one all-to-all: float [placement]. Tokens stay in their node as
        far as its instances serve them."""
        plans, columns = len(held), self._experts + 1
        shape = plans, self._nodes, columns
        of_node = np.bincount(in_node.reshape(-1), served.reshape(-1), minlength=int(np.prod(shape))).reshape(shape)
        kept = np.minimum(of_node, self._wanted)
        leaving = 1 - kept / np.maximum(self._wanted, 1e-300)  # fraction of the node's tokens of each expert
        arriving = (1 - kept / np.maximum(of_node, 1e-300)).reshape(-1)[in_node]
        sent_far = (leaving.swapaxes(0, 1) @ self._by_node).swapaxes(0, 1).reshape(plans, -1)[:, : self._ranks]
        far = np.stack([sent_far, (served * arriving).sum(2)])
        own = np.minimum(served * (1 - arriving), self._load[np.arange(self._ranks)[:, None], held]).sum(2)
        tokens = np.stack([np.broadcast_to(self._load.sum(1)[: self._ranks], own.shape), served.sum(2)])
        return link_seconds(np.maximum(tokens - far - own, 0.0), far, self._cluster).max(0)

    def _copied(self, held: np.ndarray, number: np.ndarray) -> np.ndarray:
        """Estimate of `copy_seconds`, float [placement]. number: int [placement, node, expert], instances.

        Chains (`ReplicaPlacement.chains`) enter a node on its only replica, or on a replica with a free NIC. They leave
        it for the next node on its only replica (in the home's node, the only one beside the home), or on a replica
        with a free NIC.
        """
        plan, node = np.arange(len(held))[:, None, None], self._node[:, None]
        entered = (number > 0) & ~self._at_home
        entered[:, :, -1] = False
        left = np.zeros_like(entered)  # nodes that the chain leaves for a later node
        left[:, :-1] = np.logical_or.accumulate(entered[:, :0:-1], axis=1)[:, ::-1]
        left &= entered
        left |= entered.any(1)[:, None] & self._at_home
        here, enters, leaves = (table[plan, node, held] for table in (number, entered, left))
        replica = np.arange(held.shape[2]) >= self._homes.shape[1]
        last = leaves & ((here == 1) | (replica & ~enters & (here == 2)))
        # Within a node, the home sends and replicas receive.
        near = [(replica & (held < self._experts) & ~enters).sum(2), (~replica & (here > 1)).sum(2)]
        far = [(enters & (here == 1)).sum(2), last.sum(2)]
        seconds = link_seconds(np.stack(near), np.stack(far), self._cluster).max(0)
        nics, most = self._cluster.nics_per_node, np.maximum(entered.sum(2).max(1), left.sum(2).max(1))
        together = np.ceil(most / min(nics, self._per_node)) / max(1, -(-nics // self._per_node))
        return np.maximum(seconds, together / self._cluster.nic_bandwidth)
