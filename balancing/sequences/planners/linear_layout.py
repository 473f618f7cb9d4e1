"""The layout for linear layers: the same number of tokens on each rank, with as few of them moved as possible.

Attention may leave ranks with more or fewer tokens than the mean. Linear layers cost tokens, so tokens are remapped
between the two layouts (Zeppelin, arXiv 2509.21841, section 3.4, which solves a transfer problem). With two speeds,
inside a node and between nodes, no solver is needed: ranks with too many tokens give to ranks of their node with too
few, and only what a node has over its share leaves it. No token-equal layout moves fewer tokens between nodes.
"""

from collections.abc import Sequence

from balancing.cluster import Cluster
from balancing.sequences.sequence_plan import Shard

__all__ = ["linear_layout", "token_targets"]


def linear_layout(attention: Sequence[Shard], cluster: Cluster) -> tuple[Shard, ...]:
    """Shards with `token_targets` tokens on each rank, by rank, sequence and start; `attention` itself if it has them.

    attention: the layout of attention. A rank gives away its last tokens. Raises ValueError for a rank outside the
    cluster.
    """
    held: list[list[Shard]] = [[] for _ in range(cluster.world_size)]
    for shard in attention:
        if not 0 <= shard.rank < cluster.world_size:
            raise ValueError(f"{shard} is on rank {shard.rank}; the cluster has {cluster.world_size} ranks")
        held[shard.rank].append(shard)
    tokens = [sum(stop - start for _, start, stop, _ in own) for own in held]
    surplus = [here - target for here, target in zip(tokens, token_targets(tokens, cluster), strict=True)]
    if not any(surplus):
        return tuple(attention)
    for own in held:
        own.sort()
    moved: list[list[Shard]] = [[] for _ in held]
    per_node = cluster.ranks_per_node
    nodes = [range(first, first + per_node) for first in range(0, cluster.world_size, per_node)]
    for members in (*nodes, range(cluster.world_size)):
        for source, target, number in _matches(members, surplus):
            moved[target] += _give(held[source], number, target)
    return tuple(shard for own, new in zip(held, moved, strict=True) for shard in _joined(own, new))


def token_targets(held: Sequence[int], cluster: Cluster) -> list[int]:
    """Tokens of each rank in linear layers: the mean, rounded down or up so that the total is kept.

    held: tokens [rank] in attention. Ranks of nodes with more tokens than their share round up first, then ranks with
    more tokens: fewer tokens move so.
    """
    each, more = divmod(sum(held), cluster.world_size)
    targets = [each] * cluster.world_size
    if not more:
        return targets
    node = [cluster.node(rank) for rank in range(cluster.world_size)]
    surplus = [0] * cluster.nodes
    for rank, tokens in enumerate(held):
        surplus[node[rank]] += tokens - each
    ranks = sorted(range(cluster.world_size), key=lambda rank: (each - held[rank], rank))
    for spares_a_move in (True, False):
        for rank in ranks:
            if more and targets[rank] == each and (surplus[node[rank]] > 0 or not spares_a_move):
                targets[rank] += 1
                surplus[node[rank]] -= 1
                more -= 1
    return targets


def _matches(members: range, surplus: list[int]) -> list[tuple[int, int, int]]:
    """(source, target, tokens) that bring as many members to their target as they can themselves; alters `surplus`."""
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


def _give(own: list[Shard], tokens: int, target: int) -> list[Shard]:
    """The last `tokens` of a rank's shards, now the target's; alters `own`."""
    given = []
    while tokens:
        shard = own.pop()
        if shard.tokens > tokens:
            own.append(shard._replace(stop=shard.stop - tokens))
            shard = shard._replace(start=shard.stop - tokens)
        given.append(shard._replace(rank=target))
        tokens -= shard.tokens
    return given


def _joined(own: list[Shard], new: list[Shard]) -> list[Shard]:
    """A rank's shards in order, those it had and those it was given; adjacent ones are merged if it was given any."""
    if not new:
        return own
    found: list[Shard] = []
    for shard in sorted(own + new):
        if found and found[-1].sequence == shard.sequence and found[-1].stop == shard.start:
            found[-1] = found[-1]._replace(stop=shard.stop)
        else:
            found.append(shard)
    return found
