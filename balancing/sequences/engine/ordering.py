"""The order in which a rank starts transfers, waits for them and computes.

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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from balancing.sequences.engine.program import (
    Compute,
    Kind,
    Messages,
    ProgramStep,
    Rows,
    Start,
    Task,
    TransferGroup,
    Wait,
    compute,
)

__all__ = ["Work", "backward_steps", "forward_steps"]


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
