"""Which tokens each rank must receive so that its queries of "gather" sequences see all keys before them.

A rank's queries of one sequence are runs of tokens; a run needs the prefix of the sequence up to its own end. What a
rank needs comes in a few turns of about equal area, so that it computes with what has come while the rest is under way.
In the backward pass turns are computed from the last to the first, and gradients go home while the next is computed.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from balancing.sequences.layout import SequencePlan, Shard

__all__ = ["Need", "by_sequence", "needs", "runs_of"]

_TURNS = 4


class Need(NamedTuple):
    """Queries [start, stop) of `sequence` on `rank` need tokens [begin, stop) of it in `turn`; those before `begin`
    came for an earlier run. inter: whether anything that the rank needs of the sequence comes from another node."""

    sequence: int
    begin: int
    stop: int
    rank: int
    start: int
    inter: bool
    turn: int


def needs(plan: SequencePlan, node: Sequence[int]) -> list[Need]:
    """All needs of all ranks, by sequence and position. node: of each rank. The first run of a sequence, if it starts
    with its first token, needs nothing."""
    found: dict[tuple[int, bool], list[Need]] = defaultdict(list)
    spread = {s for s, way in enumerate(plan.exchange) if way == "gather" and len(plan.ring(s)) > 1}
    for sequence, shards in by_sequence(shard for shard in plan.attention if shard.sequence in spread).items():
        first: dict[int, int] = {}  # node -> its first token
        held: dict[int, list[Shard]] = defaultdict(list)
        for shard in shards:
            first.setdefault(node[shard.rank], shard.start)
            held[shard.rank].append(shard)
        for rank, own in held.items():
            runs = [run for run in runs_of(own) if run[0] > 0]
            begin = 0
            for start, stop in runs:
                inter = any(other != node[rank] and token < runs[-1][1] for other, token in first.items())
                found[rank, inter].append(Need(sequence, begin, stop, rank, start, inter, 0))
                begin = stop
    return sorted(need for own in found.values() for need in _in_turns(own))


def by_sequence(shards: Iterable[Shard]) -> Mapping[int, list[Shard]]:
    """The shards of each sequence, by position."""
    found: dict[int, list[Shard]] = defaultdict(list)
    for shard in sorted(shards):
        found[shard.sequence].append(shard)
    return found


def runs_of(shards: Iterable[Shard]) -> list[tuple[int, int]]:
    """[start, stop) of shards of one sequence and one rank, sorted; those that follow one another make one."""
    runs: list[tuple[int, int]] = []
    for shard in shards:
        if runs and runs[-1][1] == shard.start:
            runs[-1] = (runs[-1][0], shard.stop)
        else:
            runs.append((shard.start, shard.stop))
    return runs


def _in_turns(own: Sequence[Need]) -> list[Need]:
    areas = [need.stop * (need.stop + 1) - need.start * (need.start + 1) for need in own]
    done = accumulate(areas, initial=0)
    middles = (before + area // 2 for before, area in zip(done, areas, strict=False))
    return [n._replace(turn=middle * _TURNS // sum(areas)) for n, middle in zip(own, middles, strict=True)]
