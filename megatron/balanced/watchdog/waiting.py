"""The chain of waits in a stalled job, from the answers of its ranks: which rank waits for which, and in what.

A rank waits in an operation until all of its participants have started it. The chain continues at a participant that
has not. It ends at a rank that waits for no other or does not answer, or it is a cycle.
"""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron.balanced.watchdog.operations import COLLECTIVE, key_of

__all__ = ["Answer", "Group", "Started", "explain_stall"]

# Collectives in which all ranks pass tensors of the same shapes.
_ALIKE = ("allreduce", "broadcast", "reduce", "all_gather_single", "reduce_scatter_single", "_allgather_base")


class Started(NamedTuple):
    """One operation that a rank started, as in `operations.Operation`. age: seconds since it started."""

    kind: str
    key: str
    number: int
    sizes: Any
    line: str
    age: float

    def __str__(self) -> str:
        return f"{self.kind} #{self.number}"


class Group(NamedTuple):
    """The operations of a rank on one group: their number by key, and the last ones in the order of their start."""

    description: str
    ranks: Sequence[int]
    started: Mapping[str, int]
    last: Sequence[Started]

    def __str__(self) -> str:
        return f"{self.description} ({_ranks(self.ranks)})"


class Answer(NamedTuple):
    """The answer of a rank.

    place: the line that its main thread is at.
    waits: the group and the operation that it waits in, if known.
    groups: its operations, by name of the group.
    """

    place: str
    waits: tuple[str, Started] | None
    groups: Mapping[str, Group]


class _Wait(NamedTuple):
    group: str
    operation: Started
    missing: list[int]


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def _short(line: str) -> str:
    """The last three parts of a path."""
    parts = line.split(os.sep)
    return os.sep.join(parts[-3:])


def _started(answers: Mapping[int, Answer], rank: int, group: str, key: str) -> int:
    known = answers.get(rank)
    return known.groups[group].started.get(key, 0) if known is not None and group in known.groups else 0


def _missing(answers: Mapping[int, Answer], rank: int, name: str, operation: Started) -> list[int]:
    """The participants of `operation` of `rank` that have not started it."""
    group = answers[rank].groups[name]
    if operation.key == COLLECTIVE:
        needed = {other: COLLECTIVE for other in group.ranks}
    else:
        kind, peer, tag = operation.key.split()
        needed = {int(peer): key_of("recv" if kind == "send" else "send", rank, int(tag))}
    return [other for other, key in needed.items() if _started(answers, other, name, key) < operation.number]


def _wait(answers: Mapping[int, Answer], rank: int) -> _Wait | None:
    """The operation that a rank waits in: the one it names, else the oldest that others have not started. On a GPU the
    host does not know which operation its device has reached."""
    answer = answers[rank]
    candidates = [(name, operation) for name, group in answer.groups.items() for operation in group.last]
    candidates.sort(key=lambda candidate: -candidate[1].age)
    if answer.waits is not None:
        candidates = [answer.waits]
    for name, operation in candidates:
        if missing := _missing(answers, rank, name, operation):
            return _Wait(name, operation, missing)
    return None


def _last(answers: Mapping[int, Answer], rank: int, group: str) -> str:
    """Text on the last operation of a rank on a group."""
    known = answers[rank].groups.get(group)
    if known is None or not known.last:
        return "it has started none there"
    return f"its last operation there is {known.last[-1]}, called at {_short(known.last[-1].line)}"


def _mismatch(answers: Mapping[int, Answer]) -> str | None:
    """Text on two ranks whose collectives with the same number differ; None if there are none."""
    first: dict[tuple[str, int], tuple[int, Started]] = {}
    for rank, answer in answers.items():
        for name, group in answer.groups.items():
            for operation in group.last:
                if operation.key != COLLECTIVE:
                    continue
                other, before = first.setdefault((name, operation.number), (rank, operation))
                differs = operation.kind in _ALIKE and operation.sizes != before.sizes
                if operation.kind != before.kind or differs:
                    return (
                        f"on {group} rank {other} started {before} of {before.sizes}, called at {_short(before.line)}, "
                        f"where rank {rank} started {operation} of {operation.sizes}, called at "
                        f"{_short(operation.line)}"
                    )
    return None


def explain_stall(answers: Mapping[int, Answer], world: Sequence[int], first: int) -> str:
    """The chain of waits in one line.

    answers: by rank, of those that answered.
    world: all ranks.
    first: the rank at which the chain begins, if it waits.
    """
    if (mismatch := _mismatch(answers)) is not None:
        return mismatch
    asked = [first, *(rank for rank in world if rank != first)]
    waits = {rank: wait for rank in asked if rank in answers and (wait := _wait(answers, rank)) is not None}
    if not waits:
        places: dict[str, list[int]] = defaultdict(list)
        for rank in world:
            places[answers[rank].place if rank in answers else "does not answer"].append(rank)
        text = "; ".join(f"{_ranks(ranks)}: {place}" for place, ranks in places.items())
        return f"no rank waits for an operation that another has not started: {text}"
    rank, words, seen = next(iter(waits)), [], set()
    while rank in waits and rank not in seen:
        seen.add(rank)
        group, operation, missing = waits[rank]
        known = answers[rank].groups[group]
        there = [other for other in known.ranks if other not in missing and other != rank]
        started = f"{_ranks(there)} {'has' if len(there) == 1 else 'have'} started it, " if there else ""
        if operation.key != COLLECTIVE:
            started = ""
        behind = missing[0]
        why = _last(answers, behind, group) if behind in answers else "it does not answer"
        words.append(
            f"rank {rank} waits in {operation} of {known}, called at {_short(operation.line)}; {started}"
            f"{_ranks(missing)} {'has' if len(missing) == 1 else 'have'} not"
            f"{'' if started else ' started it'}: {why}"
        )
        rank = behind
    if rank in seen:
        words.append(f"rank {rank} again: a circle")
    elif rank in answers:
        words.append(f"rank {rank} waits for no other: it is at {answers[rank].place}")
    return "; ".join(words)
