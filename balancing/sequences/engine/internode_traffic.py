"""Rows sent between nodes in each transfer group of attention, for routing.

Every rank computes this for all ranks, since the load of a NIC depends on the messages of all ranks.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from balancing.cluster import Cluster
from balancing.sequences.engine.gather import gathering
from balancing.sequences.engine.program import TransferGroup
from balancing.sequences.rounds import SMALLEST_TURNS, TurnTokens
from balancing.sequences.sequence_plan import SequencePlan, Shard, by_sequence, columns
from balancing.sequences.traffic import TokenTraffic, remap_traffic

__all__ = ["internode_traffic"]

_Found = dict[TransferGroup, list[TokenTraffic]]


def internode_traffic(
    plan: SequencePlan, cluster: Cluster, turn_tokens: TurnTokens = SMALLEST_TURNS
) -> dict[TransferGroup, TokenTraffic]:
    """Rows between nodes in each transfer group of attention, forward and backward, changes of layout included.

    turn_tokens: least tokens of a turn of gathering.
    """
    node = np.arange(plan.ranks) // cluster.ranks_per_node
    found: _Found = defaultdict(list)
    for sequence, shards in by_sequence(plan.attention).items():
        if plan.exchange[sequence] == "ring":
            _ring_flows(found, plan.ring(sequence), shards, node)
    _gather_flows(found, plan, node, turn_tokens)
    if plan.remapped:
        to_attention = remap_traffic(plan)
        found[TransferGroup("to attention", True)].append(to_attention)
        found[TransferGroup("to linear", True)].append(
            TokenTraffic(to_attention.target, to_attention.source, to_attention.tokens)
        )
    return {
        transfer_group: moved
        for transfer_group, parts in found.items()
        if len((moved := _between_nodes(TokenTraffic(*map(np.concatenate, zip(*parts, strict=True))), cluster)).tokens)
    }


def _between_nodes(moved: TokenTraffic, cluster: Cluster) -> TokenTraffic:
    crosses = moved.crossing(cluster) & (moved.tokens > 0)
    return TokenTraffic(moved.source[crosses], moved.target[crosses], moved.tokens[crosses])


def _ring_flows(found: _Found, ring: Sequence[int], shards: Sequence[Shard], node: np.ndarray) -> None:
    """Add the traffic of a ring: in round t a rank passes on the block of the rank t - 1 places before it, and gradient
    sums follow a round later."""
    source = np.array(ring)
    target = np.roll(source, -1)
    edge = np.flatnonzero(node[source] != node[target])
    if not edge.size:
        return
    _, start, stop, rank = columns(shards).T
    tokens = np.bincount(rank, stop - start, int(source.max()) + 1).astype(np.int64)[source]
    for turn in range(1, len(ring)):
        handed, summed = (tokens[(edge - back) % len(ring)] for back in (turn - 1, turn))
        found[TransferGroup("ring", True, turn)].append(TokenTraffic(source[edge], target[edge], handed))
        found[TransferGroup("ring return", True, turn + 1)].append(TokenTraffic(source[edge], target[edge], summed))


def _gather_flows(found: _Found, plan: SequencePlan, node: np.ndarray, turn_tokens: TurnTokens) -> None:
    moved: dict[TransferGroup, list[tuple[int, int, int]]] = defaultdict(list)
    for one in gathering(plan, node.tolist(), turn_tokens).transfers:
        if node[one.source] != node[one.target]:
            tokens = one.stop - one.begin
            moved[TransferGroup("gather", True, one.round)].append((one.source, one.target, tokens))
            moved[TransferGroup("return", True, one.back)].append((one.target, one.source, tokens))
    for transfer_group, rows in moved.items():
        found[transfer_group].append(TokenTraffic(*np.array(rows, dtype=np.int64).T))
