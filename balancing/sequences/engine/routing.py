"""Routing: messages between nodes are spread over all NICs of a node instead of using only the sender's NIC.

A GPU sends through the NIC next to it. When one long sequence is exchanged between nodes, one NIC of each node works
and the others idle (Zeppelin, arXiv 2509.21841, section 5: the routing layer). With routing the sender sends parts of
its message to proxies on its node. Each proxy sends its part through its own NIC to a partner on the target's node, and
the target combines the parts. Parts are cut into slices that are pipelined through the three hops. The received data
are the same bit for bit.

Routing pays where NICs would be unevenly loaded and links inside a node are several times faster than a NIC. The number
of proxies is chosen by a cost model of all messages that are under way together.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from balancing.cluster import Cluster
from balancing.cluster.links import first_nics
from balancing.kernels.pairs import pair_flops
from balancing.sequences.engine.gather import gathering
from balancing.sequences.engine.program import TransferGroup
from balancing.sequences.rounds import TurnTokens
from balancing.sequences.sequence_plan import AttentionShape, SequencePlan, Shard, by_sequence, columns
from balancing.sequences.traffic import TokenTraffic, remap_traffic

__all__ = [
    "Flow",
    "Part",
    "Route",
    "Routing",
    "Slice",
    "TokenBytes",
    "check_routing",
    "internode_traffic",
    "route",
    "routes",
]

Flow = tuple[int, int]  # (source, target)

_HOP_SECONDS = 20e-6  # latency of one hop; slices do not help a transfer that is no longer than that
_SLICES = (1, 2, 4, 8)
_MOST_MESSAGES = 8  # for each NIC; more messages are spread well enough without routing
Routing = str | int  # "auto", "off", or a number of proxies
_Flows = dict[TransferGroup, list[TokenTraffic]]


class TokenBytes(NamedTuple):
    """Bytes and FLOPs of one token in the attention of one layer on this rank.

    kv: bytes of its keys and values between nodes; their gradients have as many.
    qkv: bytes of its query, key and value.
    out: bytes of its output.
    pair_flops: FLOPs of one query-key pair, forward.
    latents: whether latents are sent in place of keys and values. Calls with received keys then hold no own keys.
    """

    kv: int
    qkv: int
    out: int
    pair_flops: float
    latents: bool = False

    @classmethod
    def of(cls, plan: SequencePlan, shape: AttentionShape) -> "TokenBytes":
        """For the layers of a plan. Keys in a sliding window are sent themselves, also where there is a latent."""
        (heads, kv_heads), size, values = shape.heads_of_rank, shape.head_size, shape.value_size
        kv, item = kv_heads * (size + values), shape.item_bytes
        latent = shape.latent if plan.sees_all else None
        sent = kv if latent is None else latent.size + latent.shared
        flops = pair_flops(heads, size, values)
        return cls(sent * item, (heads * size + kv) * item, heads * values * item, flops, latent is not None)

    def row_bytes(self, transfer_group: TransferGroup) -> int:
        """Bytes of one row of a transfer group. For changes of layout, bytes of the forward pass."""
        return {"to attention": self.qkv, "to linear": self.out}.get(transfer_group.kind, self.kv)


class Part(NamedTuple):
    """Rows [start, stop) of the message of `flow`, sent along `path`: source, proxies, target, each rank once."""

    flow: Flow
    start: int
    stop: int
    path: tuple[int, ...]


class Slice(NamedTuple):
    """A slice of a part.

    number: unique among all slices of a transfer group.
    turn: the step of the pipeline in which the slice makes its first hop. Each later hop is one step later.
    """

    number: int
    flow: Flow
    start: int
    stop: int
    path: tuple[int, ...]
    turn: int


@dataclass(frozen=True)
class Route:
    """The routing of messages between nodes that start together.

    cluster: the cluster of all ranks.
    proxies: parts of each message.
    slices: slices of each part, sent one after another.
    seconds: modelled time of the messages that the route was made for.
    """

    cluster: Cluster
    proxies: int
    slices: int
    seconds: float

    def parts(self, flow: Flow, rows: int) -> Iterator[Part]:
        """The parts of one message of `rows` rows, each over one pair of NICs of the two nodes."""
        relays, (source, target), number = _relays(self.cluster), flow, self.proxies
        for index, column in enumerate(_columns(self.cluster, number)):
            start, stop = rows * index // number, rows * (index + 1) // number
            if start < stop:
                path = (source, int(relays[source, column]), int(relays[target, column]), target)
                yield Part(flow, start, stop, tuple(dict.fromkeys(path)))

    def of(self, rank: int, moved: TokenTraffic, numbered: np.ndarray | None = None) -> list[Slice]:
        """Slices that a rank sends, relays or receives, in order of the pipeline's steps; none without proxies.

        rank: of the cluster.
        moved: rows of each message.
        numbered: int64 [pair], ascending, source x ranks + target of all pairs for which slices are numbered. It must
            contain the pairs of `moved`, which are the default, and be the same on all ranks, so that they number
            slices alike.
        """
        if self.proxies == 1:
            return []
        ranks, per_node = self.cluster.world_size, self.cluster.ranks_per_node
        here = (moved.source // per_node == rank // per_node) | (moved.target // per_node == rank // per_node)
        pairs, which = np.unique(_pairs(moved, self.cluster)[here], return_inverse=True)
        rows = np.bincount(which, moved.tokens[here]).astype(np.int64)
        if numbered is None:
            numbered = np.unique(_pairs(moved, self.cluster))
        slices = []
        for pair, number, count in zip(pairs.tolist(), np.searchsorted(numbered, pairs).tolist(), rows, strict=True):
            for index, (flow, start, stop, path) in enumerate(self.parts(divmod(pair, ranks), int(count))):
                if rank in path:
                    first = (number * self.proxies + index) * self.slices
                    for turn in range(self.slices):
                        begin, end = (start + (stop - start) * cut // self.slices for cut in (turn, turn + 1))
                        if begin < end:
                            slices.append(Slice(first + turn, flow, begin, end, path, turn))
        return sorted(slices, key=lambda piece: (piece.turn + piece.path.index(rank), piece.number))


def routes(
    plan: SequencePlan,
    rank: int,
    cluster: Cluster,
    row_bytes: Callable[[TransferGroup], int],
    routing: Routing = "auto",
    *,
    turn_tokens: TurnTokens,
) -> dict[TransferGroup, list[Slice]]:
    """The slices that one rank sends, relays or receives, by transfer group with a route. The groups are the same on
    all ranks.

    plan: the plan of the whole batch.
    rank: in the plan.
    cluster: the cluster of the plan's ranks.
    row_bytes: bytes of one row of a transfer group.
    routing: as in `route`.
    turn_tokens: least tokens of a turn of gathering.

    Rounds of one kind are alike, so the round that moves most rows decides the route of all.
    """
    kinds: dict[str, dict[TransferGroup, TokenTraffic]] = defaultdict(dict)
    for transfer_group, moved in internode_traffic(plan, cluster, turn_tokens).items():
        kinds[transfer_group.kind][transfer_group] = moved
    slices: dict[TransferGroup, list[Slice]] = {}
    for groups in kinds.values():
        busiest = max(groups, key=lambda transfer_group: int(groups[transfer_group].tokens.sum()))
        chosen = route(groups[busiest], row_bytes(busiest), cluster, routing)
        if chosen.proxies == 1:
            continue
        numbered = np.unique(np.concatenate([_pairs(moved, cluster) for moved in groups.values()]))
        slices |= {transfer_group: chosen.of(rank, moved, numbered) for transfer_group, moved in groups.items()}
    return slices


def route(moved: TokenTraffic, row_bytes: int, cluster: Cluster, routing: Routing = "auto") -> Route:
    """The route of messages between nodes that start together.

    moved: rows of each message. A pair of ranks may occur several times; its rows are one message.
    row_bytes: bytes of one row.
    cluster: the cluster of all ranks.
    routing: number of parts of each message, at most one for each NIC and rank of a node. The source itself sends one
        part, proxies with other NICs send the others. "auto": the number that the model expects to be fastest. "off":
        one part.

    Raises ValueError for any other routing.
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
    return min((best, *others), key=lambda candidate: candidate.seconds)


def check_routing(routing: Routing) -> None:
    """Raise ValueError unless `routing` is "auto", "off" or a positive number."""
    number = isinstance(routing, int) and not isinstance(routing, bool)
    if not (routing >= 1 if number else routing in ("auto", "off")):  # type: ignore[operator]
        raise ValueError(f"routing {routing!r} is none of 'auto', 'off' and a number of proxies of at least 1")


def _pairs(moved: TokenTraffic, cluster: Cluster) -> np.ndarray:
    """int64 [transfer], number of the pair of ranks: source x ranks + target."""
    return np.asarray(moved.source * cluster.world_size + moved.target)


def _least_seconds(moved: TokenTraffic, row_bytes: int, cluster: Cluster) -> float:
    """Seconds if all NICs of the busiest node were equally busy."""
    busy = [np.bincount(end // cluster.ranks_per_node, moved.tokens).max(initial=0) for end in moved[:2]]
    return float(max(busy) * row_bytes / (cluster.nics_per_node * cluster.nic_bandwidth))


def _modelled(moved: TokenTraffic, row_bytes: int, cluster: Cluster, number: int) -> Route:
    """The route with each message in `number` parts, and the number of slices that the model expects to be fastest."""
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
    """NICs of the parts of a message, counted from the sender's own; the same for every message."""
    most = min(cluster.ranks_per_node, cluster.nics_per_node)
    return [index * most // number for index in range(number)]


@functools.lru_cache(maxsize=8)
def _relays(cluster: Cluster) -> np.ndarray:
    """int64 [rank, NIC], a rank of the same node that uses this NIC; the rank's own NIC comes first."""
    size, nic = cluster.ranks_per_node, first_nics(cluster).tolist()
    relays = []
    for rank in range(cluster.world_size):
        first = rank - rank % size
        by_nic: dict[int, int] = {}
        for step in range(size):
            other = first + (rank - first + step) % size
            by_nic.setdefault(nic[other], other)
        relays.append(list(by_nic.values()))
    return np.array(relays)


def internode_traffic(
    plan: SequencePlan, cluster: Cluster, turn_tokens: TurnTokens
) -> dict[TransferGroup, TokenTraffic]:
    """Rows between nodes in each transfer group of attention, forward and backward, changes of layout included.

    turn_tokens: least tokens of a turn of gathering.

    Every rank computes this for all ranks, since the load of a NIC depends on the messages of all ranks.
    """
    node = np.arange(plan.ranks) // cluster.ranks_per_node
    flows: _Flows = defaultdict(list)
    for sequence, shards in by_sequence(plan.attention).items():
        if plan.exchange[sequence] == "ring":
            _ring_flows(flows, plan.ring(sequence), shards, node)
    _gather_flows(flows, plan, node, turn_tokens)
    if plan.remapped:
        to_attention = remap_traffic(plan)
        flows[TransferGroup("to attention", True)].append(to_attention)
        flows[TransferGroup("to linear", True)].append(
            TokenTraffic(to_attention.target, to_attention.source, to_attention.tokens)
        )
    return {
        transfer_group: moved
        for transfer_group, parts in flows.items()
        if len((moved := _between_nodes(TokenTraffic(*map(np.concatenate, zip(*parts, strict=True))), cluster)).tokens)
    }


def _between_nodes(moved: TokenTraffic, cluster: Cluster) -> TokenTraffic:
    crosses = moved.crossing(cluster) & (moved.tokens > 0)
    return TokenTraffic(moved.source[crosses], moved.target[crosses], moved.tokens[crosses])


def _ring_flows(flows: _Flows, ring: Sequence[int], shards: Sequence[Shard], node: np.ndarray) -> None:
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
        flows[TransferGroup("ring", True, turn)].append(TokenTraffic(source[edge], target[edge], handed))
        flows[TransferGroup("ring return", True, turn + 1)].append(TokenTraffic(source[edge], target[edge], summed))


def _gather_flows(flows: _Flows, plan: SequencePlan, node: np.ndarray, turn_tokens: TurnTokens) -> None:
    moved: dict[TransferGroup, list[tuple[int, int, int]]] = defaultdict(list)
    for transfer in gathering(plan, node.tolist(), turn_tokens).transfers:
        if node[transfer.source] != node[transfer.target]:
            tokens = transfer.stop - transfer.begin
            moved[TransferGroup("gather", True, transfer.round)].append((transfer.source, transfer.target, tokens))
            moved[TransferGroup("return", True, transfer.back)].append((transfer.target, transfer.source, tokens))
    for transfer_group, rows in moved.items():
        flows[transfer_group].append(TokenTraffic(*np.array(rows, dtype=np.int64).T))
