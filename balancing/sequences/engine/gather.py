"""Transfers of keys of "gather" sequences: which keys each rank receives, in which turn, and from which rank.

A rank needs the keys of each sequence up to its own last tokens. The keys arrive in a few turns of about equally many
tokens (`balancing.sequences.rounds`). All of the rank's queries are computed with the keys of one turn while the next
turn is under way. In the backward pass the gradients of a turn's keys are complete once the turn is computed, and are
sent back while the next turn is computed. A turn has a part of every shard, so all ranks that hold keys send in every
turn. The first and the last turn are half as long as the others, since a rank may idle before the first keys arrive and
after the last are computed.

A key that ranks of a node need enters the node once: one rank of the node receives it over the network and sends copies
inside the node. Receivers are chosen so that all ranks of a node receive equally many keys from other nodes, and all
NICs of the node carry equally much. Copies are sent in the same transfer group as the next turn. Gradients take the
same way back: the receiver sums the gradients of the copies, and the sum leaves the node once, a transfer group later.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from balancing.sequences.rounds import TurnTokens, number_of_turns
from balancing.sequences.sequence_plan import TILE, Range, SequencePlan, Shard, by_sequence, reaches, runs_of

__all__ = ["Gathering", "Transfer", "gathering"]

_PHASE = 79  # tokens by which the rounding of turns is shifted from shard to shard


class Transfer(NamedTuple):
    """Keys of tokens [begin, stop) of `sequence` go from `source` to `target`, and their gradients go back.

    turn: in which `target` computes with the keys; None if `target` only sends copies.
    inter: whether the rank that needs the keys also needs tokens of the sequence from another node.
    round: of the transfer group of the keys.
    back: of the transfer group of the gradients.
    """

    sequence: int
    begin: int
    stop: int
    source: int
    target: int
    turn: int | None
    inter: bool
    round: int
    back: int


@dataclass(frozen=True)
class Gathering:
    """The gathered keys of a plan.

    transfers: the transfers of all ranks; a copy comes after the transfer that brings its keys to the node.
    copies: whether any rank sends on keys that it receives. If so, gradients that leave a node are sent a transfer
        group later than gradients that stay in it.
    """

    transfers: tuple[Transfer, ...]
    copies: bool


class _Piece(NamedTuple):
    """Tokens of one shard that ranks `needers` of one node need in turn `turn`."""

    inter: bool
    turn: int
    node: int
    needers: tuple[int, ...]
    sequence: int
    begin: int
    stop: int
    holder: int


def gathering(plan: SequencePlan, node: Sequence[int], turn_tokens: TurnTokens) -> Gathering:
    """The transfers that bring all ranks the keys that they need.

    node: node of each rank, ascending.
    turn_tokens: least tokens of a turn. If queries see only near keys, these are few, and arrive in one turn.
    """
    pieces = _in_turns(plan, node, turn_tokens) if plan.sees_all else _in_reach(plan, node)
    near = [piece for piece in pieces if node[piece.holder] == piece.node]
    entering = list(_entering(pieces, node, level=plan.sees_all))
    copies = any(piece.needers != (receiver,) for piece, receiver in entering)
    transfers: list[Transfer] = []
    for piece in near:
        inter, turn, _, needers, sequence, begin, stop, holder = piece
        transfers += [Transfer(sequence, begin, stop, holder, rank, turn, inter, turn, turn) for rank in needers]
    for piece, receiver in entering:
        inter, turn, _, needers, sequence, begin, stop, holder = piece
        its = turn if receiver in needers else None
        transfers.append(Transfer(sequence, begin, stop, holder, receiver, its, inter, turn, turn + copies))
        others = [rank for rank in needers if rank != receiver]
        transfers += [Transfer(sequence, begin, stop, receiver, rank, turn, inter, turn + 1, turn) for rank in others]
    return Gathering(tuple(transfers), copies)


def _in_turns(plan: SequencePlan, node: Sequence[int], turn_tokens: TurnTokens) -> list[_Piece]:
    """Tokens that ranks need of each shard, cut into turns. Keys of other nodes have the same turns on all ranks."""
    spread = {s for s, how in enumerate(plan.exchange) if how == "gather" and len(plan.ring(s)) > 1}
    by_number = by_sequence(shard for shard in plan.attention if shard.sequence in spread)
    lengths: dict[int, dict[int, tuple[bool, int]]] = {}  # sequence -> rank -> (inter, tokens before its last run)
    total: dict[tuple[bool, int], dict[int, int]] = defaultdict(lambda: defaultdict(int))  # (inter, rank or node)
    for sequence, shards in by_number.items():
        first: dict[int, int] = {}  # node -> its first token
        by_rank: dict[int, list[Shard]] = defaultdict(list)
        for shard in shards:
            first.setdefault(node[shard.rank], shard.start)
            by_rank[shard.rank].append(shard)
        lengths[sequence] = {}
        for rank, own in by_rank.items():
            length = runs_of(own)[-1][0]
            inter = any(other != node[rank] and token < length for other, token in first.items())
            lengths[sequence][rank] = inter, length
            longest = total[inter, node[rank] if inter else rank]
            longest[sequence] = max(longest[sequence], length)
    members = [node.count(number) for number in range(max(node) + 1)]
    tokens = {
        key: sum(by_sequence_tokens.values()) // (members[key[1]] if key[0] else 1)
        for key, by_sequence_tokens in total.items()
    }
    turns = {key: int(number_of_turns(tokens[key], turn_tokens[key[0]])) for key in total}
    turns_of_inter = max((number for (inter, _), number in turns.items() if inter), default=1)
    pieces, number_of_shard = [], 0
    for sequence, shards in by_number.items():
        for shard in shards:
            needers: dict[tuple[bool, int], list[int]] = defaultdict(list)
            for rank, (inter, length) in lengths[sequence].items():
                if length > shard.start and rank != shard.rank:
                    needers[inter, node[rank] if inter else rank].append(rank)
            for (inter, which), ranks in needers.items():
                number = turns_of_inter if inter else turns[inter, which]
                for turn, (begin, stop) in enumerate(_slices(shard.tokens, number, number_of_shard * _PHASE % TILE)):
                    if begin < stop:
                        tokens_of = sequence, shard.start + begin, shard.start + stop, shard.rank
                        needing = which if inter else node[which]
                        pieces.append(_Piece(inter, turn, needing, tuple(sorted(ranks)), *tokens_of))
            number_of_shard += 1
    return sorted(pieces)


def _slices(tokens: int, number: int, phase: int) -> Iterator[Range]:
    """Ranges of tokens of a shard, one a turn, cut at whole tiles.

    The first and the last turn have half as many tokens as the others. phase: shift of the rounding, in tokens, so that
    short shards do not all fall into one turn.
    """
    shares = [max(0, 2 * turn - 1) for turn in range(number)] if number > 2 else range(number)
    whole = 2 * (number - 1) if number > 2 else number
    tiles = [max(0, -((phase - tokens * share // whole) // TILE)) for share in shares]
    return pairwise([0, *(min(tokens, tile * TILE) for tile in tiles[1:]), tokens])


def _in_reach(plan: SequencePlan, node: Sequence[int]) -> list[_Piece]:
    """Tokens that ranks need of each shard if queries see only near keys, all in one turn."""
    reached = reaches(plan)
    inter = {
        (reach.sequence, reach.rank)
        for reach in reached
        if any(node[shard.rank] != node[reach.rank] for shard in reach.holders)
    }
    together: dict[tuple[int, bool, int], list[tuple[int, int, int]]] = defaultdict(list)
    for sequence, begin, stop, rank, _ in reached:
        together[sequence, (sequence, rank) in inter, node[rank]].append((begin, stop, rank))
    shards = by_sequence(shard for shard in plan.attention if shard.sequence in {reach.sequence for reach in reached})
    return sorted(
        _Piece(far, 0, number, ranks, sequence, begin, stop, holder)
        for (sequence, far, number), ranges in together.items()
        for begin, stop, holder, ranks in _cut(ranges, shards[sequence])
    )


def _cut(
    ranges: Sequence[tuple[int, int, int]], shards: Sequence[Shard]
) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
    """(begin, stop, holder, ranks) of tokens in ranges (begin, stop, rank), cut where holder or ranks change."""
    ends = sorted({end for one in ranges for end in one[:2]})
    for shard in shards:
        for begin, stop in pairwise([shard.start, *(e for e in ends if shard.start < e < shard.stop), shard.stop]):
            ranks = {rank for first, last, rank in ranges if first <= begin and stop <= last and rank != shard.rank}
            if ranks:
                yield begin, stop, shard.rank, tuple(sorted(ranks))


def _entering(pieces: Iterable[_Piece], node: Sequence[int], *, level: bool) -> Iterator[tuple[_Piece, int]]:
    """Pieces that come from another node, each with the rank that receives it. level: as in `_Receivers`."""
    together: dict[tuple[int, int], list[_Piece]] = defaultdict(list)
    for piece in pieces:
        if node[piece.holder] != piece.node:
            together[piece.turn, piece.node].append(piece)
    receivers: dict[int, _Receivers] = {}
    for (_, number), arriving in sorted(together.items()):
        if number not in receivers:
            receivers[number] = _Receivers([rank for rank, its in enumerate(node) if its == number], level)
        yield from receivers[number].divide(arriving)


class _Receivers:
    """Chooses the ranks of a node that receive tokens of other nodes: equally many each, up to a tile, over all turns.

    level: whether to balance. False for few keys: then only ranks that need them receive them.
    """

    def __init__(self, ranks: Sequence[int], level: bool) -> None:
        self._level = level
        self._load = dict.fromkeys(ranks, 0)
        self._total = 0

    def divide(self, pieces: Sequence[_Piece]) -> Iterator[tuple[_Piece, int]]:
        """The pieces of a turn with their receivers, cut where the receiver changes.

        A piece goes to a rank that needs it, or to another rank of the node if those have received their share.
        """
        self._total += sum(piece.stop - piece.begin for piece in pieces)
        most = -(-self._total // len(self._load) // TILE) * TILE if self._level else self._total
        for piece in sorted(pieces, key=lambda piece: (len(piece.needers), piece.needers, piece)):
            begin = piece.begin
            while begin < piece.stop:
                receiver = min(piece.needers, key=self._load.__getitem__)
                if self._load[receiver] >= most:
                    receiver = min(self._load, key=self._load.__getitem__)
                stop = min(piece.stop, begin + most - self._load[receiver])
                self._load[receiver] += stop - begin
                yield piece._replace(begin=begin, stop=stop), receiver
                begin = stop
