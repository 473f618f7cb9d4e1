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


def zone_layout(lengths: Sequence[int], cluster: Cluster, shape: AttentionShape, capacity: int) -> list[Shard] | None:
    """The layout for attention; None where no rank may hold more than `capacity` tokens and
    sequences do not pack so tightly. Cut evenly over all ranks they always do."""
    best, best_fullest = None, inf
    for grain in _GRAINS:
        rings, area = _zones(lengths, cluster, shape, capacity, grain)
        fullest = max(area) * len(area) / sum(area) if rings else inf
        if fullest < best_fullest:
            best, best_fullest = rings, fullest
        if best_fullest <= _LEVEL:
            break
    if best is None:
        return None
    rooms, shards = [capacity] * cluster.world_size, []
    for sequence, members in best.items():
        shards += _ring(sequence, lengths[sequence], members, rooms)
    return shards if min(rooms) >= 0 else None


def _zones(
    lengths: Sequence[int], cluster: Cluster, shape: AttentionShape, capacity: int, grain: float
) -> tuple[dict[int, list[int]] | None, list[float]]:
    """The ranks that share each sequence, and the area of each rank."""
    ranks = cluster.ranks_per_node
    hidden_far = hidden_tokens(cluster, shape, cluster.nic_bandwidth) * ranks  # tokens of a node's ranks
    hidden_near = hidden_tokens(cluster, shape, cluster.intra_node_bandwidth)
    nodes = _Buckets([ranks * capacity] * cluster.nodes, [0.0] * cluster.nodes)
    by_node = _partition(range(len(lengths)), lengths, nodes, ranks * capacity, hidden_far, grain)
    if by_node is None:
        return None, []
    rooms, areas = [capacity] * cluster.world_size, [0.0] * cluster.world_size
    rings: dict[int, list[int]] = {}
    inside: list[list[int]] = [[] for _ in range(cluster.nodes)]
    for sequence, held in by_node.items():
        if len(held) == 1:
            inside[held[0]].append(sequence)
            continue
        rings[sequence] = [node * ranks + local for node in held for local in range(ranks)]
        for rank in rings[sequence]:
            rooms[rank] -= ceil(lengths[sequence] / len(rings[sequence]))
            areas[rank] += lengths[sequence] * (lengths[sequence] + 1) / 2 / len(rings[sequence])
    for node, own in enumerate(inside):
        first = node * ranks
        buckets = _Buckets(rooms[first : first + ranks], areas[first : first + ranks])
        split = _partition(own, lengths, buckets, capacity, hidden_near, grain)
        if split is None:
            return None, []
        rings.update((sequence, [first + at for at in held]) for sequence, held in split.items())
        areas[first : first + ranks] = buckets.area
    return rings, areas


def _partition(
    sequences: Sequence[int], lengths: Sequence[int], buckets: _Buckets, capacity: int, hidden: float, grain: float
) -> dict[int, list[int]] | None:
    """The buckets of each sequence, which has an equal piece in each, so that areas are level; None if they do not fit.

    buckets: with what they hold already; capacity: tokens that one holds at most. hidden: tokens that a piece must have
    for its transfers to hide. grain: pieces are at most a bucket's share of the area over this.
    """
    order = sorted(sequences, key=lambda sequence: (-lengths[sequence], sequence))
    area = [lengths[sequence] * (lengths[sequence] + 1) / 2 for sequence in order]
    number = len(buckets.room)
    share = (sum(buckets.area) + sum(area)) / number
    split: dict[int, list[int]] = {}
    for sequence, own in zip(order, area, strict=True):
        length = lengths[sequence]
        least = max(ceil(grain * own / share), ceil(length / capacity))
        free = min(ceil(2 * own / share), int(length / hidden) if hidden else number)
        held = buckets.place(length, min(max(least, free), number))
        if held is None:
            return None
        buckets.put(held, length, own)
        split[sequence] = held
    return split


def _ring(sequence: int, length: int, members: list[int], rooms: list[int]) -> list[Shard]:
    """Cut a sequence over ranks; what does not divide goes where most room is. Alters rooms."""
    base, more = divmod(length, len(members))
    counts = [base] * len(members)
    for at in sorted(range(len(members)), key=lambda at: (-rooms[members[at]], at))[:more] if more else ():
        counts[at] += 1
    for rank, count in zip(members, counts, strict=True):
        rooms[rank] -= count
    return zigzag(sequence, members, counts)
