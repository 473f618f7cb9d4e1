"""The link model of all cost models: seconds that links take for an exchange of messages.

Each rank has one link into its node, and each node has NICs, which ranks may share. All links work at the same time and
in both directions at once, so an exchange takes as long as its busiest link. Latency is not included.

The last axis of byte arrays is the rank. `near` are the bytes that a rank sends to (or receives from) ranks of its own
node, `far` those for ranks of other nodes.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from balancing.cluster.cluster import Cluster

__all__ = [
    "NicShares",
    "exchange_seconds",
    "first_nics",
    "link_seconds",
    "nic_shares",
    "node_masks",
    "routed_link_seconds",
]


class NicShares(NamedTuple):
    """The NICs of each rank, and the fraction of the rank's traffic through each NIC. Pairs are in order of NICs.

    rank, nic: int64 [pair].
    share: float64 [pair]; the shares of a rank add up to 1.
    first: int64 [NIC with ranks], its first pair.
    """

    rank: np.ndarray
    nic: np.ndarray
    share: np.ndarray
    first: np.ndarray


def exchange_seconds(table: np.ndarray, cluster: Cluster) -> float:
    """Seconds of an exchange. table: float [source_rank, rank], bytes; the diagonal costs nothing.

    Raises ValueError if the table has more ranks than the cluster.
    """
    inside, outside = node_masks(cluster, len(table))
    near, far = table * inside, table * outside
    ends = np.stack([near.sum(0), near.sum(1)]), np.stack([far.sum(0), far.sum(1)])
    return float(link_seconds(*ends, cluster).max())


def link_seconds(near: np.ndarray, far: np.ndarray, cluster: Cluster) -> np.ndarray:
    """Seconds [...] of the busiest link. near, far: bytes [..., rank]. Each rank uses the NICs next to it.

    Raises ValueError for more ranks than the cluster has.
    """
    rank, _, share, first = nic_shares(cluster, far.shape[-1])
    by_nic = np.add.reduceat(far[..., rank] * share, first, axis=-1)
    return np.maximum(near.max(-1) / cluster.intra_node_bandwidth, by_nic.max(-1) / cluster.nic_bandwidth)


def routed_link_seconds(near: np.ndarray, far: np.ndarray, cluster: Cluster) -> np.ndarray:
    """Seconds [...] of the busiest link if each rank spreads its `far` bytes over all NICs of its node.

    near, far: bytes [..., rank] of all ranks of the cluster. Bytes through other ranks' NICs also use the links inside
    the node (Zeppelin, arXiv 2509.21841, section 3.3).
    """
    inside = near + far * (1 - 1 / cluster.nics_per_node)
    by_node = far.reshape(*far.shape[:-1], cluster.nodes, cluster.ranks_per_node).sum(-1)
    network = by_node.max(-1) / (cluster.nics_per_node * cluster.nic_bandwidth)
    return np.maximum(inside.max(-1) / cluster.intra_node_bandwidth, network)


@lru_cache(maxsize=32)
def node_masks(cluster: Cluster, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays bool [rank, rank]: pairs of different ranks in one node, and pairs of ranks in different nodes.

    Raises ValueError for more ranks than the cluster has.
    """
    _check_ranks(cluster, ranks)
    node = np.arange(ranks) // cluster.ranks_per_node
    same = node[:, None] == node[None, :]
    return same & ~np.eye(ranks, dtype=bool), ~same


@lru_cache(maxsize=32)
def nic_shares(cluster: Cluster, ranks: int) -> NicShares:
    """The NICs of ranks 0 to `ranks` - 1. Raises ValueError for more ranks than the cluster has."""
    _check_ranks(cluster, ranks)
    nics = [cluster.nics(rank) for rank in range(ranks)]
    pairs = [(rank, nic, 1 / len(own)) for rank, own in enumerate(nics) for nic in own]  # both ascending
    rank, nic, share = (np.array(column) for column in zip(*pairs, strict=True))
    return NicShares(rank, nic, share, np.flatnonzero(np.diff(nic, prepend=-1)))


@lru_cache(maxsize=8)
def first_nics(cluster: Cluster) -> np.ndarray:
    """`Cluster.nic` of every rank: int64 [rank]."""
    return np.array([cluster.nic(rank) for rank in range(cluster.world_size)])


def _check_ranks(cluster: Cluster, ranks: int) -> None:
    if ranks > cluster.world_size:
        raise ValueError(
            f"{ranks} ranks do not fit a cluster of {cluster.world_size}; describe the nodes that the ranks run on, "
            "for instance with Cluster.relabel(nodes, ranks_per_node)"
        )
