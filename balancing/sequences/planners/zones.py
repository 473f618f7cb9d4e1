"""Zeppelin's partitioner: short sequences stay on a rank, medium ones in a node, long ones span nodes.

Zeppelin (arXiv 2509.21841, section 3.1, algorithms 1 and 2) puts sequences into buckets of nodes, then the sequences of
each node into buckets of ranks, longest first. This follows descriptions of the paper's algorithms, not its pseudo
code:

- Sequences to split. A sequence must be split if its area or its tokens exceed the share of a node or a rank. It may be
  split if it is so long that a ring hides its communication. `cost.hidden_tokens` is the length at which compute and
  transfer take equally long.
- Number of pieces. If transfers stay hidden, as many as bring a piece to half the mean area, so that buckets fill
  evenly; else as few as bring a piece to the mean area.
- Tokens that fit no bucket. The current sequence, the longest one left, is split.

The layout is balanced in area only; for linear layers tokens are remapped (`linear_layout`).

A split sequence is a ring of G ranks. It is cut in a zig-zag into 2G pieces: rank i of G holds pieces i and 2G - 1 - i,
so that each rank has the same tokens and area. Megatron-LM and Transformer Engine cut this way after padding to a
multiple of 2G. Nothing is padded here: pieces differ by a token where the length does not divide.

The methods "ring" and "gather" cut every sequence this way over all ranks. "ring" is Transformer Engine's p2p context
parallelism. "gather" is the context parallelism of Llama 3 (arXiv 2407.21783, section 3.3.2), but Llama 3 cuts the
whole pack rather than each document and is less balanced.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace, nsmallest
from math import ceil, inf
from typing import NamedTuple

from balancing.cluster import Cluster
from balancing.sequences.cost import hidden_tokens
from balancing.sequences.planners.dealing import even_counts
from balancing.sequences.planners.problem import Problem
from balancing.sequences.sequence_plan import AttentionShape, SequencePlan, Shard

__all__ = ["even_layout", "plan_zones", "zigzag"]

_ROOM = 1.5  # without a capacity, the most tokens of a rank in attention over the mean

# A piece has at most a bucket's share of the area, divided by a grain. Finer pieces balance better and cause more
# traffic, so the first grain that keeps the largest area of a rank below _BALANCED times the mean is taken.
_GRAINS, _BALANCED = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0), 1.15


class _Buckets:
    """Nodes, or the ranks of one node, with the room and the area of each."""

    def __init__(self, room: list[int], area: list[float]) -> None:
        self.room, self.area = room[:], area[:]  # tokens that still fit; query-key pairs held
        self._queue = [(held, bucket) for bucket, held in enumerate(area)]  # least area first; holds stale entries
        heapify(self._queue)
        # Buckets too full for the current sequence, most room first. They return to the queue for shorter sequences.
        self._full: list[tuple[int, int]] = []

    def place(self, length: int, area: float, pieces: int) -> list[int] | None:
        """Put equal pieces of a sequence into the buckets of least area: `pieces` pieces, or more if room is short.

        Returns the buckets, or None if the sequence does not fit. Sequences must come longest first.
        """
        if pieces == 1 and (one := self._emptiest(length)) is not None:
            self.room[one] -= length
            self.area[one] += area
            heapreplace(self._queue, (self.area[one], one))
            return [one]
        rooms = sorted(self.room, reverse=True)
        numbers = range(max(2, pieces), len(rooms) + 1)
        number = next((number for number in numbers if rooms[number - 1] * number >= length), None)
        if number is None:
            return None
        fitting = [bucket for bucket, room in enumerate(self.room) if room * number >= length]
        chosen = sorted(nsmallest(number, fitting, key=lambda bucket: (self.area[bucket], bucket)))
        tokens, part = ceil(length / number), area / number
        for bucket in chosen:
            self.room[bucket] -= tokens
            self.area[bucket] += part
            heappush(self._queue, (self.area[bucket], bucket))
        return chosen

    def _emptiest(self, tokens: int) -> int | None:
        """The bucket of least area among those with room for `tokens`."""
        queue, full = self._queue, self._full
        while full and full[0][0] <= -tokens:
            _, bucket = heappop(full)
            heappush(queue, (self.area[bucket], bucket))
        while queue:
            area, bucket = queue[0]
            if area == self.area[bucket]:  # else the entry is stale
                if self.room[bucket] >= tokens:
                    return bucket
                heappush(full, (-self.room[bucket], bucket))
            heappop(queue)
        return None


class _Sequence(NamedTuple):
    number: int
    length: int
    area: float


_Split = list[tuple[_Sequence, list[int]]]  # sequences, longest first, and the buckets or ranks of each


def plan_zones(problem: Problem) -> SequencePlan:
    """Zeppelin's plan. If sequences do not pack into the capacity, every sequence is cut over all ranks."""
    capacity = int(max(problem.quotas) * _ROOM) if problem.capacity is None else problem.capacity
    shards = _zone_layout(problem, capacity) or even_layout(problem)
    return problem.plan(shards, "ring", remaps=True)


def _zone_layout(problem: Problem, capacity: int) -> list[Shard] | None:
    """The layout of attention; None if sequences do not pack into the capacity.

    capacity: most tokens of a rank. Sequences cut evenly over all ranks always fit a capacity of the mean.
    """
    lengths, cluster, shape = problem.lengths, problem.cluster, problem.shape
    order = sorted(range(len(lengths)), key=lambda sequence: (-lengths[sequence], sequence))
    batch = [_Sequence(number, lengths[number], lengths[number] * (lengths[number] + 1) / 2) for number in order]
    most = _BALANCED * sum(sequence.area for sequence in batch) / cluster.world_size
    best, uneven = None, []
    for grain in _GRAINS:
        best, fullest = _zones(batch, cluster, shape, capacity, grain, most)
        if best is not None:
            break
        if fullest < inf:
            uneven.append(grain)
    else:
        least = inf
        for grain in uneven:
            rings, fullest = _zones(batch, cluster, shape, capacity, grain, least)
            if rings is not None and fullest < least:
                best, least = rings, fullest
    if best is None:
        return None
    rooms, shards = [capacity] * cluster.world_size, []
    for sequence, members in best:
        shards += _ring(sequence, members, rooms)
    return shards if min(rooms) >= 0 else None


def _zones(
    batch: Sequence[_Sequence], cluster: Cluster, shape: AttentionShape, capacity: int, grain: float, most: float
) -> tuple[_Split | None, float]:
    """The ranks that share each sequence, and the largest area of a rank.

    (None, that area) if a rank has more area than `most`; (None, infinity) if sequences do not fit.
    """
    ranks = cluster.ranks_per_node
    hidden_far = hidden_tokens(cluster, shape, cluster.nic_bandwidth) * ranks  # tokens of a whole node
    hidden_near = hidden_tokens(cluster, shape, cluster.intra_node_bandwidth)
    nodes = _Buckets([ranks * capacity] * cluster.nodes, [0.0] * cluster.nodes)
    by_node = _partition(batch, nodes, ranks * capacity, hidden_far, grain)
    if by_node is None:
        return None, inf
    rooms, areas = [capacity] * cluster.world_size, [0.0] * cluster.world_size
    rings: _Split = []
    inside: list[list[_Sequence]] = [[] for _ in range(cluster.nodes)]
    for sequence, buckets_of in by_node:
        if len(buckets_of) == 1:
            inside[buckets_of[0]].append(sequence)
            continue
        members = [node * ranks + local for node in buckets_of for local in range(ranks)]
        rings.append((sequence, members))
        tokens, part = ceil(sequence.length / len(members)), sequence.area / len(members)
        for rank in members:
            rooms[rank] -= tokens
            areas[rank] += part
    fullest = 0.0
    # Nodes with least room first: they fail most often.
    for node in sorted(range(cluster.nodes), key=nodes.room.__getitem__):
        first = node * ranks
        buckets = _Buckets(rooms[first : first + ranks], areas[first : first + ranks])
        split = _partition(inside[node], buckets, capacity, hidden_near, grain)
        if split is None:
            return None, inf
        fullest = max(fullest, *buckets.area)
        if fullest > most:
            return None, fullest
        rings += [(sequence, [first + bucket for bucket in buckets_of]) for sequence, buckets_of in split]
    return rings, fullest


def _partition(
    sequences: Sequence[_Sequence], buckets: _Buckets, capacity: int, hidden: float, grain: float
) -> _Split | None:
    """The buckets of each sequence, an equal piece in each, so that areas are balanced; None if sequences do not fit.

    sequences: longest first.
    buckets: with the tokens and the area that they already hold; altered.
    capacity: most tokens of a bucket.
    hidden: least tokens of a piece whose transfers are hidden.
    grain: a piece has at most a bucket's share of the area divided by `grain`.
    """
    number = len(buckets.room)
    share = (sum(buckets.area) + sum(area for _, _, area in sequences)) / number
    split: _Split = []
    pieces = number
    for sequence in sequences:
        _, length, area = sequence
        if pieces > 1:  # once it is 1, it is 1 for all shorter sequences
            least = max(ceil(grain * area / share), ceil(length / capacity))
            free = min(ceil(2 * area / share), int(length / hidden) if hidden else number)
            pieces = min(max(least, free), number)
        chosen = buckets.place(length, area, pieces)
        if chosen is None:
            return None
        split.append((sequence, chosen))
    return split


def _ring(sequence: _Sequence, members: list[int], rooms: list[int]) -> list[Shard]:
    """Shards of a sequence over ranks; the remainder goes to ranks with most room. Alters `rooms`."""
    if len(members) == 1:
        rooms[members[0]] -= sequence.length
        return [Shard(sequence.number, 0, sequence.length, members[0])]
    base, more = divmod(sequence.length, len(members))
    counts = [base] * len(members)
    for place in sorted(range(len(members)), key=lambda place: (-rooms[members[place]], place))[:more] if more else ():
        counts[place] += 1
    for rank, count in zip(members, counts, strict=True):
        rooms[rank] -= count
    return zigzag(sequence.number, members, counts)


def even_layout(problem: Problem) -> list[Shard]:
    """Shards of every sequence over all ranks. Remainders rotate over ranks, so that ranks differ by one token at
    most."""
    shards: list[Shard] = []
    lengths, ranks = problem.lengths, problem.cluster.world_size
    first, members = 0, range(ranks)
    for sequence in sorted(range(len(lengths)), key=lambda sequence: (-lengths[sequence], sequence)):
        shards += zigzag(sequence, members, even_counts(lengths[sequence], ranks, first))
        first = (first + lengths[sequence]) % ranks
    return shards


def zigzag(sequence: int, ranks: Sequence[int], counts: Sequence[int]) -> list[Shard]:
    """Shards of one sequence, by position: counts[i] tokens on ranks[i], half of them in either half of the zig-zag."""
    shards: list[Shard] = []
    start = 0
    fronts = [(rank, count // 2) for rank, count in zip(ranks, counts, strict=True)]
    backs = [(rank, count - count // 2) for rank, count in zip(ranks, counts, strict=True)]
    for rank, count in fronts + backs[::-1]:
        if not count:
            continue
        if shards and shards[-1].rank == rank:  # the two pieces of the last rank meet
            shards[-1] = shards[-1]._replace(stop=start + count)
        else:
            shards.append(Shard(sequence, start, start + count, rank))
        start += count
    return shards
