"""How keys and values of a cut sequence travel: round a ring, or from each holder to each rank that needs them.

Gathered, a rank receives only what its queries see, and all NICs of a node work; but every rank of a node fetches the
same tokens from the other nodes for itself. On a ring each token enters a node once, through one NIC or, routed,
through all of them (Zeppelin, arXiv 2509.21841, section 3.3); but ranks also receive what they do not need, round by
round. Inside a node gathering is the better one. Between nodes it is so too while attention hides it.
"""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from balancing.cluster import Cluster
from balancing.sequences.cost import hidden_seconds, kv_bytes
from balancing.sequences.layout import AttentionShape, Exchange, Shard
from balancing.sequences.load import causal_area

__all__ = ["choose_exchange", "same_exchange"]


def same_exchange(shards: Sequence[Shard], lengths: Sequence[int], shared: Exchange) -> tuple[Exchange, ...]:
    """`shared` for every sequence that lies on several ranks, "local" for the others."""
    holder: dict[int, int] = {}
    found: list[Exchange] = ["local"] * len(lengths)
    for shard in shards:
        if holder.setdefault(shard.sequence, shard.rank) != shard.rank:
            found[shard.sequence] = shared
    return tuple(found)


def choose_exchange(
    shards: Sequence[Shard], lengths: Sequence[int], cluster: Cluster, shape: AttentionShape
) -> tuple[Exchange, ...]:
    """For each sequence what brings the fewest bytes into nodes; "gather" for all where attention hides those.

    shards: a layout for attention that is level in area.
    """
    found = list(same_exchange(shards, lengths, "gather"))
    if cluster.nodes == 1:
        return tuple(found)
    entering = np.zeros(cluster.nodes)  # tokens, if all are gathered
    on_ring: list[int] = []
    cut = sorted(shard for shard in shards if found[shard.sequence] == "gather")
    for sequence, group in groupby(cut, key=lambda shard: shard.sequence):
        own = list(group)
        node = np.array([shard.rank // cluster.ranks_per_node for shard in own])
        if (node == node[0]).all():
            continue
        sees = {shard.rank: shard.stop for shard in own}  # of a rank's shards the last one counts
        start, stop = np.array([(shard.start, shard.stop) for shard in own]).T
        needs = np.array(list(sees.values()))
        at = np.array([rank // cluster.ranks_per_node for rank in sees])
        tokens = np.clip(np.minimum(stop[:, None], needs) - start[:, None], 0, None) * (node[:, None] != at)
        here = np.bincount(at, tokens.sum(0), minlength=cluster.nodes)
        entering += here
        if here.max() > lengths[sequence]:
            on_ring.append(sequence)
    seconds = entering.max() * kv_bytes(shape) / (cluster.nics_per_node * cluster.nic_bandwidth)
    if seconds > hidden_seconds(causal_area(lengths) / cluster.world_size, cluster, shape):
        for sequence in on_ring:
            found[sequence] = "ring"
    return tuple(found)
