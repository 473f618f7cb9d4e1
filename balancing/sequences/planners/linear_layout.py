"""The layout for linear layers: the same number of tokens on each rank, and as few of them moved as possible.

Attention may leave ranks with more or fewer tokens than the mean. Linear layers cost tokens, so tokens are remapped
between the two (Zeppelin, arXiv 2509.21841, section 3.4, which solves a transfer problem). With two speeds, inside a
node and between nodes, no solver is needed: surplus meets deficit inside each node first, and only what a node has
over its share leaves it. That is the least that can cross between nodes.
"""

from collections.abc import Sequence

from balancing.cluster import Cluster
from balancing.sequences.sequence_plan import Shard

__all__ = ["level_tokens"]


def level_tokens(shards: Sequence[Shard], quotas: Sequence[int], cluster: Cluster) -> list[Shard]:
    """Shards with quotas[rank] tokens on each rank, by rank, sequence and start.

    shards: a layout of the same number of tokens. A rank gives away the last of its tokens.
    """
    held: list[list[Shard]] = [[] for _ in quotas]
    for shard in shards:
        held[shard.rank].append(shard)
    for own in held:
        own.sort()
    surplus = [sum(stop - start for _, start, stop, _ in own) - quota for own, quota in zip(held, quotas, strict=True)]
    assert not sum(surplus), f"a layout of {sum(surplus)} tokens more than its quotas"
    moved: list[list[Shard]] = [[] for _ in quotas]
    nodes = [range(first, first + cluster.ranks_per_node) for first in range(0, len(quotas), cluster.ranks_per_node)]
    for members in (*nodes, range(len(quotas))):
        for source, target, tokens in _matches(members, surplus):
            moved[target] += _give(held[source], tokens, target)
    return [shard for own, new in zip(held, moved, strict=True) for shard in _joined(sorted(own + new) if new else own)]


def _matches(members: range, surplus: list[int]) -> list[tuple[int, int, int]]:
    """(source, target, tokens) that bring as many members to their quota as they can themselves; alters `surplus`."""
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


def _joined(shards: list[Shard]) -> list[Shard]:
    joined = shards[:1]
    for shard in shards[1:]:
        last = joined[-1]
        if last.sequence == shard.sequence and last.stop == shard.start:
            joined[-1] = last._replace(stop=shard.stop)
        else:
            joined.append(shard)
    return joined
