"""Tokens that are sent between ranks under a plan of sequences, and the seconds that links take for them.

Gathered keys enter a node once, through ranks that each receive equally many, and are copied inside the node
(`balancing.sequences.engine.gather`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from balancing.cluster import Cluster
from balancing.cluster.links import link_seconds, routed_link_seconds
from balancing.sequences.sequence_plan import TILE, SequencePlan, columns, reaches

__all__ = [
    "LinkTokens",
    "TokenTraffic",
    "kv_traffic",
    "link_tokens_seconds",
    "plan_links",
    "remap_traffic",
    "traffic_seconds",
]


class TokenTraffic(NamedTuple):
    """int64 [transfer]: `tokens` go from rank `source` to rank `target`. A pair of ranks may occur several times."""

    source: np.ndarray
    target: np.ndarray
    tokens: np.ndarray

    def crossing(self, cluster: Cluster) -> np.ndarray:
        """bool [transfer]: whether the transfer leaves its node."""
        return np.asarray(self.source // cluster.ranks_per_node != self.target // cluster.ranks_per_node)

    def between(self, cluster: Cluster) -> tuple[int, int]:
        """Tokens that stay in their node, and tokens that leave it."""
        far = int(self.tokens[self.crossing(cluster)].sum())
        return int(self.tokens.sum()) - far, far

    def table(self, ranks: int) -> np.ndarray:
        """int64 [source, target], tokens."""
        table = np.zeros((ranks, ranks), dtype=np.int64)
        np.add.at(table, (self.source, self.target), self.tokens)
        return table


class LinkTokens(NamedTuple):
    """Tokens on the links of ranks.

    near, far: float64 [sent or received, rank], tokens that a rank sends to and receives from its own node (near) and
        other nodes (far), with those that it hands on for other ranks.
    needed: float64 [rank], tokens that the rank receives for its own queries.
    copies: bool [rank], whether the rank's node copies gathered keys.
    """

    near: np.ndarray
    far: np.ndarray
    needed: np.ndarray
    copies: np.ndarray

    def between(self) -> tuple[int, int]:
        """Tokens that are sent inside nodes, and tokens that leave a node."""
        return round(float(self.near[0].sum())), round(float(self.far[0].sum()))


def kv_traffic(plan: SequencePlan) -> TokenTraffic:
    """Tokens whose keys and values a rank receives in one layer, forward.

    On a ring each rank passes to the next rank all tokens that the next rank does not hold. Gathering brings a rank
    every token that any of its queries sees, from the rank that holds the token. Copies inside nodes are not counted
    here but in `plan_links`.
    """
    on_rings, gathered = _plan_traffic(plan, in_step=False)
    return TokenTraffic(*(np.concatenate(parts) for parts in zip(on_rings, gathered.traffic, strict=True)))


def plan_links(plan: SequencePlan, cluster: Cluster, *, in_step: bool = False) -> LinkTokens:
    """Tokens on links for keys and values of one layer, forward.

    in_step: count every share of a ring as the largest one, to model times instead of bytes: the ranks of a ring go
        from round to round together, so each round takes as long as its largest share.

    Raises ValueError for a plan with more ranks than the cluster.
    """
    if plan.ranks > cluster.world_size:
        raise ValueError(
            f"a plan of {plan.ranks} ranks is not for a cluster of {cluster.world_size} ranks; plan for this cluster"
        )
    return _links(*_plan_traffic(plan, in_step=in_step), cluster, level=plan.sees_all)


class _Gathered(NamedTuple):
    """Gathered tokens. begin: int64 [transfer], number of the first token in the concatenated sequences."""

    traffic: TokenTraffic
    begin: np.ndarray


def _plan_traffic(plan: SequencePlan, *, in_step: bool) -> tuple[TokenTraffic, _Gathered]:
    """Tokens on rings, and gathered tokens."""
    if plan.sees_all:
        how = np.array(plan.exchange)[plan.table[:, 0]]
        on_rings = _on_rings(plan.table[how == "ring"], plan.lengths, in_step)
        return on_rings, _gathered(plan.table[how == "gather"], plan.lengths)
    offset = np.cumsum([0, *plan.lengths]).tolist()
    transfers = [
        (shard.rank, reach.rank, min(shard.stop, reach.stop) - begin, offset[reach.sequence] + begin)
        for reach in reaches(plan)
        for shard in reach.holders
        for begin in (max(shard.start, reach.begin),)
    ]
    *columns_of_traffic, begin = np.array(transfers, dtype=np.int64).reshape(-1, 4).T
    nothing = np.zeros(0, dtype=np.int64)
    return TokenTraffic(nothing, nothing, nothing), _Gathered(TokenTraffic(*columns_of_traffic), begin)


def _links(on_rings: TokenTraffic, gathered: _Gathered, cluster: Cluster, level: bool) -> LinkTokens:
    """level: whether all ranks of a node receive equally many tokens of other nodes."""
    ranks, per_node = cluster.world_size, cluster.ranks_per_node
    near, far, needed = _by_rank(on_rings, cluster)
    traffic, crossing = gathered.traffic, gathered.traffic.crossing(cluster)
    inside, _, wanted = _by_rank(traffic, cluster)
    near, needed = near + inside, needed + wanted
    # A token enters a node with the first transfer to this node in order of tokens; all other transfers are copies.
    source, target, tokens = (column[crossing] for column in traffic)
    node = target // per_node
    begin = node * (int((gathered.begin + traffic.tokens).max(initial=0)) + 1) + gathered.begin[crossing]
    order = np.argsort(begin, kind="stable")
    stop = (begin + tokens)[order]
    before = np.append(0, np.maximum.accumulate(stop)[:-1]) if len(stop) else stop
    new = np.clip(stop - np.maximum(begin[order], before), 0, None)
    again = tokens[order] - new
    entering, copied = _sum(node[order], new, cluster.nodes), _sum(target[order], again, ranks)
    received, copies = _sum(target[order], new, ranks), copied.reshape(-1, per_node).sum(1) > 0
    if level:
        received = np.repeat(entering / per_node, per_node)
        needed_far = _sum(target, tokens, ranks)
        copied = np.maximum(needed_far - received, 0)
        # Shares are whole tiles. What a rank needs beyond its share enters through other ranks.
        copies |= (needed_far > np.ceil(received / TILE) * TILE).reshape(-1, per_node).any(1)
    node_copies = copied.reshape(-1, per_node).sum(1)
    near += np.stack([np.repeat(node_copies / per_node, per_node), copied])
    far += np.stack([_sum(source[order], new, ranks), received])
    return LinkTokens(near, far, needed, np.repeat(copies, per_node))


def _by_rank(traffic: TokenTraffic, cluster: Cluster) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens inside nodes and between nodes, [sent or received, rank], and all received tokens [rank]."""
    ranks, crossing = cluster.world_size, traffic.crossing(cluster)
    near, far = (
        np.stack([_sum(end[part], traffic.tokens[part], ranks) for end in traffic[:2]])
        for part in (~crossing, crossing)
    )
    return near, far, near[1] + far[1]


def _sum(where: np.ndarray, tokens: np.ndarray, number: int) -> np.ndarray:
    return np.bincount(where, tokens, number).astype(np.float64)


def remap_traffic(plan: SequencePlan) -> TokenTraffic:
    """Tokens that are sent from the linear layout to the layout of attention, in one layer."""
    offset = np.cumsum([0, *plan.lengths])
    owners, cuts = [], []
    for layout in (plan.linear, plan.attention):
        sequence, start, _, rank = columns(sorted(layout)).T
        cuts.append(offset[sequence] + start)
        owners.append(rank)
    begin = np.union1d(*cuts)
    tokens = np.diff(np.append(begin, offset[-1]))
    source, target = (
        owner[np.searchsorted(cut, begin, side="right") - 1] for owner, cut in zip(owners, cuts, strict=True)
    )
    return _off_diagonal(source, target, tokens)


def traffic_seconds(
    traffic: TokenTraffic,
    token_bytes: float,
    cluster: Cluster,
    routed: bool | None = None,
) -> float:
    """Seconds until all tokens have arrived, by the link model of `balancing.cluster.links`.

    token_bytes: bytes of one token of the traffic.
    routed: whether traffic that leaves a node is spread over all NICs of the node; None for the quicker way.

    Raises ValueError for ranks outside the cluster.
    """
    highest = max(int(traffic.source.max(initial=0)), int(traffic.target.max(initial=0)))
    if highest >= cluster.world_size:
        raise ValueError(
            f"rank {highest} of the plan is not in a cluster of {cluster.world_size} ranks; plan for this cluster"
        )
    near, far, _ = _by_rank(traffic, cluster)
    return link_tokens_seconds(near, far, token_bytes, cluster, routed)


def link_tokens_seconds(
    near: np.ndarray, far: np.ndarray, token_bytes: float, cluster: Cluster, routed: bool | None = None
) -> float:
    """As `traffic_seconds`. near, far: as in `LinkTokens`."""
    models = {False: link_seconds, True: routed_link_seconds}
    chosen = models.values() if routed is None else [models[routed]]
    return min(float(seconds(near * token_bytes, far * token_bytes, cluster).max()) for seconds in chosen)


class _Members(NamedTuple):
    """int64 [member]: a member is a rank that holds a part of a sequence. Sorted by sequence, then in ring order."""

    sequence: np.ndarray
    rank: np.ndarray
    tokens: np.ndarray
    sees: np.ndarray  # keys that its last query sees


def _members(shards: np.ndarray) -> _Members:
    sequence, start, stop, rank = shards.T
    ranks = int(rank.max(initial=0)) + 1
    member, which = np.unique(sequence * ranks + rank, return_inverse=True)
    tokens, sees = np.zeros(len(member), dtype=np.int64), np.zeros(len(member), dtype=np.int64)
    np.add.at(tokens, which, stop - start)
    np.maximum.at(sees, which, stop)
    return _Members(member // ranks, member % ranks, tokens, sees)


def _on_rings(shards: np.ndarray, lengths: Sequence[int], in_step: bool) -> TokenTraffic:
    """Tokens that each member of a ring passes to the next. in_step: as in `plan_links`."""
    members = _members(shards)
    if not len(shards):
        return TokenTraffic(members.rank, members.rank, members.tokens)
    begins = np.flatnonzero(np.append(True, np.diff(members.sequence) != 0))
    following = np.arange(1, len(members.rank) + 1)
    following[np.append(begins[1:], len(members.rank)) - 1] = begins
    handed = np.array(lengths)[members.sequence] - members.tokens[following]
    if in_step:
        number = np.diff(np.append(begins, len(members.rank)))
        handed = np.repeat((number - 1) * np.maximum.reduceat(members.tokens, begins), number)
    return _off_diagonal(members.rank, members.rank[following], handed)


def _gathered(shards: np.ndarray, lengths: Sequence[int]) -> _Gathered:
    """Tokens that each rank needs of each shard, over all pairs of a shard and a member of its sequence."""
    members = _members(shards)
    number = np.bincount(members.sequence, minlength=len(lengths))
    sequence, start, stop, holder = shards.T
    pairs = number[sequence]
    shard = np.repeat(np.arange(len(shards)), pairs)
    within = np.arange(len(shard)) - np.repeat(np.cumsum(pairs) - pairs, pairs)
    member = (np.cumsum(number) - number)[sequence[shard]] + within
    tokens = np.minimum(stop[shard], members.sees[member]) - start[shard]
    source, target = holder[shard], members.rank[member]
    moves = (source != target) & (tokens > 0)
    begin = (np.cumsum([0, *lengths])[sequence] + start)[shard]
    return _Gathered(TokenTraffic(source[moves], target[moves], tokens[moves]), begin[moves])


def _off_diagonal(source: np.ndarray, target: np.ndarray, tokens: np.ndarray) -> TokenTraffic:
    moves = (source != target) & (tokens > 0)
    return TokenTraffic(source[moves], target[moves], tokens[moves])
