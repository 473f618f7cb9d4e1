"""The order in which a rank starts transfers, waits for them and computes.

The forward pass serves sequences on several nodes first, then those inside the node, then local ones, because the
slowest transfer should start first (Zeppelin, arXiv 2509.21841, section 4.2). Local tasks are divided over the rounds
under way, so that no rank holds up a round. The backward pass goes the other way round.

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
    local: tasks that need no transfer.
    gathered: by transfer group, tasks that need the keys that it brings.
    rounds: tasks of each round of rings over nodes (True) and inside a node (False).
    regions: rows of the blocks of each round, likewise.
    """

    messages: Mapping[TransferGroup, Messages]
    local: Sequence[Task]
    gathered: Mapping[TransferGroup, Sequence[Task]]
    rounds: Mapping[bool, Mapping[int, Sequence[Task]]]
    regions: Mapping[bool, Mapping[int, Rows]]

    @property
    def last_round(self) -> int:
        """The last round of a ring in which the rank takes part; gradients arrive one round later."""
        late = {"ring": 0, "ring return": 1}
        return max((group.round - late[group.kind] for group in self.messages if group.kind in late), default=0)

    def start(self, kind: Kind, inter: bool, turn: int = 0) -> list[ProgramStep]:
        """The step that starts a transfer group, if the rank takes part in it."""
        group = TransferGroup(kind, inter, turn)
        return [Start(group)] if group in self.messages else []

    def wait(self, kind: Kind, inter: bool, turn: int = 0) -> list[ProgramStep]:
        """The step that waits for a transfer group, if the rank takes part in it."""
        group = TransferGroup(kind, inter, turn)
        return [Wait(group)] if group in self.messages else []

    def turns(self) -> list[tuple[int, bool]]:
        """(turn, inter) of gathered keys and of their gradients, in the order of tasks: keys from inside the node
        arrive sooner. A rank that only relays may take part in one direction alone: gradients are wider than keys and
        may be routed differently."""
        last = max((s.round for s in self.messages if s.kind in ("gather", "return")), default=-1)
        return [(turn, inter) for turn in range(last + 1) for inter in (False, True)]

    def first_transfers(self) -> list[ProgramStep]:
        """Transfers that depend on nothing, the slowest first; two turns of gathering, since more would share links
        with the turn that is waited for."""
        steps: list[ProgramStep] = []
        for turn in (0, 1):
            for inter in (True, False):
                steps += self.start("gather", inter, turn)
        for inter in (True, False):
            steps += self.start("ring", inter, 1)
        return steps

    def gather(self, turn: int, inter: bool) -> list[ProgramStep]:
        """Wait for the keys of a turn, start the turn after the next, and compute with those that have arrived."""
        steps = self.wait("gather", inter, turn) + self.start("gather", inter, turn + 2)
        return [*steps, compute(self.gathered.get(TransferGroup("gather", inter, turn), ()))]


def forward_steps(work: Work) -> tuple[ProgramStep, ...]:
    """Steps for sequences over nodes, then inside the node, then local ones."""
    last = work.last_round
    local = _shares(work.local, max(1, last))
    steps = work.first_transfers()
    for inter in (True, False):
        steps.append(compute(work.rounds[inter].get(0, ())))
    steps.append(compute(local[0]))
    for turn, inter in work.turns():
        steps += work.gather(turn, inter)
    for turn in range(1, last + 1):
        for inter in (True, False):
            steps += work.wait("ring", inter, turn) + work.start("ring", inter, turn + 1)
            steps.append(compute(work.rounds[inter].get(turn, ())))
        if turn < last:
            steps.append(compute(local[turn]))
    return tuple(_without_nothing(steps))


def backward_steps(work: Work) -> tuple[ProgramStep, ...]:
    """Steps for local sequences, then inside the node, then over nodes; gradients return once they are complete."""
    last = work.last_round
    gathers = bool(work.turns())
    local = _shares(work.local, 1 + last + gathers)
    steps = work.first_transfers()
    steps.append(compute(local[0]))
    for inter in (False, True):
        steps.append(compute(work.rounds[inter].get(0, ())))
    returns: list[ProgramStep] = []
    for turn, inter in work.turns():  # after it, the gradients of its keys are complete
        steps += work.gather(turn, inter) + work.start("return", inter, turn)
        returns += work.wait("return", inter, turn)
    for turn in range(1, last + 2):
        if turn <= last:
            steps.append(compute(local[turn]))
        for inter in (False, True):
            steps += work.wait("ring", inter, turn) + work.start("ring", inter, turn + 1)
            steps.append(compute(work.rounds[inter].get(turn, ()), work.regions[inter].get(turn)))
            steps += work.wait("ring return", inter, turn) + work.start("ring return", inter, turn + 1)
    if gathers:
        steps.append(compute(local[-1]))
    steps += returns
    return tuple(_without_nothing(steps))


def _shares(tasks: Sequence[Task], parts: int) -> list[list[Task]]:
    """Tasks in order, cut into `parts` of about equal area."""
    total, done = sum(task.area for task in tasks), 0
    found: list[list[Task]] = [[] for _ in range(parts)]
    for task in tasks:
        found[min(parts - 1, (done + task.area // 2) * parts // total)].append(task)
        done += task.area
    return found


def _without_nothing(steps: Iterable[ProgramStep]) -> Iterable[ProgramStep]:
    return (step for step in steps if not isinstance(step, Compute) or step.tasks or step.clear)
