"""The program of one rank's attention: a list of steps that start transfers, wait for them, and compute.

Keys and values lie in one workspace, one token a row, and steps name rows of the workspace. A program is data: it can
be printed, counted and checked without a process. `compiler` makes it from a plan, `attention` runs it.

A step computes all tasks that have become possible in one call of the kernel, since each call costs a launch. The first
call computes the rank's own tokens of all sequences while the first keys are under way. Then each round is one call. A
part of the local sequences is kept for later, to be computed while a round or the last gradients are under way. So a
pass makes two calls more than it has rounds. Transfers between nodes start first, because they are the slowest
(Zeppelin, arXiv 2509.21841, section 4.2).

Keys that ranks send on (`gather`) must not wait for a rank that is busy with its own tokens. So their transfer groups
start one after another independently of computation (`Program.chained`).

All ranks start transfer groups in one order: a group that a rank waits for was started before any group that another
rank starts after a wait. So ranks cannot wait for each other in a circle, and a communicator that runs transfers in the
order of their start does not deadlock.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from balancing.kernels.base import Pieces
from balancing.kernels.pairs import area_of_first
from balancing.sequences.sequence_plan import Range, SequencePlan, Shard, by_sequence, join_adjacent

__all__ = [
    "LAYOUT_CHANGES",
    "TO_ATTENTION",
    "TO_LINEAR",
    "Call",
    "Compute",
    "Kind",
    "Messages",
    "PeerRows",
    "Program",
    "ProgramStep",
    "Rows",
    "Start",
    "Task",
    "TransferGroup",
    "Wait",
    "Work",
    "backward_steps",
    "causal_task",
    "compute",
    "forward_steps",
    "in_calls",
    "layout_change",
]

Rows = Range  # of a workspace
Kind = Literal["gather", "ring", "return", "ring return", "to attention", "to linear"]
LAYOUT_CHANGES: tuple[Kind, ...] = ("to attention", "to linear")


class TransferGroup(NamedTuple):
    """A set of messages that start together on all ranks.

    kind: "gather" and "ring" send keys and values, "return" and "ring return" their gradients back; "to attention" and
        "to linear" change the layout.
    inter: whether the messages belong to sequences on several nodes.
    round: number of the ring's round, or of the turn of gathering.
    """

    kind: Kind
    inter: bool
    round: int = 0


TO_ATTENTION, TO_LINEAR = TransferGroup("to attention", True), TransferGroup("to linear", True)


class PeerRows(NamedTuple):
    """Rows of the workspace in one message to or from `peer`. Rows for the rank itself are copied."""

    peer: int
    rows: tuple[Rows, ...]

    @property
    def tokens(self) -> int:
        """Number of rows."""
        return sum(stop - start for start, stop in self.rows)


@dataclass(frozen=True)
class Messages:
    """The messages that a rank sends and receives in one transfer group, in order of peers.

    adds: whether received rows are added to the rows of the workspace instead of replacing them.
    """

    sends: tuple[PeerRows, ...]
    receives: tuple[PeerRows, ...]
    adds: bool = False


class Task(NamedTuple):
    """Attention of rows of queries to rows of keys.

    causal: whether the mask is causal, from the bottom right.
    merges: whether these queries already have a partial result to merge with.
    before: rows of keys that come before `keys`.
    window: keys before its own that a query sees; None for all.
    """

    queries: Rows
    keys: Rows
    causal: bool
    merges: bool = False
    before: tuple[Rows, ...] = ()
    window: int | None = None

    @property
    def all_keys(self) -> tuple[Rows, ...]:
        """Rows of all keys, in their order."""
        return (*self.before, self.keys)

    @property
    def area(self) -> int:
        """Query-key pairs."""
        queries, keys = self.queries[1] - self.queries[0], sum(stop - start for start, stop in self.all_keys)
        if self.window is not None:
            last, first = area_of_first(np.array([keys, keys - queries]), self.window).tolist()
            return int(last - first)
        return queries * keys - (queries * (queries - 1) // 2 if self.causal else 0)


class Call(NamedTuple):
    """All tasks of one step, which a kernel computes in one call.

    queries, keys: rows of the tasks, in order of tasks, adjacent ranges joined. No query occurs twice; keys may.
    pieces: the kernel's pieces, one for each task.
    merges: whether the queries already have partial results.
    """

    queries: tuple[Rows, ...]
    keys: tuple[Rows, ...]
    pieces: Pieces
    merges: bool


class Start(NamedTuple):
    """Start the messages of a transfer group."""

    group: TransferGroup


class Wait(NamedTuple):
    """Wait until the messages of a transfer group have been sent and received."""

    group: TransferGroup


class Compute(NamedTuple):
    """Compute tasks. All tasks have the same mask and the same `merges`.

    clear: rows whose gradients are set to zero first, in the backward pass.
    call: index in `Program.calls` of the call that computes the tasks; None without tasks.
    """

    tasks: tuple[Task, ...]
    clear: Rows | None = None
    call: int | None = None


ProgramStep = Start | Wait | Compute


@dataclass(frozen=True)
class Program:
    """Everything one rank does for one layer's attention.

    rank: in the plan.
    shards: of the rank, sorted. Row i of the workspace is token i of the shards; rows of other ranks' tokens follow.
    rows: number of rows of the workspace.
    messages: by transfer group.
    calls: number of calls of the kernel, in either pass.
    forward, backward: steps of the two passes.
    chained: transfer groups of gathered keys that ranks send on. Each starts when the group before it has arrived, even
        if the rank is computing. For these groups the steps give only the order of starts.
    """

    rank: int
    shards: tuple[Shard, ...]
    rows: int
    messages: dict[TransferGroup, Messages]
    calls: tuple[Call, ...]
    forward: tuple[ProgramStep, ...]
    backward: tuple[ProgramStep, ...]
    chained: tuple[TransferGroup, ...] = ()

    @cached_property
    def tokens(self) -> int:
        """Tokens of the rank in attention."""
        return sum(shard.tokens for shard in self.shards)

    @cached_property
    def merges(self) -> bool:
        """Whether partial results are merged."""
        return any(call.merges for call in self.calls)

    @cached_property
    def in_one_call(self) -> bool:
        """Whether one call computes all queries with all of their keys."""
        return len(self.calls) == 1 and self.calls[0].queries == ((0, self.tokens),)

    def __str__(self) -> str:
        lines = [f"rank {self.rank}: {self.tokens} tokens, workspace of {self.rows} rows"]
        for name, steps in (("forward", self.forward), ("backward", self.backward)):
            lines += [f"{name}:", *("  " + self._line(step) for step in steps)]
        return "\n".join(lines)

    def _line(self, step: ProgramStep) -> str:
        if isinstance(step, Compute):
            return "compute " + ", ".join(
                f"{_span(task.queries)} x {'+'.join(map(_span, task.all_keys))}{' causal' if task.causal else ''}"
                for task in step.tasks
            )
        scope = "inter-node" if step.group.inter else "intra-node"
        name = f"{step.group.kind} {scope}" + (f" round {step.group.round}" if step.group.round else "")
        if isinstance(step, Wait):
            return f"wait for {name}"
        messages = self.messages[step.group]
        moved = [f"{_spans(message)} to {message.peer}" for message in messages.sends]
        moved += [f"{_spans(message)} from {message.peer}" for message in messages.receives]
        return f"start {name}: {', '.join(moved)}"


def layout_change(
    source: Sequence[Shard],
    target: Sequence[Shard],
    own_source: Sequence[Shard],
    own_target: Sequence[Shard],
) -> Messages:
    """The messages of one rank when all tokens go from layout `source` to layout `target`.

    source, target: shards of all ranks.
    own_source, own_target: the rank's shards, in the order of its tokens before and after.

    Rows of sent messages are numbered in the rank's tokens before the change, rows of received messages in its tokens
    after it. Tokens that stay are a message from the rank to itself.
    """
    return Messages(_overlaps(own_source, by_sequence(target)), _overlaps(own_target, by_sequence(source)))


def causal_task(plan: SequencePlan, queries: Rows, keys: Rows, before: tuple[Rows, ...] = ()) -> Task:
    """Attention of queries to their own keys, with the mask of the plan. before: rows of keys before `keys`."""
    return Task(queries, keys, causal=True, before=before, window=plan.window)


@dataclass(frozen=True)
class Work:
    """The work of one rank, before it is ordered.

    messages: by transfer group.
    own_tasks: tasks of the rank's own queries and keys, in the order of their rows.
    local: for each own task, whether its sequence is on this rank alone.
    gathered: by transfer group, the tasks whose last keys the group brings.
    copies: whether ranks of the plan send on keys of other nodes, one transfer group after receiving them (`gather`).
    rounds: tasks of each round of rings over nodes (True) and inside a node (False).
    regions: rows of the blocks of each round of rings over nodes (True) and inside a node (False).
    """

    messages: Mapping[TransferGroup, Messages]
    own_tasks: Sequence[Task]
    local: Sequence[bool]
    gathered: Mapping[TransferGroup, Sequence[Task]]
    copies: bool
    rounds: Mapping[bool, Mapping[int, Sequence[Task]]]
    regions: Mapping[bool, Mapping[int, Rows]]

    @property
    def last_round(self) -> int:
        """The last round of the rank's rings; gradients arrive one round later."""
        late = {"ring": 0, "ring return": 1}
        rings = [transfer_group for transfer_group in self.messages if transfer_group.kind in late]
        return max((ring.round - late[ring.kind] for ring in rings), default=0)

    def start(self, kind: Kind, inter: bool, turn: int = 0) -> list[ProgramStep]:
        """The step that starts a transfer group; empty if the rank does not take part in the group."""
        transfer_group = TransferGroup(kind, inter, turn)
        return [Start(transfer_group)] if transfer_group in self.messages else []

    def wait(self, kind: Kind, inter: bool, turn: int = 0) -> list[Wait]:
        """The step that waits for a transfer group; empty if the rank does not take part in the group."""
        transfer_group = TransferGroup(kind, inter, turn)
        return [Wait(transfer_group)] if transfer_group in self.messages else []

    def turns(self) -> list[tuple[int, bool]]:
        """(round, inter) of gathered keys and their gradients, in the order of tasks.

        Keys from inside the node come first, since they arrive sooner. A rank that only relays may take part in one
        direction alone: gradients are wider than keys and may be routed differently.
        """
        late = {"gather": 0, "return": int(self.copies)}
        rounds = [group.round + late[group.kind] for group in self.messages if group.kind in late]
        return [(turn, inter) for turn in range(max(rounds, default=-1) + 1) for inter in (False, True)]

    def first_transfers(self) -> list[ProgramStep]:
        """Starts of transfers that depend on nothing, the slowest first.

        Of gathering, at most two turns start: more turns would share links with the one that the rank waits for.
        """
        steps: list[ProgramStep] = []
        for turn in (0, 1):
            for inter in (True, False):
                steps += self.start("gather", inter, turn) if turn < self.ahead(inter) else []
        for inter in (True, False):
            steps += self.start("ring", inter, 1)
        return steps

    def ahead(self, inter: bool) -> int:
        """Turns of gathering that are under way at a time. Keys must have arrived before their copies are sent."""
        return 1 if inter and self.copies else 2

    def gather(self, turn: int, inter: bool) -> list[ProgramStep]:
        """Wait for the keys of a turn, start a later turn, and compute with the keys that have arrived."""
        later = turn + self.ahead(inter)
        steps = self.wait("gather", inter, turn) + self.start("gather", inter, later)
        return [*steps, compute(self.gathered.get(TransferGroup("gather", inter, turn), ()))]


def forward_steps(work: Work) -> tuple[ProgramStep, ...]:
    """The steps of the forward pass: own tokens, then gathered keys, then rings over nodes and inside the node."""
    last = work.last_round
    first, second = _own_tasks(work, last > 0)
    steps = [*work.first_transfers(), compute(first)]
    for turn, inter in work.turns():
        steps += work.gather(turn, inter)
    for turn in range(1, last + 1):
        for inter in (True, False):
            steps += work.wait("ring", inter, turn) + work.start("ring", inter, turn + 1)
            steps.append(compute(work.rounds[inter].get(turn, ())))
        if turn == (last + 1) // 2:
            steps.append(compute(second))
    return tuple(_without_nothing(steps))


def backward_steps(work: Work) -> tuple[ProgramStep, ...]:
    """The steps of the backward pass: as forward, but rings inside the node before rings over nodes.

    Gradients are sent back once complete, the last ones while own tokens are computed.
    """
    last = work.last_round
    first, second = _own_tasks(work, last > 0 or bool(work.turns()))
    steps = [*work.first_transfers(), compute(first)]
    returns: list[Wait] = []
    for turn, inter in work.turns():
        steps += work.gather(turn, inter)  # completes the gradients of the turn's keys
        back = turn - (inter and work.copies)  # with copies, other ranks may have finished only the turn before
        started = work.start("return", inter, back)
        if started and inter and work.copies:  # sums leave the node; they need the gradients of the node's ranks
            steps += [wait for wait in returns if wait.group.inter]
            returns = [wait for wait in returns if not wait.group.inter]
        steps += started
        returns += work.wait("return", inter, back)
    for turn in range(1, last + 2):
        if turn == last + 1:
            steps.append(compute(second))
        for inter in (False, True):
            steps += work.wait("ring", inter, turn) + work.start("ring", inter, turn + 1)
            steps.append(compute(work.rounds[inter].get(turn, ()), work.regions[inter].get(turn)))
            steps += work.wait("ring return", inter, turn) + work.start("ring return", inter, turn + 1)
    steps += returns
    return tuple(_without_nothing(steps))


def _own_tasks(work: Work, later: bool) -> tuple[Sequence[Task], Sequence[Task]]:
    """Own tasks to compute first, and own tasks to compute later (none unless `later`).

    The later tasks are local ones at one end of the rows, so that the rows of both parts stay adjacent. They have at
    most half of the area of all local tasks.
    """
    most = sum(task.area for task, local in zip(work.own_tasks, work.local, strict=True) if local) / 2 if later else 0.0
    ends = []
    for tasks, local in ((work.own_tasks, work.local), (work.own_tasks[::-1], work.local[::-1])):
        number, area = 0, 0
        while number < len(tasks) and local[number] and area + tasks[number].area <= most:
            area += tasks[number].area
            number += 1
        ends.append((area, number))
    (head, at_head), (tail, at_tail) = ends
    if head > tail:
        return work.own_tasks[at_head:], work.own_tasks[:at_head]
    cut = len(work.own_tasks) - at_tail
    return work.own_tasks[:cut], work.own_tasks[cut:]


def _without_nothing(steps: Iterable[ProgramStep]) -> Iterable[ProgramStep]:
    return (step for step in steps if not isinstance(step, Compute) or step.tasks or step.clear)


def compute(tasks: Sequence[Task], clear: Rows | None = None) -> Compute:
    """The step that computes `tasks`. clear: as in `Compute`."""
    assert len({(task.causal, task.merges, task.window) for task in tasks}) <= 1, "the tasks of a step have one mask"
    return Compute(tuple(tasks), clear)


def in_calls(
    *passes: Iterable[ProgramStep],
) -> tuple[tuple[Call, ...], list[tuple[ProgramStep, ...]]]:
    """All calls of the passes, and the passes' steps with the number of their calls. Equal steps share a call."""
    numbers: dict[tuple[Task, ...], int] = {}
    numbered = []
    for steps in passes:
        own: list[ProgramStep] = []
        for step in steps:
            if isinstance(step, Compute) and step.tasks:
                step = step._replace(call=numbers.setdefault(step.tasks, len(numbers)))
            own.append(step)
        numbered.append(tuple(own))
    return tuple(map(_call, numbers)), numbered


def _call(tasks: tuple[Task, ...]) -> Call:
    queries, keys = [task.queries for task in tasks], [rows for task in tasks for rows in task.all_keys]
    lengths = tuple(stop - start for start, stop in queries)
    key_lengths = tuple(sum(stop - start for start, stop in task.all_keys) for task in tasks)
    pieces = Pieces(lengths, key_lengths, tasks[0].causal, window=tasks[0].window)
    return Call(tuple(join_adjacent(queries)), tuple(join_adjacent(keys)), pieces, tasks[0].merges)


def _span(rows: Rows) -> str:
    return f"{rows[0]}-{rows[1]}"


def _spans(message: PeerRows) -> str:
    return "+".join(_span(rows) for rows in message.rows)


def _overlaps(shards: Sequence[Shard], other_layout: Mapping[int, list[Shard]]) -> tuple[PeerRows, ...]:
    """Own rows, by the rank that has the same tokens in the other layout; a message's rows are in order of tokens."""
    first: dict[tuple[int, int], int] = {}
    row = 0
    for shard in shards:
        first[shard[:2]] = row
        row += shard.tokens
    starts = {sequence: [shard.start for shard in shards_there] for sequence, shards_there in other_layout.items()}
    rows: dict[int, list[Rows]] = defaultdict(list)
    for shard in sorted(shards):
        sequence, start, stop, _ = shard
        same_sequence = other_layout[sequence]
        for other in same_sequence[bisect_right(starts[sequence], start) - 1 :]:
            if other.start >= stop:
                break
            row = first[shard[:2]] - start
            rows[other.rank].append((row + max(start, other.start), row + min(stop, other.stop)))
    return tuple(PeerRows(peer, tuple(join_adjacent(rows[peer]))) for peer in sorted(rows))
