"""Tokens that each rank must receive so that its queries of "gather" sequences see all keys before them.

A rank needs each sequence up to its own last tokens. These keys arrive in a few turns of about as many tokens
(`balancing.sequences.rounds`), and all of the rank's queries meet the keys of one turn while the next is under way. In
the backward pass the gradients of a turn's keys are complete when the turn is computed, and are sent back while the
next one is.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from balancing.sequences.cost import TILE
from balancing.sequences.rounds import SMALLEST_TURNS, TurnTokens, number_of_turns
from balancing.sequences.sequence_plan import SequencePlan, Shard, by_sequence, runs_of
from balancing.sequences.window import reaches

__all__ = ["Need", "needs"]


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


def needs(plan: SequencePlan, node: Sequence[int], turn_tokens: TurnTokens = SMALLEST_TURNS) -> list[Need]:
    """The needs of all ranks, by sequence and position; a rank that holds only the beginning of a sequence has none.

    node: of each rank.
    turn_tokens: least tokens of a turn. With a window all keys arrive in one turn: they are few.
    """
    if plan.window is not None:
        return [
            Need(*reach[:4], inter=any(node[shard.rank] != node[reach.rank] for shard in reach.holders), turn=0)
            for reach in reaches(plan)
        ]
    found: dict[tuple[int, bool], list[tuple[int, int]]] = defaultdict(list)
    spread = {s for s, how in enumerate(plan.exchange) if how == "gather" and len(plan.ring(s)) > 1}
    for sequence, shards in by_sequence(shard for shard in plan.attention if shard.sequence in spread).items():
        first: dict[int, int] = {}  # node -> its first token
        by_rank: dict[int, list[Shard]] = defaultdict(list)
        for shard in shards:
            first.setdefault(node[shard.rank], shard.start)
            by_rank[shard.rank].append(shard)
        for rank, of_rank in by_rank.items():
            if length := runs_of(of_rank)[-1][0]:
                inter = any(other != node[rank] and token < length for other, token in first.items())
                found[rank, inter].append((sequence, length))
    return sorted(
        need
        for (rank, inter), prefixes in found.items()
        for need in _in_turns(rank, inter, prefixes, turn_tokens[inter])
    )


def _in_turns(rank: int, inter: bool, prefixes: Sequence[tuple[int, int]], least: int) -> Iterable[Need]:
    """Prefixes (sequence, tokens) one after another, cut into turns at whole tiles."""
    total, before = sum(length for _, length in prefixes), 0
    turns = int(number_of_turns(total, least))
    for sequence, length in prefixes:
        begin = 0
        for turn in range(turns):
            end = total * (turn + 1) // turns - before  # of the turn, as a position in this sequence
            stop = min(length, -(-end // TILE) * TILE) if turn < turns - 1 else length
            if stop > begin:
                yield Need(sequence, begin, stop, rank, inter, turn)
                begin = stop
        before += length
