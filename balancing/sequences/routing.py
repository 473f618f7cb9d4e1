"""A transfer between nodes goes over all NICs of the node instead of the sender's own.

A GPU sends through the NIC next to it. When one long sequence is passed round over nodes, one NIC of each node works
and the others idle (Zeppelin, arXiv 2509.21841, section 5: the routing layer). Here the sender dispatches parts of its
message to proxies on its node, each of which sends through its own NIC to a partner on the target's node, where parts
are combined. Parts are cut into slices that follow one another through the three steps. What arrives is the same, bit
for bit.

It pays where NICs would be unevenly loaded, and links inside a node are several times faster than a NIC; the number of
proxies comes from a cost model of all messages that are under way together.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from balancing.cluster import Cluster
from balancing.sequences.layout import SequencePlan, Shard
from balancing.sequences.steps import Stage
from balancing.sequences.tasks import by_sequence, reach

__all__ = ["Flow", "Route", "Routing", "Slice", "flows", "route"]

Flow = tuple[int, int]  # (source, target)

_HOP_SECONDS = 20e-6  # until a message starts to move; a transfer that takes no longer gains nothing by slices
_SLICES = (1, 2, 4, 8)
Routing = str | int  # "auto", "off", or a number of proxies


class Slice(NamedTuple):
    """Rows [start, stop) of the message of `flow`, along `path`: source, proxies, target, each rank once. The first hop
    belongs to step `turn` of the pipeline, the next to the step after it."""

    flow: Flow
    start: int
    stop: int
    path: tuple[int, ...]
    turn: int


@dataclass(frozen=True)
class Route:
    """How the messages of one stage go. Messages that are in no slice go directly.

    proxies: parts each message was cut into. seconds: what the model expects the stage to take.
    """

    slices: tuple[Slice, ...]
    proxies: int
    seconds: float

    @cached_property
    def flows(self) -> frozenset[Flow]:
        """The messages that take the route."""
        return frozenset(piece.flow for piece in self.slices)

    @cached_property
    def by_rank(self) -> dict[int, list[tuple[int, Slice]]]:
        """Numbered slices that a rank sends, hands on or receives, in order of the pipeline's steps."""
        found: dict[int, list[tuple[int, Slice]]] = defaultdict(list)
        for number, piece in enumerate(self.slices):
            for rank in piece.path:
                found[rank].append((number, piece))
        for rank, pieces in found.items():
            pieces.sort(key=lambda item: (item[1].turn + item[1].path.index(rank), item[0]))
        return dict(found)

    def proxied_by(self, rank: int) -> bool:
        """Whether `rank` hands on what others send."""
        return any(rank in piece.path[1:-1] for _, piece in self.by_rank.get(rank, ()))


def route(messages: Mapping[Flow, int], row_bytes: int, cluster: Cluster, routing: Routing = "auto") -> Route:
    """The way of messages (rows of each) that start together.

    row_bytes: of one row. routing: into how many parts each message between nodes is cut, one for the source itself
    and the others for proxies with other NICs; more than a node has NICs or ranks mean as many as it has. "auto" takes
    the number that the model expects to be fastest, "off" one. Messages inside a node go directly.

    Raises ValueError for a routing that is none of these.
    """
    check_routing(routing)
    rows = {flow: count for flow, count in messages.items() if count and not cluster.same_node(*flow)}
    most = min(cluster.ranks_per_node, cluster.nics_per_node)
    if routing == "auto":
        numbers: Sequence[int] = range(1, most + 1)
    else:
        numbers = [1 if routing == "off" else min(most, int(routing))]
    choices = [_planned(rows, row_bytes, cluster, number) for number in numbers]
    return min(choices, key=lambda choice: choice.seconds)


def check_routing(routing: Routing) -> None:
    """Raise ValueError unless it is "auto", "off" or a positive number."""
    number = isinstance(routing, int) and not isinstance(routing, bool)
    if not (routing >= 1 if number else routing in ("auto", "off")):  # type: ignore[operator]
        raise ValueError(f"routing {routing!r} is none of 'auto', 'off' and a number of proxies of at least 1")


def flows(plan: SequencePlan, cluster: Cluster) -> dict[Stage, dict[Flow, int]]:
    """Rows that go from node to node in every stage of attention, forward and backward, and its changes of layout."""
    node = [cluster.node(rank) for rank in range(plan.ranks)]
    found: dict[Stage, dict[Flow, int]] = defaultdict(lambda: defaultdict(int))
    for sequence, shards in by_sequence(plan.attention).items():
        ring = plan.ring(sequence)
        if len({node[rank] for rank in ring}) == 1:
            continue
        if plan.exchange[sequence] == "ring":
            _ring_flows(found, ring, shards, node)
        else:
            _gather_flows(found, shards, node)
    if plan.remapped:
        _remap_flows(found, plan, node)
    return {stage: dict(counts) for stage, counts in found.items()}


def _ring_flows(
    found: dict[Stage, dict[Flow, int]], ring: Sequence[int], shards: Sequence[Shard], node: Sequence[int]
) -> None:
    tokens: dict[int, int] = defaultdict(int)
    for shard in shards:
        tokens[shard.rank] += shard.tokens
    for place, source in enumerate(ring):
        target = ring[(place + 1) % len(ring)]
        if node[source] != node[target]:
            for turn in range(1, len(ring)):
                found[Stage("ring", True, turn)][source, target] += tokens[ring[place - turn + 1]]
                found[Stage("ring return", True, turn + 1)][source, target] += tokens[ring[place - turn]]


def _gather_flows(found: dict[Stage, dict[Flow, int]], shards: Sequence[Shard], node: Sequence[int]) -> None:
    start, stop, rank = (np.array([getattr(shard, name) for shard in shards]) for name in ("start", "stop", "rank"))
    for target, needed in reach(shards).items():
        sent = np.bincount(rank, np.clip(np.minimum(stop, needed) - start, 0, None)).astype(int)
        for source in np.flatnonzero(sent).tolist():
            if node[source] != node[target]:
                found[Stage("gather", True)][source, target] += int(sent[source])
                found[Stage("return", True)][target, source] += int(sent[source])


def _remap_flows(found: dict[Stage, dict[Flow, int]], plan: SequencePlan, node: Sequence[int]) -> None:
    for ours, theirs in zip(_by_position(plan.attention), _by_position(plan.linear), strict=True):
        here = there = 0
        while here < len(ours):
            one, other = ours[here], theirs[there]
            rows = min(one.stop, other.stop) - max(one.start, other.start)
            if node[one.rank] != node[other.rank]:
                found[Stage("to linear", True)][one.rank, other.rank] += rows
                found[Stage("to attention", True)][other.rank, one.rank] += rows
            here += one.stop <= other.stop
            there += other.stop <= one.stop


def _by_position(shards: Sequence[Shard]) -> list[list[Shard]]:
    return list(by_sequence(shards).values())


def _planned(rows: Mapping[Flow, int], row_bytes: int, cluster: Cluster, number: int) -> Route:
    """Each message in `number` parts, the largest messages first, each part over the NICs that are least busy."""
    outgoing: dict[int, float] = defaultdict(float)  # NIC -> bytes
    incoming: dict[int, float] = defaultdict(float)
    inside: dict[int, float] = defaultdict(float)  # rank -> bytes it sends to or receives from its own node
    parts: list[tuple[Flow, int, int, tuple[int, ...]]] = []
    for (source, target), count in sorted(rows.items(), key=lambda item: (-item[1], item[0])):
        senders = _least_busy(source, number, outgoing, cluster)
        receivers = _least_busy(target, number, incoming, cluster)
        for part, (sender, receiver) in enumerate(zip(senders, receivers, strict=True)):
            start, stop = count * part // number, count * (part + 1) // number
            if start == stop:
                continue
            size = (stop - start) * row_bytes
            outgoing[cluster.nic(sender)] += size
            incoming[cluster.nic(receiver)] += size
            path = tuple(dict.fromkeys((source, sender, receiver, target)))
            for one, other in ((source, sender), (receiver, target)):
                if one != other:
                    inside[one] += size
                    inside[other] += size
            parts.append(((source, target), start, stop, path))
    network = max((*outgoing.values(), *incoming.values()), default=0.0) / cluster.nic_bandwidth
    dispatch = max(inside.values(), default=0.0) / cluster.intra_node_bandwidth
    if number == 1:
        return Route((), 1, network + _HOP_SECONDS if rows else 0.0)

    def seconds(slices: int) -> float:
        longest = max(network, dispatch)
        return longest + (network + 2 * dispatch - longest) / slices + (slices + 2) * _HOP_SECONDS

    slices = min(_SLICES, key=seconds)
    return Route(tuple(_sliced(parts, slices)), number, seconds(slices))


def _least_busy(rank: int, number: int, load: Mapping[int, float], cluster: Cluster) -> list[int]:
    """`rank` and other ranks of its node, each with another NIC."""
    first = cluster.node(rank) * cluster.ranks_per_node
    others = range(first, first + cluster.ranks_per_node)
    by_nic = {cluster.nic(rank): rank}
    for other in sorted(others, key=lambda other: (other - rank) % cluster.ranks_per_node):
        by_nic.setdefault(cluster.nic(other), other)
    nearest = list(by_nic)
    chosen = sorted(nearest[1:], key=lambda nic: (load.get(nic, 0.0), nearest.index(nic)))[: number - 1]
    return [rank, *(by_nic[nic] for nic in chosen)]


def _sliced(parts: Sequence[tuple[Flow, int, int, tuple[int, ...]]], slices: int) -> list[Slice]:
    found = []
    for turn in range(slices):
        for flow, start, stop, path in parts:
            rows = stop - start
            begin, end = start + rows * turn // slices, start + rows * (turn + 1) // slices
            if begin < end:
                found.append(Slice(flow, begin, end, path, turn))
    return found
