"""Sliding windows: the tokens that a rank must receive from other ranks in layers with a sliding window.

With a window of w a token sees itself and the w tokens before it in its sequence, as with Megatron-LM's
`--window-size w,0` and flash attention's `window_size_left`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from balancing.sequences.sequence_plan import SequencePlan, Shard, by_sequence, runs_of, same_exchange

__all__ = ["Reach", "in_window", "keys_before_runs", "reaches"]


class Reach(NamedTuple):
    """Tokens [begin, stop) of `sequence` that later queries of `rank` see.

    Some of the tokens may be the rank's own. holders: shards of other ranks that hold the other tokens.
    """

    sequence: int
    begin: int
    stop: int
    rank: int
    holders: tuple[Shard, ...]


def in_window(plan: SequencePlan, window: int) -> SequencePlan:
    """The plan of the same batch for layers with a sliding window; `plan` itself if no sequence exceeds the window.

    With a window, attention costs about the same for each token, so these layers use the linear layout, with equal
    tokens on each rank. Nothing is remapped. A rank receives the keys in the windows of its first queries.
    """
    if max(plan.lengths) <= window + 1:
        return plan
    exchange = same_exchange(plan.linear, plan.lengths, "gather")
    return replace(plan, attention=plan.linear, exchange=exchange, capacity=None, window=window)


def reaches(plan: SequencePlan) -> list[Reach]:
    """The tokens that ranks need from other ranks in a plan with a window, by sequence and position.

    No token occurs twice for the same rank.
    """
    assert plan.window is not None
    spread = {number for number in range(len(plan.lengths)) if len(plan.ring(number)) > 1}
    found = []
    for sequence, shards in by_sequence(shard for shard in plan.attention if shard.sequence in spread).items():
        for begin, stop, rank in sorted(_ranges(shards, plan.window)):
            holders = tuple(s for s in shards if s.start < stop and s.stop > begin and s.rank != rank)
            found.append(Reach(sequence, begin, stop, rank, holders))
    return found


def keys_before_runs(runs: Sequence[tuple[int, int]], window: int) -> Iterator[tuple[int, int]]:
    """Tokens [begin, stop) before runs of adjacent tokens that the runs' queries see; overlapping ranges are merged.

    runs: [start, stop) of one sequence on one rank, sorted.
    """
    last: tuple[int, int] | None = None
    for start, _ in runs:
        begin = max(0, start - window)
        if begin == start:
            continue
        if last is not None and begin <= last[1]:
            last = last[0], start
            continue
        if last is not None:
            yield last
        last = begin, start
    if last is not None:
        yield last


def _ranges(shards: Sequence[Shard], window: int) -> Iterator[tuple[int, int, int]]:
    for rank in sorted({shard.rank for shard in shards}):
        runs = runs_of(shard for shard in shards if shard.rank == rank)
        yield from ((begin, stop, rank) for begin, stop in keys_before_runs(runs, window))
