"""The layout for linear layers: the same number of tokens on each rank, with as few of them moved as possible.

A balanced layout of attention may give ranks more or fewer tokens than the mean. The cost of linear layers is
proportional to tokens, so tokens are remapped between the two layouts. Zeppelin (arXiv 2509.21841, section 3.4) solves
a transfer problem for that. With two speeds, inside a node and between nodes, no solver is needed: ranks with too many
tokens give them to ranks of their node with too few, and only a node's surplus leaves it. No token-equal layout moves
fewer tokens between nodes.
"""

from collections.abc import Sequence

from balancing.cluster import Cluster
from balancing.sequences.sequence_plan import Shard

__all__ = ["linear_layout", "token_targets"]


def linear_layout(attention: Sequence[Shard], cluster: Cluster) -> tuple[Shard, ...]:
    """Shards with `token_targets` tokens on each rank, sorted by rank, sequence and start.

    attention: the layout of attention, returned as it is if its tokens are equal already. A rank gives away its last
        tokens.

    Raises ValueError for a rank outside the cluster.
    """
    by_rank: list[list[Shard]] = [[] for _ in range(cluster.world_size)]
    for shard in attention:
        if not 0 <= shard.rank < cluster.world_size:
            raise ValueError(f"{shard} is on rank {shard.rank}; the cluster has {cluster.world_size} ranks")
        by_rank[shard.rank].append(shard)
    tokens = [sum(stop - start for _, start, stop, _ in shards) for shards in by_rank]
    surplus = [here - target for here, target in zip(tokens, token_targets(tokens, cluster), strict=True)]
    if not any(surplus):
        return tuple(attention)
    for shards in by_rank:
        shards.sort()
    moved: list[list[Shard]] = [[] for _ in by_rank]
    per_node = cluster.ranks_per_node
    nodes = [range(first, first + per_node) for first in range(0, cluster.world_size, per_node)]
    for members in (*nodes, range(cluster.world_size)):
        for source, target, number in _matches(members, surplus):
            moved[target] += _give(by_rank[source], number, target)
    return tuple(shard for shards, new in zip(by_rank, moved, strict=True) for shard in _joined(shards, new))


def token_targets(attention_tokens: Sequence[int], cluster: Cluster) -> list[int]:
    """Tokens of each rank in linear layers: the mean, rounded down or up so that the total is kept.

    attention_tokens: [rank], tokens in attention. To move fewer tokens, ranks of nodes with a surplus are rounded up
        first, and among ranks those with more tokens.
    """
    mean, more = divmod(sum(attention_tokens), cluster.world_size)
    targets = [mean] * cluster.world_size
    if not more:
        return targets
    node = [cluster.node(rank) for rank in range(cluster.world_size)]
    surplus = [0] * cluster.nodes
    for rank, tokens in enumerate(attention_tokens):
        surplus[node[rank]] += tokens - mean
    ranks = sorted(range(cluster.world_size), key=lambda rank: (mean - attention_tokens[rank], rank))
    for spares_a_move in (True, False):
        for rank in ranks:
            if more and targets[rank] == mean and (surplus[node[rank]] > 0 or not spares_a_move):
                targets[rank] += 1
                surplus[node[rank]] -= 1
                more -= 1
    return targets


def _matches(members: range, surplus: list[int]) -> list[tuple[int, int, int]]:
    """(source, target, tokens): moves among `members` from ranks with a surplus to ranks that lack tokens; alters
    `surplus`."""
    found = []
    targets = [rank for rank in members if surplus[rank] < 0]
    for source in members:
        while surplus[source] > 0 and targets:
            target = targets[0]
            tokens = min(surplus[source], -surplus[target])
            found.append((source, target, tokens))
            surplus[source] -= tokens
            surplus[target] += tokens
            if not surplus[target]:
                targets.pop(0)
    return found


def _give(shards: list[Shard], tokens: int, target: int) -> list[Shard]:
    """The last `tokens` tokens of a rank's shards, as shards of rank `target`; alters `shards`."""
    given = []
    while tokens:
        shard = shards.pop()
        if shard.tokens > tokens:
            shards.append(shard._replace(stop=shard.stop - tokens))
            shard = shard._replace(start=shard.stop - tokens)
        given.append(shard._replace(rank=target))
        tokens -= shard.tokens
    return given


def _joined(shards: list[Shard], new: list[Shard]) -> list[Shard]:
    """A rank's own and new shards, sorted; adjacent ones are merged if there are new ones."""
    if not new:
        return shards
    found: list[Shard] = []
    for shard in sorted(shards + new):
        if found and found[-1].sequence == shard.sequence and found[-1].stop == shard.start:
            found[-1] = found[-1]._replace(stop=shard.stop)
        else:
            found.append(shard)
    return found
