"""Number of rounds of a plan, and their launches, messages and operations of the host on a rank.

A round is a transfer that brings a rank keys and values: a round of a ring, over nodes or inside one, or a turn of
gathering. The engine computes each round in one call of attention and merges the result in one operation. The rank's
own tokens are one call before the rounds; with rings there is one more call between the rounds. These numbers follow
from a plan without compiling it.

With more turns a rank starts earlier on the first gathered keys, but each turn costs a call of attention, a merge and a
transfer group. The least turn has as many bytes as its link carries in eight latencies of a message, and in the time
that a turn costs forward: its queries meet keys once more, its kernels are launched, and the host starts its
operations. The host runs ahead of the device. Its part counts as far as the host is late: not at all where it starts
attention with the most turns in half a layer's time on the device, in full where it takes that long. If all keys take S
such times, a rank with T turns waits S / T for the first and pays T for them all. So it has sqrt(S) turns, at most
eight: an eighth of the keys keeps it busy long enough. Keys that are fewer than those of the least turn are waited for:
one call computes them with a rank's own.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from balancing.cluster import Cluster
from balancing.sequences.sequence_plan import SequencePlan, reaches
from balancing.sequences.traffic import LinkTokens

__all__ = [
    "MOST_TURNS",
    "Asked",
    "TurnTokens",
    "host_seconds",
    "number_of_turns",
    "plan_rounds",
    "turn_tokens",
    "what_is_asked",
]

# Operations of the engine on the device besides calls and merges, (forward, backward), as counted by
# `python -m benchmarks.host`: of a pass (keys into the workspace, sums set to zero, conversions), of a round of a ring
# and of a turn of gathering (rows copied together, gradients added).
_PASS, _RING, _TURN = (3, 5), (1, 4), (2, 8)
_MESSAGES = (1, 2)  # keys forward; keys and their gradients backward
MOST_TURNS = 8
_LATENCIES = 8  # a turn takes at least so many, so that latency is at most an eighth of it
_AHEAD = 0.5  # of a layer's time on the device; a host that needs no more never keeps it waiting


class TurnTokens(NamedTuple):
    """Least tokens of a turn of gathering, inside a node and between nodes; indexed by whether it is between nodes."""

    intra: int
    inter: int


def turn_tokens(cluster: Cluster, kv_bytes: float, *, rows: float = 0.0, device: float = 0.0) -> TurnTokens:
    """The least tokens of a turn on a cluster.

    kv_bytes: bytes of one token's keys and values in one layer.
    rows: seconds of the device, forward, for queries that meet keys once more; 0 where each is computed once.
    device: seconds of a layer on the device, forward and backward; 0 if it waits for the host.
    """
    calls = _TURN[0] + 2  # with its call and its merge
    host = host_seconds(cluster, calls, _MESSAGES[0]) * _host_share(cluster, device)
    seconds = max(_LATENCIES * cluster.message_seconds, rows + calls * cluster.launch_seconds + host)
    rates = cluster.intra_node_bandwidth, cluster.nic_bandwidth * max(1, len(cluster.nics(0)))
    # The clips are for a link that the cluster does not have: its bandwidth is infinite.
    return TurnTokens(*(max(1, int(min(rate * seconds / kv_bytes, 2**40))) if seconds else 1 for rate in rates))


def host_seconds(cluster: Cluster, launches: int, messages: int) -> float:
    """Seconds of the host to start operations of attention."""
    if cluster.rates is None:
        return (launches + messages) * cluster.host_seconds
    return launches * cluster.rates.operation_seconds + messages * cluster.rates.post_seconds


def _host_share(cluster: Cluster, device: float) -> float:
    """The part of a turn's operations that the device waits for, 0 to 1. device: as in `turn_tokens`."""
    turns = MOST_TURNS * (1 + (cluster.nodes > 1))
    most = host_seconds(cluster, sum(_launches(0, turns)) + turns, sum(_MESSAGES) * turns)  # with merges
    return min(1.0, max(0.0, (most / device - _AHEAD) / (1 - _AHEAD))) if device else 1.0


def _launches(rings: Any, turns: Any) -> list[Any]:
    """Operations on the device without merges, forward and backward, with these rounds of rings and turns."""
    calls = 1 + rings + turns + (rings > 0)
    return [
        calls + per_pass + per_ring * rings + per_turn * turns
        for per_pass, per_ring, per_turn in zip(_PASS, _RING, _TURN, strict=True)
    ]


def number_of_turns(tokens: Any, least: Any) -> np.ndarray:
    """int64: turns for `tokens` tokens, where the least turn has `least` tokens; from 1 to `MOST_TURNS`."""
    turns = np.rint(np.sqrt(np.asarray(tokens) / np.asarray(least)))
    return np.clip(turns, 1, MOST_TURNS).astype(np.int64)


@dataclass(frozen=True)
class Asked:
    """Operations of attention in one layer, on the rank that has most of them.

    rounds: transfers that bring the rank keys.
    launches: (forward, backward), kernels on the device, copies and sums included.
    messages: (forward, backward), messages that the rank sends and receives, and collectives.
    """

    rounds: int
    launches: tuple[int, int]
    messages: tuple[int, int]


def plan_rounds(
    plan: SequencePlan, cluster: Cluster, turn_tokens: TurnTokens, copies: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Rounds of rings, int64 [rank], and turns of gathering, int64 [rank]; those inside nodes and between nodes added.
    A turn that is waited for counts as any other: it saves a call, and costs the wait.

    plan: the plan of the batch.
    cluster: the cluster of at least the plan's ranks.
    turn_tokens: least tokens of a turn.
    copies: whether keys of other nodes are copied inside a node, one round after their arrival.
    """
    if not plan.sees_all:
        return np.zeros(plan.ranks, dtype=np.int64), _reaching(plan, cluster, copies)
    sequence, start, _, rank = plan.table[np.lexsort((plan.table[:, 1], plan.table[:, 0]))].T
    node = rank // cluster.ranks_per_node
    begins = np.flatnonzero(np.diff(sequence, prepend=-1))
    # The first token of a sequence on another node than its first shard's.
    first_node = np.empty(len(plan.lengths), dtype=np.int64)
    first_node[sequence[begins]] = node[begins]
    elsewhere = np.full(len(plan.lengths), np.iinfo(np.int64).max)
    away = node != first_node[sequence]
    np.minimum.at(elsewhere, sequence[away], start[away])
    member, which = np.unique(sequence * plan.ranks + rank, return_inverse=True)
    whole, holder = np.divmod(member, plan.ranks)
    last = np.zeros(len(member), dtype=np.int64)  # start of the member's last shard
    np.maximum.at(last, which, start)
    members = np.bincount(whole, minlength=len(plan.lengths))
    how = np.array(plan.exchange)[whole]
    rings, turns = np.zeros((2, 2, plan.ranks), dtype=np.int64)
    over_nodes = elsewhere[whole] < np.iinfo(np.int64).max
    needs_far = (last > 0) & ((holder // cluster.ranks_per_node != first_node[whole]) | (elsewhere[whole] < last))
    per_node = cluster.ranks_per_node
    for level in (False, True):
        counted = (how == "ring") & (over_nodes == level)
        np.maximum.at(rings[int(level)], holder[counted], members[whole[counted]] - 1)
        counted = (how == "gather") & (last > 0) & (needs_far == level) & (members[whole] > 1)
        needs = np.bincount(holder[counted], minlength=plan.ranks) > 0
        if level:
            prefix = np.zeros((cluster.nodes, len(plan.lengths)), dtype=np.int64)
            np.maximum.at(prefix, (holder[counted] // per_node, whole[counted]), last[counted])
            # Keys of other nodes have the same turns on all ranks.
            tokens = prefix.sum(1).max(initial=0, keepdims=True) // per_node
            if copies:  # a rank may receive for others
                needs = np.repeat(prefix.any(1), per_node)[: plan.ranks]
        else:
            tokens = np.bincount(holder[counted], last[counted], plan.ranks).astype(np.int64)
        turns[int(level)] = np.where(needs, number_of_turns(tokens, turn_tokens[level]) + (level and copies), 0)
    return rings.sum(0), turns.sum(0)


def _reaching(plan: SequencePlan, cluster: Cluster, copies: bool) -> np.ndarray:
    """int64 [rank], turns that bring the rank the keys that it reaches: one from its node, one from other nodes."""
    found = reaches(plan)
    far = {
        reach[:4:3] for reach in found if any(not cluster.same_node(shard.rank, reach.rank) for shard in reach.holders)
    }
    levels = {(reach.rank, reach[:4:3] in far) for reach in found}  # of sequence and rank
    rounds = np.zeros(plan.ranks, dtype=np.int64)
    for rank, inter in levels:
        rounds[rank] += 1 + (inter and copies)
    return rounds


def what_is_asked(plan: SequencePlan, cluster: Cluster, moved: LinkTokens, turn_tokens: TurnTokens) -> Asked:
    """Rounds, launches and messages of the rank with most operations, in one layer.

    plan, cluster, turn_tokens: as in `plan_rounds`.
    moved: tokens on links in forward.
    """
    rings, turns = plan_rounds(plan, cluster, turn_tokens, bool(moved.copies.any()))
    rounds = rings + turns
    # A rank sends and receives one message in every round of a ring. A turn of gathering is one collective.
    messages = 2 * rings + turns
    launches = _launches(rings, turns)
    if plan.sees_all:
        launches[0] += rounds  # merges
    total = launches[0] + launches[1] + sum(_MESSAGES) * messages
    most = int(total.argmax())
    return Asked(
        int(rounds[most]),
        (int(launches[0][most]), int(launches[1][most])),
        (int(messages[most]) * _MESSAGES[0], int(messages[most]) * _MESSAGES[1]),
    )
