"""Balanced attention near a given layout: tokens already lie on ranks, and linear layers keep them there.

The last tokens of a document have the most query-key pairs, so a rank with too much work gives away the ends of its
longest pieces, and few tokens move. A whole document is moved where one fits, since it needs no keys of another rank.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from balancing.cluster import Cluster
from balancing.sequences.planners.dealing import piece_area
from balancing.sequences.sequence_plan import Shard, by_sequence, runs_of

__all__ = ["Lengths", "shed_tails", "zigzag", "zigzag_of_rows"]

Lengths = tuple[tuple[int, ...], ...]  # tokens of the sequences of each data-parallel rank

_EVEN = 0.01  # ranks may differ from the mean area by this share of it


def shed_tails(linear: Sequence[Shard], lengths: Sequence[int], cluster: Cluster) -> list[Shard]:
    """A layout of attention near the given one, with about equal area on all ranks of `cluster`.

    linear: the given layout.
    lengths: tokens of each sequence.
    """
    ranks = cluster.world_size
    pieces: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]  # [rank]: (sequence, start, stop)
    for shard in linear:
        pieces[shard.rank].append((shard.sequence, shard.start, shard.stop))
    area = np.array([sum(map(piece_area, own)) for own in pieces], dtype=np.int64)
    mean, node = area.mean(), np.arange(ranks) // cluster.ranks_per_node
    for _ in range(4 * ranks + len(linear)):
        giver = int(area.argmax())
        near = np.where(node == node[giver], area, np.iinfo(np.int64).max)
        taker = int(near.argmin())
        if area[taker] > (1 - _EVEN) * mean:
            taker = int(area.argmin())
        wanted = math.floor(min(area[giver] - mean, mean - area[taker]))
        if area[giver] <= (1 + _EVEN) * mean or wanted < 1:
            break
        moved = _choose(pieces[giver], lengths, wanted)
        pieces[giver].remove(moved)
        whole = piece_area(moved)
        if whole > wanted:
            sequence, start, stop = moved
            kept = math.isqrt(8 * (stop * (stop + 1) // 2 - wanted) + 1)
            cut = min(max((kept - 1) // 2, start + 1), stop - 1)
            if cut <= start:  # a single token
                pieces[giver].append(moved)
                break
            pieces[giver].append((sequence, start, cut))
            moved = sequence, cut, stop
        pieces[taker].append(moved)
        area[giver] -= piece_area(moved)
        area[taker] += piece_area(moved)
    shards = [Shard(*piece, rank) for rank, own in enumerate(pieces) for piece in own]
    return [
        Shard(sequence, start, stop, rank)
        for sequence, parts in by_sequence(shards).items()
        for rank in sorted({shard.rank for shard in parts})
        for start, stop in runs_of(shard for shard in parts if shard.rank == rank)
    ]


def _choose(pieces: list[tuple[int, int, int]], lengths: Sequence[int], wanted: int) -> tuple[int, int, int]:
    """The piece to move or to cut: a whole document with at least half of the `wanted` area and at most all of it, else
    the piece with the latest tokens."""
    fitting = [p for p in pieces if p[1] == 0 and p[2] == lengths[p[0]] and wanted < 2 * piece_area(p) <= 2 * wanted]
    return max(fitting, key=piece_area) if fitting else max(pieces, key=lambda piece: (piece[2], piece))


def zigzag(lengths: Lengths, ways: int) -> list[Shard]:
    """The layout that training loops use: whole sequences, or zig-zag pieces with context parallelism.

    lengths: tokens of the sequences of each data-parallel rank, in the order of its rows.
    ways: context-parallel ranks of each data-parallel rank. Each holds two of 2 x ways pieces of every sequence.

    Raises ValueError for a sequence that does not cut into equal pieces.
    """
    shards = []
    firsts = [0, *accumulate(len(own) for own in lengths)]
    for replica, own in enumerate(lengths):
        for sequence, length in enumerate(own, firsts[replica]):
            if ways == 1:
                shards.append(Shard(sequence, 0, length, replica))
                continue
            size, rest = divmod(length, 2 * ways)
            if rest:
                raise ValueError(
                    f"a sequence of {length} tokens does not cut into {2 * ways} pieces for {ways} context-parallel "
                    f"ranks; pad each sequence to a multiple of {2 * ways}"
                )
            for way in range(ways):
                for piece in (way, 2 * ways - 1 - way):
                    shards.append(Shard(sequence, piece * size, (piece + 1) * size, replica * ways + way))
    return shards


def zigzag_of_rows(lengths: Lengths, ways: int) -> list[Shard]:
    """The layout of packed pre-training: the sequences of a data-parallel rank, one after another, are cut as a whole.

    lengths, ways: as in `zigzag`. Each context-parallel rank holds two of 2 x ways pieces of the packed row.

    Raises ValueError for a row that does not cut into equal pieces.
    """
    shards, sequence = [], 0
    for replica, own in enumerate(lengths):
        size, rest = divmod(sum(own), 2 * ways)
        if rest:
            raise ValueError(
                f"{sum(own)} packed tokens do not cut into {2 * ways} pieces for {ways} context-parallel ranks; "
                f"make the tokens of a micro-batch a multiple of {2 * ways}"
            )
        begin = 0
        for length in own:
            for piece in range(begin // size, -(-(begin + length) // size)):
                start, stop = max(piece * size - begin, 0), min((piece + 1) * size - begin, length)
                way = min(piece, 2 * ways - 1 - piece)
                shards.append(Shard(sequence, start, stop, replica * ways + way))
            begin, sequence = begin + length, sequence + 1
    return shards
