"""Tokens that travel between ranks under a plan of sequences, and the seconds that links take for them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from balancing.cluster import Cluster
from balancing.cluster.links import link_seconds, routed_link_seconds
from balancing.sequences.sequence_plan import SequencePlan, columns
from balancing.sequences.window import reaches

__all__ = ["TokenTraffic", "kv_traffic", "layout_traffic", "plan_traffic", "remap_traffic", "traffic_seconds"]


class TokenTraffic(NamedTuple):
    """int64 [transfer]: `tokens` go from rank `source` to rank `target`. A pair of ranks may occur several times."""

    source: np.ndarray
    target: np.ndarray
    tokens: np.ndarray

    def crossing(self, cluster: Cluster) -> np.ndarray:
        """bool [transfer]: whether it leaves its node."""
        return np.asarray(self.source // cluster.ranks_per_node != self.target // cluster.ranks_per_node)

    def between(self, cluster: Cluster) -> tuple[int, int]:
        """Tokens that stay in their node, and tokens that leave it."""
        far = int(self.tokens[self.crossing(cluster)].sum())
        return int(self.tokens.sum()) - far, far

    def table(self, ranks: int) -> np.ndarray:
        """int64 [source, target]."""
        table = np.zeros((ranks, ranks), dtype=np.int64)
        np.add.at(table, (self.source, self.target), self.tokens)
        return table


def kv_traffic(plan: SequencePlan) -> TokenTraffic:
    """Tokens whose keys and values are sent in one layer, forward.

    On a ring each rank passes to the next one all tokens that the next one does not hold. Gathered, a rank receives
    every token that its last query sees and that it does not hold, from the rank that holds it; with a window, every
    token that any of its queries sees.
    """
    return plan_traffic(plan)


def plan_traffic(plan: SequencePlan, *, in_step: bool = False) -> TokenTraffic:
    """As `kv_traffic`. in_step: as in `layout_traffic`."""
    if plan.window is None:
        return layout_traffic(plan.table, plan.lengths, plan.exchange, in_step=in_step)
    found = [
        (shard.rank, reach.rank, min(shard.stop, reach.stop) - max(shard.start, reach.begin))
        for reach in reaches(plan)
        for shard in reach.holders
    ]
    return TokenTraffic(*np.array(found, dtype=np.int64).reshape(-1, 3).T)


def layout_traffic(
    shards: np.ndarray, lengths: Sequence[int], exchange: Sequence[str], *, in_step: bool = False
) -> TokenTraffic:
    """As `kv_traffic`, of a layout that is not a plan yet: int64 [shard, (sequence, start, stop, rank)].

    in_step: for times instead of bytes. The ranks of a ring go from round to round together, so each round takes as
    long as its largest share; every share counts as the largest.
    """
    how = np.array(exchange)[shards[:, 0]]
    on_rings = _on_rings(shards[how == "ring"], lengths, in_step)
    gathered = _gathered(shards[how == "gather"], len(lengths))
    return TokenTraffic(*(np.concatenate(parts) for parts in zip(on_rings, gathered, strict=True)))


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
    """Seconds until everything has arrived, by the link model of `balancing.cluster.links`.

    token_bytes: bytes of one token of the traffic.
    routed: whether what leaves a node is spread over all its NICs; None for whichever is quicker.

    Raises ValueError for ranks outside the cluster.
    """
    ranks = cluster.world_size
    highest = max(int(traffic.source.max(initial=0)), int(traffic.target.max(initial=0)))
    if highest >= ranks:
        raise ValueError(f"rank {highest} of the plan is not in a cluster of {ranks} ranks; plan for this cluster")
    crossing = traffic.crossing(cluster)
    near, far = (
        np.stack([np.bincount(end[part], traffic.tokens[part], ranks) for end in traffic[:2]]) * token_bytes
        for part in (~crossing, crossing)
    )
    models = {False: link_seconds, True: routed_link_seconds}
    chosen = models.values() if routed is None else [models[routed]]
    return min(float(seconds(near, far, cluster).max()) for seconds in chosen)


class _Members(NamedTuple):
    """int64 [member]: ranks that hold parts of a sequence, by sequence, then in the order of its ring."""

    sequence: np.ndarray
    rank: np.ndarray
    tokens: np.ndarray
    sees: np.ndarray  # keys that its last query sees


def _members(shards: np.ndarray) -> _Members:
    sequence, start, stop, rank = shards.T
    ranks = int(rank.max(initial=0)) + 1
    member, first, which = np.unique(sequence * ranks + rank, return_index=True, return_inverse=True)
    tokens, sees = np.zeros(len(member), dtype=np.int64), np.zeros(len(member), dtype=np.int64)
    np.add.at(tokens, which, stop - start)
    np.maximum.at(sees, which, stop)
    order = np.lexsort((first, member // ranks))
    return _Members(member[order] // ranks, member[order] % ranks, tokens[order], sees[order])


def _on_rings(shards: np.ndarray, lengths: Sequence[int], in_step: bool) -> TokenTraffic:
    """Tokens that each member of a ring passes to the next."""
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


def _gathered(shards: np.ndarray, sequences: int) -> TokenTraffic:
    """Tokens that each rank needs of each shard, over all pairs of a shard and a member of its sequence."""
    members = _members(shards)
    number = np.bincount(members.sequence, minlength=sequences)
    sequence, start, stop, holder = shards.T
    pairs = number[sequence]
    shard = np.repeat(np.arange(len(shards)), pairs)
    within = np.arange(len(shard)) - np.repeat(np.cumsum(pairs) - pairs, pairs)
    member = (np.cumsum(number) - number)[sequence[shard]] + within
    tokens = np.clip(np.minimum(stop[shard], members.sees[member]) - start[shard], 0, None)
    return _off_diagonal(holder[shard], members.rank[member], tokens)


def _off_diagonal(source: np.ndarray, target: np.ndarray, tokens: np.ndarray) -> TokenTraffic:
    moves = (source != target) & (tokens > 0)
    return TokenTraffic(source[moves], target[moves], tokens[moves])
