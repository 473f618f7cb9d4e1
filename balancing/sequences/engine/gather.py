"""Tokens that each rank must receive so that its queries of "gather" sequences see all keys before them, and their way.

A rank needs each sequence up to its own last tokens. These keys arrive in a few turns of about as many tokens
(`balancing.sequences.rounds`), and all of the rank's queries meet the keys of one turn while the next is under way. In
the backward pass the gradients of a turn's keys are complete when the turn is computed, and are sent back while the
next one is.

A key that ranks of a node need enters the node once: one of them receives it over the network and sends copies inside
the node. Receivers are chosen so that all ranks of a node receive equally many keys from other nodes, so all of its
network cards carry as much. Copies travel together with the next turn, in one transfer group. Gradients take the same
way back: those of copies are added up by the receiver, and the sum leaves the node once, a transfer group later.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from balancing.sequences.cost import TILE
from balancing.sequences.rounds import SMALLEST_TURNS, TurnTokens, number_of_turns
from balancing.sequences.sequence_plan import SequencePlan, Shard, by_sequence, runs_of
from balancing.sequences.window import reaches

__all__ = ["Gathering", "Need", "Transfer", "gathering"]

_Shards = Mapping[int, Sequence[Shard]]


class Need(NamedTuple):
    """Tokens [begin, stop) of `sequence` that `rank` must have in `turn`; some of them may be its own.

    inter: whether any of the tokens that the rank needs of the sequence are on another node.
    """

    sequence: int
    begin: int
    stop: int
    rank: int
    inter: bool
    turn: int


class Transfer(NamedTuple):
    """Keys of tokens [begin, stop) of `sequence` go from `source` to `target`, and their gradients go back.

    inter: of the needs that they serve.
    round: of the transfer group of the keys. back: of that of the gradients.
    """

    sequence: int
    begin: int
    stop: int
    source: int
    target: int
    inter: bool
    round: int
    back: int


@dataclass(frozen=True)
class Gathering:
    """The gathered keys of a plan.

    needs: of all ranks, by turn, those inside a node first.
    transfers: of all ranks; a copy comes after the transfer that brings its keys to the node.
    copies: whether any rank sends on what it receives. Gradients then leave a node a transfer group later than those
        that stay in it.
    """

    needs: tuple[Need, ...]
    transfers: tuple[Transfer, ...]
    copies: bool


class _Piece(NamedTuple):
    """Tokens of one shard that the same ranks of a node need."""

    sequence: int
    begin: int
    stop: int
    holder: int
    needers: tuple[int, ...]


def gathering(plan: SequencePlan, node: Sequence[int], turn_tokens: TurnTokens = SMALLEST_TURNS) -> Gathering:
    """The needs of all ranks and the transfers that meet them. A rank that holds only the beginning of a sequence needs
    nothing of it.

    node: of each rank, ascending.
    turn_tokens: least tokens of a turn. With a window all keys arrive in one turn: they are few.
    """
    needs = _in_windows(plan, node) if plan.window is not None else _in_turns(plan, node, turn_tokens)
    needed = {need.sequence for need in needs}
    shards = by_sequence(shard for shard in plan.attention if shard.sequence in needed)
    found = list(_entering(needs, shards, node, level=plan.window is None))
    copies = any(receiver is not None and piece.needers != (receiver,) for _, _, piece, receiver in found)
    transfers: list[Transfer] = []
    for inter, turn, piece, receiver in found:
        tokens = piece[:3]
        if receiver is None:  # the holder is on the node
            transfers += [Transfer(*tokens, piece.holder, rank, inter, turn, turn) for rank in piece.needers]
            continue
        transfers.append(Transfer(*tokens, piece.holder, receiver, inter, turn, turn + copies))
        others = (rank for rank in piece.needers if rank != receiver)
        transfers += [Transfer(*tokens, receiver, rank, inter, turn + 1, turn) for rank in others]
    return Gathering(tuple(needs), tuple(transfers), copies)


def _in_windows(plan: SequencePlan, node: Sequence[int]) -> list[Need]:
    return [
        Need(*reach[:4], inter=any(node[shard.rank] != node[reach.rank] for shard in reach.holders), turn=0)
        for reach in reaches(plan)
    ]


def _in_turns(plan: SequencePlan, node: Sequence[int], turn_tokens: TurnTokens) -> list[Need]:
    """Beginnings of sequences, cut into turns. All ranks of a node that need a sequence of other nodes have it cut
    alike, so a token comes to all of them in one turn."""
    spread = {s for s, how in enumerate(plan.exchange) if how == "gather" and len(plan.ring(s)) > 1}
    lengths: dict[tuple[bool, int], dict[int, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
    for sequence, shards in by_sequence(shard for shard in plan.attention if shard.sequence in spread).items():
        first: dict[int, int] = {}  # node -> its first token
        by_rank: dict[int, list[Shard]] = defaultdict(list)
        for shard in shards:
            first.setdefault(node[shard.rank], shard.start)
            by_rank[shard.rank].append(shard)
        for rank, of_rank in by_rank.items():
            if length := runs_of(of_rank)[-1][0]:
                inter = any(other != node[rank] and token < length for other, token in first.items())
                # Those who have turns in common: the ranks of a node, or the rank alone.
                lengths[inter, node[rank] if inter else rank][sequence][rank] = length
    members = [node.count(number) for number in range(max(node) + 1)]
    found = []
    for (inter, common), by_number in lengths.items():
        total = sum(max(of_ranks.values()) for of_ranks in by_number.values())
        turns = int(number_of_turns(total // members[common] if inter else total, turn_tokens[inter]))
        for sequence, of_ranks in by_number.items():
            longest = max(of_ranks.values())
            ends = [_whole_tiles(longest * turn / turns) for turn in range(1, turns)] + [longest]
            for rank, length in of_ranks.items():
                begin = 0
                for turn, end in enumerate(ends):
                    if (stop := min(end, length)) > begin:
                        found.append(Need(sequence, begin, stop, rank, inter, turn))
                        begin = stop
    return sorted(found, key=lambda need: (need.turn, need.inter, need))


def _whole_tiles(tokens: float) -> int:
    return int(tokens / TILE + 0.5) * TILE


def _entering(
    needs: Iterable[Need], shards: _Shards, node: Sequence[int], level: bool
) -> Iterator[tuple[bool, int, _Piece, int | None]]:
    """(inter, turn, piece, receiver) of all tokens that come to a rank; no receiver where the holder is on the node.

    level: whether a rank may receive what only others need.
    """
    together: dict[tuple[bool, int, int], dict[int, list[Need]]] = defaultdict(lambda: defaultdict(list))
    for need in needs:
        together[need.inter, need.turn, node[need.rank]][need.sequence].append(need)
    receivers: dict[int, _Receivers] = {}
    for (inter, turn, number), by_number in sorted(together.items(), key=lambda item: item[0]):
        far: list[_Piece] = []
        for sequence in sorted(by_number):
            for piece in _pieces(sequence, by_number[sequence], shards[sequence]):
                if node[piece.holder] == number:
                    yield inter, turn, piece, None
                else:
                    far.append(piece)
        if far:
            if number not in receivers:
                receivers[number] = _Receivers([rank for rank, its in enumerate(node) if its == number], level)
            for piece, receiver in receivers[number].divide(far):
                yield inter, turn, piece, receiver


def _pieces(sequence: int, needs: Sequence[Need], shards: Sequence[Shard]) -> Iterator[_Piece]:
    """Tokens that ranks of one node need, cut where the holder or the ranks change."""
    ends = sorted({end for need in needs for end in need[1:3]})
    for shard in shards:
        cuts = [shard.start, *(end for end in ends if shard.start < end < shard.stop), shard.stop]
        for begin, stop in pairwise(cuts):
            needers = {n.rank for n in needs if n.begin <= begin and stop <= n.stop and n.rank != shard.rank}
            if needers:
                yield _Piece(sequence, begin, stop, shard.rank, tuple(sorted(needers)))


class _Receivers:
    """The ranks of a node, which receive equally many tokens of other nodes, up to a tile, over all turns so far.

    level: False for keys in windows, which are so few that only ranks that need them receive them.
    """

    def __init__(self, ranks: Sequence[int], level: bool) -> None:
        self._level = level
        self._load = dict.fromkeys(ranks, 0)
        self._total = 0

    def divide(self, pieces: Sequence[_Piece]) -> Iterator[tuple[_Piece, int]]:
        """The pieces of a turn, cut where the receiver changes: a rank that needs the tokens, while it has room."""
        self._total += sum(piece.stop - piece.begin for piece in pieces)
        most = -(-self._total // len(self._load) // TILE) * TILE if self._level else self._total
        for piece in sorted(pieces, key=lambda piece: (len(piece.needers), piece)):
            begin = piece.begin
            while begin < piece.stop:
                receiver = min(piece.needers, key=self._load.__getitem__)
                if self._load[receiver] >= most:
                    receiver = min(self._load, key=self._load.__getitem__)
                stop = min(piece.stop, begin + most - self._load[receiver])
                self._load[receiver] += stop - begin
                yield piece._replace(begin=begin, stop=stop), receiver
                begin = stop
