"""Zeppelin's partitioner: short sequences stay on a rank, middling ones in a node, long ones go over nodes.

Zeppelin (arXiv 2509.21841, section 3.1, algorithms 1 and 2) puts sequences into buckets of nodes, then each node's into
buckets of ranks, longest first. A sequence that is split becomes a ring of G ranks, cut zig-zag in 2G pieces, which is
level in tokens and area. The paper's pseudo code was not available when this was written; the following is built from
descriptions of it:

- Where zones begin. A sequence is split where it must be, because its area or its tokens are more than a node's or a
  rank's share, and where it may be, because it is so long that a ring hides its communication (the crossing of compute
  and transfer, `cost.hidden_tokens`).
- Into how many. As many as bring a piece to half the mean area if their transfers stay hidden, so that buckets fill
  evenly, else as few as bring it to the mean.
- When tokens overflow every bucket, the sequence at hand, which is the longest that is left, is split too.

The layout is level in area only; for linear layers tokens are remapped (`leveling`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, nsmallest
from math import ceil, inf

from balancing.cluster import Cluster
from balancing.sequences.cost import hidden_tokens
from balancing.sequences.layout import AttentionShape, Shard
from balancing.sequences.zigzag import zigzag

__all__ = ["zone_layout"]

# Pieces are at most a bucket's share of the area over a grain. Finer ones level buckets better and travel more, so the
# first grain is taken that leaves the fullest rank at most so far over the mean.
_GRAINS, _LEVEL = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0), 1.15


class _Buckets:
    """Nodes, or the ranks of one: what each has been given."""

    def __init__(self, room: list[int], area: list[float]) -> None:
        self.room, self.area = room[:], area[:]  # tokens that still fit, query-key pairs
        self.queue = [(held, at) for at, held in enumerate(area)]
        heapify(self.queue)

    def place(self, length: int, pieces: int) -> list[int] | None:
        """Buckets of least area for so many equal pieces, more pieces where rooms are small; None if none fit."""
        if pieces == 1 and (one := self._emptiest(length)) is not None:
            return [one]
        for number in range(max(2, pieces), len(self.room) + 1):
            fitting = [at for at, room in enumerate(self.room) if room >= ceil(length / number)]
            if len(fitting) >= number:
                return sorted(nsmallest(number, fitting, key=lambda at: (self.area[at], at)))
        return None

    def put(self, held: list[int], length: int, area: float) -> None:
        """Put a sequence's equal pieces into these buckets."""
        for at in held:
            self.room[at] -= ceil(length / len(held))
            self.area[at] += area / len(held)
            heappush(self.queue, (self.area[at], at))

    def _emptiest(self, tokens: int) -> int | None:
        full, found = [], None
        while self.queue and found is None:
            area, at = heappop(self.queue)
            if area == self.area[at]:  # else an entry from before the bucket got more
                full.append((area, at))
                found = at if self.room[at] >= tokens else None
        for entry in full:
            heappush(self.queue, entry)
        return found


@dataclass
class _Split:
    """Which sequences are whole in a bucket and which are in pieces: sequence -> buckets."""

    whole: dict[int, int] = field(default_factory=dict)
    pieces: dict[int, list[int]] = field(default_factory=dict)


def zone_layout(
    lengths: Sequence[int], cluster: Cluster, shape: AttentionShape, capacity: int
) -> list[Shard] | None:
    """The layout for attention, by sequence and start; None where no rank may hold more than `capacity` tokens and
    sequences do not pack so tightly. Cut evenly over all ranks they always do."""
    best, best_fullest = None, inf
    for grain in _GRAINS:
        shards, area = _layout(lengths, cluster, shape, capacity, grain)
        fullest = max(area) * len(area) / sum(area) if shards else inf
        if fullest < best_fullest:
            best, best_fullest = shards, fullest
        if best_fullest <= _LEVEL:
            break
    return best


def _layout(
    lengths: Sequence[int], cluster: Cluster, shape: AttentionShape, capacity: int, grain: float
) -> tuple[list[Shard] | None, list[float]]:
    """The layout, and the area of each rank."""
    ranks = cluster.ranks_per_node
    hidden_far = hidden_tokens(cluster, shape, cluster.nic_bandwidth) * ranks  # tokens of a node's ranks
    hidden_near = hidden_tokens(cluster, shape, cluster.intra_node_bandwidth)
    rooms, areas = [capacity] * cluster.world_size, [0.0] * cluster.world_size
    nodes = _Buckets([ranks * capacity] * cluster.nodes, [0.0] * cluster.nodes)
    by_node = _partition(range(len(lengths)), lengths, nodes, ranks * capacity, hidden_far, grain)
    if by_node is None:
        return None, areas
    shards: list[Shard] = []
    for sequence, held in by_node.pieces.items():
        members = [node * ranks + local for node in held for local in range(ranks)]
        shards += _ring(sequence, lengths[sequence], members, rooms, areas)
    for node in range(cluster.nodes):
        own = slice(node * ranks, (node + 1) * ranks)
        inside = [sequence for sequence, at in by_node.whole.items() if at == node]
        split = _partition(inside, lengths, _Buckets(rooms[own], areas[own]), capacity, hidden_near, grain)
        if split is None:
            return None, areas
        for sequence, at in split.whole.items():
            shards += _ring(sequence, lengths[sequence], [node * ranks + at], rooms, areas)
        for sequence, held in split.pieces.items():
            shards += _ring(sequence, lengths[sequence], [node * ranks + at for at in held], rooms, areas)
    return (sorted(shards) if min(rooms) >= 0 else None), areas


def _partition(
    sequences: Sequence[int], lengths: Sequence[int], buckets: _Buckets, capacity: int, hidden: float, grain: float
) -> _Split | None:
    """Put sequences into buckets, whole or in equal pieces, level in area; None where they do not fit.

    buckets: with what they hold already; capacity: tokens that one holds at most. hidden: tokens that a piece must have
    for its transfers to hide. grain: pieces are at most a bucket's share of the area over this.
    """
    order = sorted(sequences, key=lambda sequence: (-lengths[sequence], sequence))
    area = [lengths[sequence] * (lengths[sequence] + 1) / 2 for sequence in order]
    number = len(buckets.room)
    share = (sum(buckets.area) + sum(area)) / number
    split = _Split()
    for sequence, own in zip(order, area, strict=True):
        length = lengths[sequence]
        least = max(ceil(grain * own / share), ceil(length / capacity))
        free = min(ceil(2 * own / share), int(length / hidden) if hidden else number)
        held = buckets.place(length, min(max(least, free), number))
        if held is None:
            return None
        buckets.put(held, length, own)
        if len(held) == 1:
            split.whole[sequence] = held[0]
        else:
            split.pieces[sequence] = held
    return split


def _ring(sequence: int, length: int, members: list[int], rooms: list[int], areas: list[float]) -> list[Shard]:
    """Cut a sequence over ranks; what does not divide goes where most room is. Alters rooms and areas."""
    base, more = divmod(length, len(members))
    counts = [base] * len(members)
    for at in sorted(range(len(members)), key=lambda at: (-rooms[members[at]], at))[:more]:
        counts[at] += 1
    for rank, count in zip(members, counts, strict=True):
        rooms[rank] -= count
        areas[rank] += length * (length + 1) / 2 / len(members)
    return zigzag(sequence, members, counts)
