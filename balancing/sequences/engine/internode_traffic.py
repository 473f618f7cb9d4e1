"""What goes from node to node in each stage of attention: what may be spread over network cards.

Every rank works this out for all ranks, since how busy a NIC gets follows from everybody's messages.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from balancing.cluster import Cluster
from balancing.sequences.engine.gather import needs
from balancing.sequences.engine.program import Stage
from balancing.sequences.sequence_plan import SequencePlan, Shard, by_sequence, columns
from balancing.sequences.traffic import Traffic, remap_traffic

__all__ = ["flows"]

_Found = dict[Stage, list[Traffic]]


def flows(plan: SequencePlan, cluster: Cluster) -> dict[Stage, Traffic]:
    """Rows that go from node to node in every stage of attention, forward and backward, and its changes of layout."""
    node = np.arange(plan.ranks) // cluster.ranks_per_node
    found: _Found = defaultdict(list)
    for sequence, shards in by_sequence(plan.attention).items():
        if plan.exchange[sequence] == "ring":
            _ring_flows(found, plan.ring(sequence), shards, node)
    _gather_flows(found, plan, node)
    if plan.remapped:
        there = remap_traffic(plan)
        found[Stage("to attention", True)].append(there)
        found[Stage("to linear", True)].append(Traffic(there.target, there.source, there.tokens))
    return {
        stage: moved
        for stage, parts in found.items()
        if len((moved := _between_nodes(Traffic(*map(np.concatenate, zip(*parts, strict=True))), cluster)).tokens)
    }


def _between_nodes(moved: Traffic, cluster: Cluster) -> Traffic:
    crosses = moved.crossing(cluster) & (moved.tokens > 0)
    return Traffic(moved.source[crosses], moved.target[crosses], moved.tokens[crosses])


def _ring_flows(found: _Found, ring: Sequence[int], shards: Sequence[Shard], node: np.ndarray) -> None:
    """In round t the block of the rank t - 1 places before goes on; sums of the block after it follow a round later."""
    source = np.array(ring)
    target = np.roll(source, -1)
    edge = np.flatnonzero(node[source] != node[target])
    if not edge.size:
        return
    _, start, stop, rank = columns(shards).T
    tokens = np.bincount(rank, stop - start, int(source.max()) + 1).astype(np.int64)[source]
    for turn in range(1, len(ring)):
        handed, summed = (tokens[(edge - back) % len(ring)] for back in (turn - 1, turn))
        found[Stage("ring", True, turn)].append(Traffic(source[edge], target[edge], handed))
        found[Stage("ring return", True, turn + 1)].append(Traffic(source[edge], target[edge], summed))


def _gather_flows(found: _Found, plan: SequencePlan, node: np.ndarray) -> None:
    wanted: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for need in needs(plan, node.tolist()):
        if need.inter:
            wanted[need.sequence].append((need.begin, need.stop, need.rank, need.turn))
    for sequence, shards in by_sequence(shard for shard in plan.attention if shard.sequence in wanted).items():
        begin, end, target, turn = np.array(wanted[sequence]).T
        _, start, stop, source = columns(shards).T  # which follow one another
        first = np.searchsorted(stop, begin, side="right")
        count = np.searchsorted(start, end, side="left") - first
        which = np.repeat(np.arange(len(count)), count)
        shard = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count) + first[which]
        rows = np.minimum(stop[shard], end[which]) - np.maximum(start[shard], begin[which])
        for one in np.unique(turn).tolist():
            now = turn[which] == one
            moved = Traffic(source[shard[now]], target[which[now]], rows[now])
            found[Stage("gather", True, one)].append(moved)
            found[Stage("return", True, one)].append(Traffic(moved.target, moved.source, moved.tokens))
