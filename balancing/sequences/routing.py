"""A transfer between nodes goes over all NICs of the node instead of the sender's own.

A GPU sends through the NIC next to it. When one long sequence is passed round over nodes, one NIC of each node works
and the others idle (Zeppelin, arXiv 2509.21841, section 5: the routing layer). Here the sender dispatches parts of its
message to proxies on its node, each of which sends through its own NIC to a partner on the target's node, where parts
are combined. Parts are cut into slices that follow one another through the three steps. What arrives is the same, bit
for bit.

It pays where NICs would be unevenly loaded, and links inside a node are several times faster than a NIC; the number of
proxies comes from a cost model of all messages that are under way together.
"""

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from balancing.cluster import Cluster
from balancing.sequences.gather import by_sequence, needs
from balancing.sequences.layout import SequencePlan, Shard
from balancing.sequences.steps import Stage

__all__ = ["Flow", "Part", "Route", "Routing", "Slice", "check_routing", "flows", "route"]

Flow = tuple[int, int]  # (source, target)

_HOP_SECONDS = 20e-6  # until a message starts to move; a transfer that takes no longer gains nothing by slices
_SLICES = (1, 2, 4, 8)
_MOST_MESSAGES = 8  # of a NIC; more of them are spread well enough, and cost more to plan than is to gain
Routing = str | int  # "auto", "off", or a number of proxies
_Nearest = list[tuple[int, int]]  # NICs of a node, each with a rank that is next to it


class Part(NamedTuple):
    """Rows [start, stop) of the message of `flow`, along `path`: source, proxies, target, each rank once."""

    flow: Flow
    start: int
    stop: int
    path: tuple[int, ...]


class Slice(NamedTuple):
    """A slice of a part. The first hop of its path belongs to step `turn` of the pipeline, the next to the step after
    it. number: differs between all slices of a stage."""

    number: int
    flow: Flow
    start: int
    stop: int
    path: tuple[int, ...]
    turn: int


@dataclass(frozen=True)
class Route:
    """How the messages of one stage go. Messages that are in no part go directly.

    slices: of each part, one behind the other. proxies: parts each message was cut into. seconds: what the model
    expects the stage to take.
    """

    parts: tuple[Part, ...]
    slices: int
    proxies: int
    seconds: float

    @cached_property
    def flows(self) -> frozenset[Flow]:
        """The messages that take the route."""
        return frozenset(part.flow for part in self.parts)

    def of(self, rank: int) -> list[Slice]:
        """Slices that a rank sends, hands on or receives, in order of the pipeline's steps."""
        found = []
        for number, (flow, start, stop, path) in enumerate(self.parts):
            if rank in path:
                for turn in range(self.slices):
                    begin, end = (start + (stop - start) * cut // self.slices for cut in (turn, turn + 1))
                    if begin < end:
                        found.append(Slice(number * self.slices + turn, flow, begin, end, path, turn))
        return sorted(found, key=lambda piece: (piece.turn + piece.path.index(rank), piece.number))


def route(messages: Mapping[Flow, int], row_bytes: int, cluster: Cluster, routing: Routing = "auto") -> Route:
    """The way of messages (rows of each) that start together.

    row_bytes: of one row. routing: into how many parts each message between nodes is cut, one for the source itself
    and the others for proxies with other NICs; more than a node has NICs or ranks mean as many as it has. "auto" takes
    the number that the model expects to be fastest, "off" one. Messages inside a node go directly.

    Raises ValueError for a routing that is none of these.
    """
    check_routing(routing)
    rows = {flow: count for flow, count in messages.items() if count and not cluster.same_node(*flow)}
    largest_first = sorted(rows.items(), key=lambda item: (-item[1], item[0]))
    most = min(cluster.ranks_per_node, cluster.nics_per_node)
    if routing != "auto":
        return _planned(largest_first, row_bytes, cluster, 1 if routing == "off" else min(most, int(routing)))
    best = _planned(largest_first, row_bytes, cluster, 1)
    numbers = [number for number in (2, 4, 8, 16) if number < most] + [most] * (most > 1)
    even = best.seconds <= _least_seconds(rows, row_bytes, cluster) + 3 * _HOP_SECONDS
    if even or len(rows) > _MOST_MESSAGES * cluster.nodes * cluster.nics_per_node:
        return best
    return min((best, *(_planned(largest_first, row_bytes, cluster, n) for n in numbers)), key=lambda one: one.seconds)


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
    _gather_flows(found, plan, node)
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


def _gather_flows(found: dict[Stage, dict[Flow, int]], plan: SequencePlan, node: Sequence[int]) -> None:
    needed = [need for need in needs(plan, node) if need.inter]
    sequences = {need.sequence for need in needed}
    columns: dict[int, tuple[np.ndarray, ...]] = {}
    for sequence, shards in by_sequence(shard for shard in plan.attention if shard.sequence in sequences).items():
        columns[sequence] = tuple(np.array([s[field] for s in shards]) for field in (1, 2, 3))
    for need in needed:
        start, stop, rank = columns[need.sequence]
        rows = np.clip(np.minimum(stop, need.stop) - np.maximum(start, need.begin), 0, None)
        sent = np.bincount(rank, rows).astype(int)
        for source in np.flatnonzero(sent).tolist():
            if node[source] != node[need.rank]:
                found[Stage("gather", True, need.turn)][source, need.rank] += int(sent[source])
                found[Stage("return", True, need.turn)][need.rank, source] += int(sent[source])


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


def _least_seconds(rows: Mapping[Flow, int], row_bytes: int, cluster: Cluster) -> float:
    """With all NICs of the busiest node equally busy."""
    busy: dict[tuple[int, bool], int] = defaultdict(int)
    for (source, target), count in rows.items():
        busy[cluster.node(source), True] += count
        busy[cluster.node(target), False] += count
    return max(busy.values(), default=0) * row_bytes / (cluster.nics_per_node * cluster.nic_bandwidth)


def _planned(rows: Sequence[tuple[Flow, int]], row_bytes: int, cluster: Cluster, number: int) -> Route:
    """Each message in `number` parts, each part over the NICs that are least busy."""
    near = _nearest(cluster)
    outgoing, incoming = ([0] * cluster.nodes * cluster.nics_per_node for _ in range(2))  # NIC -> rows
    inside = [0] * cluster.world_size  # rank -> rows it sends to or receives from its own node
    parts: list[Part] = []
    for flow, count in rows:
        source, target = flow
        senders = _least_busy(near[source], number, outgoing)
        receivers = _least_busy(near[target], number, incoming)
        start = 0
        for index in range(number):
            (out, sender), (into, receiver) = senders[index], receivers[index]
            stop = count * (index + 1) // number
            if start == stop:
                continue
            outgoing[out] += stop - start
            incoming[into] += stop - start
            path = [source]
            if sender != source:
                inside[source] += stop - start
                inside[sender] += stop - start
                path.append(sender)
            if receiver != target:
                inside[target] += stop - start
                inside[receiver] += stop - start
                path.append(receiver)
            if number > 1:
                parts.append(Part(flow, start, stop, (*path, target)))
            start = stop
    network = max(max(outgoing), max(incoming)) * row_bytes / cluster.nic_bandwidth
    dispatch = max(inside) * row_bytes / cluster.intra_node_bandwidth
    longest = max(network, dispatch)

    def seconds(slices: int) -> float:
        if number == 1:
            return network + _HOP_SECONDS
        return longest + (network + 2 * dispatch - longest) / slices + (slices + 2) * _HOP_SECONDS

    slices = min(_SLICES, key=seconds)
    return Route(tuple(parts), slices, number, seconds(slices))


def _least_busy(near: _Nearest, number: int, load: Sequence[int]) -> _Nearest:
    """The first of them, and those others whose NICs are least busy."""
    if number == 1:
        return near[:1]
    return [near[0], *sorted(near[1:], key=lambda place: load[place[0]])[: number - 1]]


@functools.lru_cache(maxsize=8)
def _nearest(cluster: Cluster) -> list[_Nearest]:
    """For each rank the NICs of its node and a rank that is next to each, its own first."""
    size, nic, found = cluster.ranks_per_node, [cluster.nic(rank) for rank in range(cluster.world_size)], []
    for rank in range(cluster.world_size):
        by_nic: dict[int, int] = {}
        first = rank - rank % size
        for step in range(size):
            other = first + (rank - first + step) % size
            by_nic.setdefault(nic[other], other)
        found.append(list(by_nic.items()))
    return found
