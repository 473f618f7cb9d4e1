"""In which order a rank starts transfers, waits for them and computes.

The forward pass serves sequences over several nodes first, then those inside the node, then local ones, because the
slowest transfer should start first (Zeppelin, arXiv 2509.21841, section 4.2). Local tasks fill the time in which rounds
are under way, a share each, so that no rank holds up the round. The backward pass goes the other way round.

All ranks start stages in one order: what a rank waits for was started before anything that others start after waiting,
so no circle of ranks waits for itself, and a communicator that runs transfers in the order of their start does not
stand still.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from balancing.sequences.engine.program import Compute, Exchange, Kind, Rows, Stage, Start, Step, Task, Wait, compute

__all__ = ["Work", "backward_steps", "forward_steps"]


@dataclass(frozen=True)
class Work:
    """What one rank has to do, before it is put in order.

    local: tasks that need no transfer. gathered: tasks that need the prefixes that a stage completes.
    rounds, regions: of rings that span nodes and of others, tasks of each round and the rows in which its blocks lie.
    """

    exchanges: Mapping[Stage, Exchange]
    local: Sequence[Task]
    gathered: Mapping[Stage, Sequence[Task]]
    rounds: Mapping[bool, Mapping[int, Sequence[Task]]]
    regions: Mapping[bool, Mapping[int, Rows]]

    @property
    def last_round(self) -> int:
        """The last round of a ring in which the rank takes part; gradients come one round later."""
        late = {"ring": 0, "ring return": 1}
        return max((stage.round - late[stage.kind] for stage in self.exchanges if stage.kind in late), default=0)

    def start(self, kind: Kind, inter: bool, turn: int = 0) -> list[Step]:
        """The step that starts a stage, if the rank takes part in it."""
        stage = Stage(kind, inter, turn)
        return [Start(stage)] if stage in self.exchanges else []

    def wait(self, kind: Kind, inter: bool, turn: int = 0) -> list[Step]:
        """The step that waits for a stage, if the rank takes part in it."""
        stage = Stage(kind, inter, turn)
        return [Wait(stage)] if stage in self.exchanges else []

    def turns(self) -> list[tuple[int, bool]]:
        """The turns in which prefixes come or their gradients go, with inter, in the order of tasks: what comes from
        inside the node comes sooner. A rank that only hands on may have a part in one of the two directions: gradients
        are wider than keys, so they may go another way."""
        last = max((s.round for s in self.exchanges if s.kind in ("gather", "return")), default=-1)
        return [(turn, inter) for turn in range(last + 1) for inter in (False, True)]

    def first_transfers(self) -> list[Step]:
        """Those that depend on nothing, the slowest first. Of prefixes two turns: more under way at once would share
        links with the turn that is waited for."""
        steps: list[Step] = []
        for turn in (0, 1):
            for inter in (True, False):
                steps += self.start("gather", inter, turn)
        for inter in (True, False):
            steps += self.start("ring", inter, 1)
        return steps

    def gather(self, turn: int, inter: bool) -> list[Step]:
        """Wait for prefixes, have the turn after the next one start, and compute with what has come."""
        steps = self.wait("gather", inter, turn) + self.start("gather", inter, turn + 2)
        return [*steps, compute(self.gathered.get(Stage("gather", inter, turn), ()))]


def forward_steps(work: Work) -> tuple[Step, ...]:
    """Sequences over nodes, then inside the node, then local ones."""
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


def backward_steps(work: Work) -> tuple[Step, ...]:
    """Local sequences, then inside the node, then over nodes; gradients go home as soon as they are there."""
    last = work.last_round
    gathers = bool(work.turns())
    local = _shares(work.local, 1 + last + gathers)
    steps = work.first_transfers()
    steps.append(compute(local[0]))
    for inter in (False, True):
        steps.append(compute(work.rounds[inter].get(0, ())))
    returns: list[Step] = []
    for turn, inter in work.turns():  # all queries meet its keys, whose gradients are complete then
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
    """Tasks in their order, cut into `parts` of about equal area."""
    total, done = sum(task.area for task in tasks), 0
    found: list[list[Task]] = [[] for _ in range(parts)]
    for task in tasks:
        found[min(parts - 1, (done + task.area // 2) * parts // total)].append(task)
        done += task.area
    return found


def _without_nothing(steps: Iterable[Step]) -> Iterable[Step]:
    return (step for step in steps if not isinstance(step, Compute) or step.tasks or step.clear)
