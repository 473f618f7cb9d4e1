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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from balancing.cluster import Cluster
from balancing.cluster.links import first_nics
from balancing.sequences.engine.internode_traffic import flows
from balancing.sequences.engine.program import Stage
from balancing.sequences.sequence_plan import SequencePlan
from balancing.sequences.traffic import Traffic

__all__ = ["Flow", "Part", "Route", "Routing", "Slice", "check_routing", "route", "routes"]

Flow = tuple[int, int]  # (source, target)

_HOP_SECONDS = 20e-6  # until a message starts to move; a transfer that takes no longer gains nothing by slices
_SLICES = (1, 2, 4, 8)
_MOST_MESSAGES = 8  # of a NIC; more of them are spread well enough
Routing = str | int  # "auto", "off", or a number of proxies


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
    """How messages between nodes go: each in `proxies` parts, and each part in `slices`, one behind the other.

    seconds: what the model expects the messages to take that it was made for.
    """

    cluster: Cluster
    proxies: int
    slices: int
    seconds: float

    def parts(self, flow: Flow, rows: int) -> Iterator[Part]:
        """The parts of one message between nodes, through the NICs of both nodes in pairs."""
        relays, (source, target), number = _relays(self.cluster), flow, self.proxies
        for index, column in enumerate(_columns(self.cluster, number)):
            start, stop = rows * index // number, rows * (index + 1) // number
            if start < stop:
                path = (source, int(relays[source, column]), int(relays[target, column]), target)
                yield Part(flow, start, stop, tuple(dict.fromkeys(path)))

    def of(self, rank: int, moved: Traffic, numbered: np.ndarray | None = None) -> list[Slice]:
        """Slices that a rank sends, hands on or receives, in order of the pipeline's steps; none without proxies.

        numbered: int64 [pair], source x ranks + target, ascending: pairs of ranks that `moved` is part of, all of
        `moved` by default; ranks that give the same number their slices alike.
        """
        if self.proxies == 1:
            return []
        ranks, per_node = self.cluster.world_size, self.cluster.ranks_per_node
        here = (moved.source // per_node == rank // per_node) | (moved.target // per_node == rank // per_node)
        pairs, which = np.unique(_pairs(moved, self.cluster)[here], return_inverse=True)
        rows = np.bincount(which, moved.tokens[here]).astype(np.int64)
        if numbered is None:
            numbered = np.unique(_pairs(moved, self.cluster))
        found = []
        for pair, number, count in zip(pairs.tolist(), np.searchsorted(numbered, pairs).tolist(), rows, strict=True):
            for index, (flow, start, stop, path) in enumerate(self.parts(divmod(pair, ranks), int(count))):
                if rank in path:
                    first = (number * self.proxies + index) * self.slices
                    for turn in range(self.slices):
                        begin, end = (start + (stop - start) * cut // self.slices for cut in (turn, turn + 1))
                        if begin < end:
                            found.append(Slice(first + turn, flow, begin, end, path, turn))
        return sorted(found, key=lambda piece: (piece.turn + piece.path.index(rank), piece.number))


def routes(
    plan: SequencePlan, rank: int, cluster: Cluster, row_bytes: Callable[[Stage], int], routing: Routing = "auto"
) -> dict[Stage, list[Slice]]:
    """The slices that `rank` has a part in, in every stage where some of its node's messages do not go directly.

    row_bytes: of one row in a stage. Rounds of one kind are alike, so the one that moves most decides for all of them.
    """
    kinds: dict[str, dict[Stage, Traffic]] = defaultdict(dict)
    for stage, moved in flows(plan, cluster).items():
        kinds[stage.kind][stage] = moved
    found = {}
    for stages in kinds.values():
        busiest = max(stages, key=lambda stage: int(stages[stage].tokens.sum()))
        chosen = route(stages[busiest], row_bytes(busiest), cluster, routing)
        if chosen.proxies == 1:
            continue
        numbered = np.unique(np.concatenate([_pairs(moved, cluster) for moved in stages.values()]))
        for stage, moved in stages.items():
            if slices := chosen.of(rank, moved, numbered):
                found[stage] = slices
    return found


def route(moved: Traffic, row_bytes: int, cluster: Cluster, routing: Routing = "auto") -> Route:
    """The way of messages between nodes that start together.

    moved: rows of each message; a pair of ranks may come several times, and has one message. row_bytes: of one row.
    routing: into how many parts each message is cut, one for the source itself and the others for proxies with other
    NICs; more than a node has NICs or ranks mean as many as it has. "auto" takes the number that the model expects to
    be fastest, "off" one.

    Raises ValueError for a routing that is none of these.
    """
    check_routing(routing)
    most = min(cluster.ranks_per_node, cluster.nics_per_node)
    if routing != "auto":
        return _modelled(moved, row_bytes, cluster, 1 if routing == "off" else min(most, int(routing)))
    best = _modelled(moved, row_bytes, cluster, 1)
    even = best.seconds <= _least_seconds(moved, row_bytes, cluster) + 3 * _HOP_SECONDS
    messages = len(np.unique(_pairs(moved, cluster)))
    if even or messages > _MOST_MESSAGES * cluster.nodes * cluster.nics_per_node:
        return best
    others = (_modelled(moved, row_bytes, cluster, number) for number in range(2, most + 1))
    return min((best, *others), key=lambda one: one.seconds)


def check_routing(routing: Routing) -> None:
    """Raise ValueError unless it is "auto", "off" or a positive number."""
    number = isinstance(routing, int) and not isinstance(routing, bool)
    if not (routing >= 1 if number else routing in ("auto", "off")):  # type: ignore[operator]
        raise ValueError(f"routing {routing!r} is none of 'auto', 'off' and a number of proxies of at least 1")


def _pairs(moved: Traffic, cluster: Cluster) -> np.ndarray:
    """int64 [transfer]: a number for its pair of ranks, source x ranks + target."""
    return np.asarray(moved.source * cluster.world_size + moved.target)


def _least_seconds(moved: Traffic, row_bytes: int, cluster: Cluster) -> float:
    """With all NICs of the busiest node equally busy."""
    busy = [np.bincount(end // cluster.ranks_per_node, moved.tokens).max(initial=0) for end in moved[:2]]
    return float(max(busy) * row_bytes / (cluster.nics_per_node * cluster.nic_bandwidth))


def _modelled(moved: Traffic, row_bytes: int, cluster: Cluster, number: int) -> Route:
    """Each message in `number` parts, with the number of slices that the model expects to be fastest."""
    cut = moved.tokens[:, None] * np.arange(number + 1) // number
    rows = np.diff(cut)  # [message, part]
    relays, nics, columns = _relays(cluster), first_nics(cluster), _columns(cluster, number)
    network = dispatch = 0.0
    inside = np.zeros(cluster.world_size)  # rows a rank sends to or receives from its own node
    for end in moved[:2]:
        relay = relays[end][:, columns]
        network = max(network, np.bincount(nics[relay].ravel(), rows.ravel()).max(initial=0))
        handed = np.where(relay == end[:, None], 0, rows)
        inside += np.bincount(end, handed.sum(1), len(inside)) + np.bincount(relay.ravel(), handed.ravel(), len(inside))
    network *= row_bytes / cluster.nic_bandwidth
    dispatch = float(inside.max()) * row_bytes / cluster.intra_node_bandwidth
    longest = max(network, dispatch)

    def seconds(slices: int) -> float:
        if number == 1:
            return network + _HOP_SECONDS
        return longest + (network + 2 * dispatch - longest) / slices + (slices + 2) * _HOP_SECONDS

    slices = min(_SLICES, key=seconds)
    return Route(cluster, number, slices, seconds(slices))


def _columns(cluster: Cluster, number: int) -> list[int]:
    """Which NICs take the parts of a message, counted from the sender's own; the same of every message."""
    most = min(cluster.ranks_per_node, cluster.nics_per_node)
    return [index * most // number for index in range(number)]


@functools.lru_cache(maxsize=8)
def _relays(cluster: Cluster) -> np.ndarray:
    """int64 [rank, NIC of its node]: a rank that is next to the NIC. The rank's own NIC comes first."""
    size, nic = cluster.ranks_per_node, first_nics(cluster).tolist()
    found = []
    for rank in range(cluster.world_size):
        first = rank - rank % size
        by_nic: dict[int, int] = {}
        for step in range(size):
            other = first + (rank - first + step) % size
            by_nic.setdefault(nic[other], other)
        found.append(list(by_nic.values()))
    return np.array(found)
