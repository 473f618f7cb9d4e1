"""Tokens move between the layout that suits attention and the layout that suits linear layers.

Attention costs area, linear layers cost tokens, so the best layouts differ (Zeppelin, arXiv 2509.21841, section 6: the
remapping layer). `linear_layout` derives a token-equal layout from any attention layout by moving as few tokens as
possible, and as few as possible between nodes: where surplus meets deficit inside a node, nothing crosses a NIC, so
what crosses is exactly what nodes have too much of. `moves` says what one rank sends and receives; `remap` does it to
any tensor, differentiably. Attention itself fuses the moves of q, k, v and of its output with its own transfers.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from balancing.cluster import Cluster
from balancing.sequences.engine.gather import by_sequence
from balancing.sequences.engine.program import Exchange, Message, Rows, joined
from balancing.sequences.engine.transport import Transport
from balancing.sequences.sequence_plan import SequencePlan, Shard

__all__ = ["linear_layout", "moves", "remap", "token_targets"]


def token_targets(attention: Iterable[Shard], cluster: Cluster) -> list[int]:
    """Tokens of each rank in a token-equal layout: the mean, rounded down or up so that the total is kept.

    Nodes with more tokens than their share get the rounded-up targets first, then ranks with more tokens, so that
    fewer tokens move.
    """
    held = _held(attention, cluster)
    each, more = divmod(sum(held), cluster.world_size)
    targets = [each] * cluster.world_size
    surplus = [0] * cluster.nodes
    for rank, tokens in enumerate(held):
        surplus[cluster.node(rank)] += tokens - each
    ranks = sorted(range(cluster.world_size), key=lambda rank: (each - held[rank], rank))
    for strict in (True, False):  # first where it spares a move between nodes
        for rank in ranks:
            node = cluster.node(rank)
            if more and targets[rank] == each and (surplus[node] > 0 or not strict):
                targets[rank] += 1
                surplus[node] -= 1
                more -= 1
    return targets


def linear_layout(attention: Sequence[Shard], cluster: Cluster) -> tuple[Shard, ...]:
    """A layout with equal tokens on all ranks of `cluster` (they differ by one at most), made from the layout of
    attention by moving the surplus of ranks that have too many tokens. Planners use it for `SequencePlan.linear`.

    Surplus meets deficit inside the node first, so the tokens that change nodes are the fewest possible:
    sum over nodes of max(0, tokens of the node - targets of its ranks). A rank gives away the end of its last shards.
    Each rank's shards are sorted by sequence and position; a layout that is equal already comes back as it is.
    """
    targets = token_targets(attention, cluster)
    own: list[list[Shard]] = [[] for _ in targets]
    for shard in attention:
        own[shard.rank].append(shard)
    excess = [tokens - target for tokens, target in zip(_held(attention, cluster), targets, strict=True)]
    if not any(excess):
        return tuple(attention)
    nodes = [range(n * cluster.ranks_per_node, (n + 1) * cluster.ranks_per_node) for n in range(cluster.nodes)]
    for ranks in (*nodes, range(cluster.world_size)):
        _level(own, excess, ranks)
    assert not any(excess), "what is too much here is what is missing there"
    return tuple(shard for shards in own for shard in _sorted(shards))


def moves(
    source: Sequence[Shard],
    target: Sequence[Shard],
    own_source: Sequence[Shard],
    own_target: Sequence[Shard],
) -> Exchange:
    """What `rank` sends and receives when all tokens go from layout `source` to layout `target`.

    own_source, own_target: the rank's shards in the order in which its tokens stand before and after. Rows of what is
    sent count from the first token before; rows of what is received, from the first token after. Tokens that stay are
    a message to the rank itself.
    """
    return Exchange(_overlaps(own_source, by_sequence(target)), _overlaps(own_target, by_sequence(source)))


def remap(
    x: torch.Tensor,
    plan: SequencePlan,
    rank: int,
    group: dist.ProcessGroup | None = None,
    *,
    to_linear: bool,
) -> torch.Tensor:
    """`x` [tokens of this rank, ...] in the other layout, from attention's to the linear layers' or back.

    All ranks of the group take part, in the backward pass too, which moves gradients the other way. Returns x itself
    where the plan has one layout.
    """
    if not plan.remapped:
        return x
    attention, linear = (plan.shards(rank, linear=linear) for linear in (False, True))
    there = moves(plan.linear, plan.attention, linear, attention)
    back = Exchange(there.receives, there.sends)
    if to_linear:
        there, back = back, there
    return _Remap.apply(x, there, back, Transport(group))


class _Remap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Exchange, back: Exchange, transport: Transport) -> torch.Tensor:
        ctx.way_back, ctx.transport = (back, there), transport
        return moved(x, there, transport)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return moved(grad, ctx.way_back[0], ctx.transport), None, None, None


def moved(x: torch.Tensor, exchange: Exchange, transport: Transport) -> torch.Tensor:
    """`x` [tokens before, ...] after the moves: [tokens after, ...]."""
    rows = sum(message.tokens for message in exchange.receives)
    after = x.new_empty(rows, *x.shape[1:])
    transport.start(exchange, x.contiguous(), after).wait()
    return after


def _held(shards: Iterable[Shard], cluster: Cluster) -> list[int]:
    held = [0] * cluster.world_size
    for shard in shards:
        if not 0 <= shard.rank < cluster.world_size:
            raise ValueError(f"{shard} is on rank {shard.rank}; the cluster has {cluster.world_size} ranks")
        held[shard.rank] += shard.tokens
    return held


def _level(own: list[list[Shard]], excess: list[int], ranks: Iterable[int]) -> None:
    """Move surplus to deficits among `ranks`, in order."""
    givers = [rank for rank in ranks if excess[rank] > 0]
    for taker in ranks:
        while excess[taker] < 0 and givers:
            giver = givers[0]
            tokens = min(excess[giver], -excess[taker])
            own[taker] += [shard._replace(rank=taker) for shard in _cut_off(own[giver], tokens)]
            excess[giver] -= tokens
            excess[taker] += tokens
            if not excess[giver]:
                givers.pop(0)


def _cut_off(shards: list[Shard], tokens: int) -> list[Shard]:
    """Take the last `tokens` tokens away from `shards`."""
    cut = []
    while tokens:
        last = shards.pop()
        here = min(tokens, last.tokens)
        cut.append(last._replace(start=last.stop - here))
        if here < last.tokens:
            shards.append(last._replace(stop=last.stop - here))
        tokens -= here
    return cut


def _sorted(shards: Iterable[Shard]) -> list[Shard]:
    found: list[Shard] = []
    for shard in sorted(shards):
        if found and (found[-1].sequence, found[-1].stop) == shard[:2]:
            found[-1] = found[-1]._replace(stop=shard.stop)
        else:
            found.append(shard)
    return found


def _overlaps(own: Sequence[Shard], others: Mapping[int, list[Shard]]) -> tuple[Message, ...]:
    """Own rows by the rank that has the same tokens in the other layout, each message by sequence and position."""
    first: dict[tuple[int, int], int] = {}
    row = 0
    for shard in own:
        first[shard[:2]] = row
        row += shard.tokens
    starts = {sequence: [shard.start for shard in shards] for sequence, shards in others.items()}
    rows: dict[int, list[Rows]] = defaultdict(list)
    for shard in sorted(own):
        sequence, start, stop, _ = shard
        there = others[sequence]
        for other in there[bisect_right(starts[sequence], start) - 1 :]:
            if other.start >= stop:
                break
            row = first[shard[:2]] - start
            rows[other.rank].append((row + max(start, other.start), row + min(stop, other.stop)))
    return tuple(Message(peer, tuple(joined(rows[peer]))) for peer in sorted(rows))
