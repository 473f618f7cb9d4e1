"""In which order a training step computes, sends replicas their weights and brings their gradients home.

Pro-Prophet (arXiv 2411.10003, section V, Algorithm 2) hides transfers under compute that does not need them: while a
block computes, the next block's replicas receive weights (Trans), and while a block runs backward, the gradients of the
block before it in that direction go home (Agg). A transfer is cut into sub-operations: what fits under one compute, and
what is left under the next ones. What fits nowhere sticks out. The plan of the next iteration is made under an
all-to-all.

This is the schedule that `balancing.experts.engine.slots` carries out, given what everything takes. Weights of the
first block set out when the step begins, those of the next one when a block's experts begin, and are waited for before
its own. Gradients set out when a block's experts have run backward; the next block's experts, or with resident slots
those after it, are the last to hide them. Transfers go one after the other here; on a network they share it.

Operations have the paper's names. Of block i: FNEC_i, FEC_i are non-expert and expert compute forward, BNEC_i, BEC_i
backward, A2A_i the exchanges of tokens around expert compute. Reduce_i is when the data-parallel reduction of the home
gradients may start, and Step when weights are final.

Two modes. With resident slots every layer has its own, filled once and emptied once an iteration, whatever the number
of micro-batches. With shared slots two buffers serve all layers of a model chunk in turn: one is in use while the other
is filled, so every pass through a layer needs a transfer, unless a buffer happens to hold that layer still.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

__all__ = ["BlockSeconds", "Operation", "exposed_seconds", "iteration_schedule", "render"]

Kind = Literal["Step", "Plan", "Trans", "Agg", "FNEC", "A2A", "FEC", "BEC", "BNEC", "Reduce"]
Mode = Literal["resident", "shared"]


@dataclass(frozen=True)
class BlockSeconds:
    """What one block takes, in seconds: a layer of experts and the attention before it (and dense layers in between).

    non_expert, expert: forward compute. all_to_all: one exchange of tokens. trans, agg: all transfers of its replicas.
    non_expert_backward, expert_backward: twice the forward by default.
    """

    non_expert: float
    expert: float
    trans: float
    agg: float
    all_to_all: float = 0.0
    non_expert_backward: float | None = None
    expert_backward: float | None = None

    def compute(self, kind: Kind) -> float:
        """Seconds of a compute operation."""
        forward = {"FNEC": self.non_expert, "FEC": self.expert, "A2A": self.all_to_all}
        if kind in forward:
            return forward[kind]
        given, other = {
            "BNEC": (self.non_expert_backward, self.non_expert),
            "BEC": (self.expert_backward, self.expert),
        }[kind]
        return 2 * other if given is None else given


class Operation(NamedTuple):
    """One operation, in the order in which a rank starts them.

    under: index of the compute operation, later in the schedule, that starts with this transfer and hides it; None for
    compute, and for a transfer that everything waits for. start, stop: the part of a transfer, 0 to 1. buffer: of
    weights, with shared slots; those of chunk c are 2 c and 2 c + 1. A block's Trans must be complete before its next
    FEC or BEC.
    """

    kind: Kind
    block: int = -1
    micro_batch: int = -1
    seconds: float = 0.0
    under: int | None = None
    start: float = 0.0
    stop: float = 1.0
    buffer: int | None = None


class _Visit(NamedTuple):
    """One pass of a micro-batch through a block, the `position`th of its chunk."""

    forward: bool
    chunk: int
    position: int
    block: int
    micro_batch: int


@dataclass(eq=False)
class _Transfer:
    """operation: the whole transfer, with the part that is done as its `start`."""

    operation: Operation


def iteration_schedule(
    blocks: Sequence[BlockSeconds],
    *,
    mode: Mode,
    micro_batches: int = 1,
    passes: Iterable[tuple[str, int, int]] | None = None,
    chunks: Sequence[Sequence[int]] | None = None,
    overlap: bool = True,
) -> tuple[Operation, ...]:
    """The order of operations of one iteration on one rank.

    blocks: those of the rank, in the order of the model. mode: "resident" or "shared" slots. micro_batches: each runs
    forward and then backward, unless passes says otherwise. passes: ("forward" or "backward", chunk, micro-batch) in
    order, as `balancing.layers.operations` has them for one rank. chunks: the blocks of each model chunk; one chunk of
    all blocks by default. overlap: False leaves every transfer exposed.

    Raises ValueError for no blocks, an unknown mode, and passes that name chunks or kinds that are not there.
    """
    if not blocks or micro_batches < 1:
        raise ValueError(f"{len(blocks)} blocks and {micro_batches} micro-batches: a schedule needs at least 1 of each")
    if mode not in ("resident", "shared"):
        raise ValueError(f"mode={mode!r} is not one of resident, shared")
    chunks = [range(len(blocks))] if chunks is None else chunks
    if passes is None:
        passes = [(kind, 0, batch) for batch in range(micro_batches) for kind in ("forward", "backward")]
    visits = _visits(passes, chunks)
    last_forward = {visit.block: at for at, visit in enumerate(visits) if visit.forward}
    last_backward = {visit.block: at for at, visit in enumerate(visits) if not visit.forward}
    rank = _Rank(blocks, chunks, mode == "shared", overlap)
    rank.begin()
    for at, visit in enumerate(visits):
        if visit.forward:
            rank.compute("FNEC", visit)
            rank.exchange(visit, plans=last_forward[visit.block] == at)
            rank.acquire(visit)
            rank.compute("FEC", visit)
            rank.exchange(visit)
        else:
            rank.exchange(visit)
            rank.acquire(visit)
            rank.compute("BEC", visit)
            rank.collect(visit, is_last=last_backward[visit.block] == at)
            rank.end_pass(visit, is_last=last_backward[visit.block] == at)
            rank.exchange(visit)
            rank.compute("BNEC", visit)
    rank.end()
    return tuple(rank.schedule)


@dataclass
class _Rank:
    """Carries operations out in the order of `balancing.experts.engine.slots.ReplicaSlots`, and writes them down."""

    blocks: Sequence[BlockSeconds]
    chunks: Sequence[Sequence[int]]
    shared: bool
    overlap: bool
    schedule: list[Operation] = field(default_factory=list)
    under_way: list[_Transfer] = field(default_factory=list)  # in the order in which they were started
    # Of each chunk: gradients that nobody has waited for, by block; the last visits that ran backward, and whether each
    # was its block's last.
    reducing: defaultdict[int, dict[int, _Transfer]] = field(default_factory=lambda: defaultdict(dict))
    passed: defaultdict[int, list[tuple[_Visit, bool]]] = field(default_factory=lambda: defaultdict(list))
    # The block whose weights are in, or on the way into, each buffer of each chunk.
    holds: dict[tuple[int, int], int] = field(default_factory=dict)

    def begin(self) -> None:
        self.schedule.append(Operation("Step"))
        for chunk in range(len(self.chunks)):
            self._prefetch_next(chunk, range(len(self.chunks[chunk])), 0)

    def compute(self, kind: Kind, visit: _Visit) -> None:
        """Compute, with as much of the transfers under it as fits."""
        seconds = left = self.blocks[visit.block].compute(kind)
        parts = []
        while self.overlap and left > 0 and self.under_way:
            transfer = self.under_way[0]
            part = self._part(transfer, left)
            parts.append(part)
            left -= part.seconds
        at = len(self.schedule) + len(parts)
        self.schedule += [part._replace(under=at) for part in parts]
        self.schedule.append(Operation(kind, visit.block, visit.micro_batch, seconds))

    def exchange(self, visit: _Visit, plans: bool = False) -> None:
        if plans:
            self.schedule.append(Operation("Plan", visit.block, visit.micro_batch, under=len(self.schedule) + 1))
        seconds = self.blocks[visit.block].all_to_all
        self.schedule.append(Operation("A2A", visit.block, visit.micro_batch, seconds))

    def acquire(self, visit: _Visit) -> None:
        """Wait for the weights of this block's replicas, and start bringing the next block's."""
        self._prefetch(visit.chunk, visit.position, visit.micro_batch)
        for transfer in [each for each in self.under_way if each.operation[:2] == ("Trans", visit.block)]:
            self._wait(transfer)
        if self.blocks[visit.block].trans > 0:
            end = len(self.chunks[visit.chunk])
            others = range(visit.position + 1, end) if visit.forward else range(visit.position - 1, -1, -1)
            self._prefetch_next(visit.chunk, others, visit.micro_batch, used=visit.position)

    def collect(self, visit: _Visit, is_last: bool) -> None:
        """The experts have run backward: their replicas' gradients set out, when all micro-batches are in them."""
        seconds = self.blocks[visit.block].agg
        if seconds == 0:
            return
        if self.shared:
            for block in list(self.reducing[visit.chunk]):
                self._bring_home(visit.chunk, block)
        if self.shared or is_last:
            transfer = _Transfer(Operation("Agg", visit.block, visit.micro_batch, seconds))
            self.reducing[visit.chunk][visit.block] = transfer
            self.under_way.append(transfer)

    def end_pass(self, visit: _Visit, is_last: bool) -> None:
        """Gradients of the block before the last two are home; after its last micro-batch they are reduced."""
        self.passed[visit.chunk].append((visit, is_last))
        self._finish(visit.chunk, but=2)

    def end(self) -> None:
        for chunk in range(len(self.chunks)):
            self._finish(chunk, but=0)
        self.schedule.append(Operation("Step"))

    def _finish(self, chunk: int, but: int) -> None:
        while len(self.passed[chunk]) > but:
            visit, is_last = self.passed[chunk].pop(0)
            self._bring_home(chunk, visit.block)
            if is_last:
                self.schedule.append(Operation("Reduce", visit.block))

    def _bring_home(self, chunk: int, block: int) -> None:
        if (transfer := self.reducing[chunk].pop(block, None)) is not None:
            self._wait(transfer)

    def _prefetch_next(self, chunk: int, positions: range, micro_batch: int, used: int | None = None) -> None:
        """Start with the first of `positions` that has replicas, unless its buffer is that of the position `used`."""
        following = next((each for each in positions if self.blocks[self.chunks[chunk][each]].trans > 0), None)
        if following is not None and not (self.shared and used is not None and (following - used) % 2 == 0):
            self._prefetch(chunk, following, micro_batch)

    def _prefetch(self, chunk: int, position: int, micro_batch: int) -> None:
        block = self.chunks[chunk][position]
        place = position % 2 if self.shared else position
        if self.blocks[block].trans == 0 or self.holds.get((chunk, place)) == block:
            return
        self.holds[chunk, place] = block
        buffer = 2 * chunk + place if self.shared else None
        whole = Operation("Trans", block, micro_batch, self.blocks[block].trans, buffer=buffer)
        self.under_way.append(_Transfer(whole))

    def _wait(self, transfer: _Transfer) -> None:
        """Do what is left of a transfer while everything waits."""
        if transfer in self.under_way:
            self.schedule.append(self._part(transfer, float("inf")))

    def _part(self, transfer: _Transfer, seconds: float) -> Operation:
        """The next part of a transfer, of so many seconds at most. One that is complete is not under way any more."""
        whole = transfer.operation
        left = (1 - whole.start) * whole.seconds
        if left <= seconds:
            self.under_way.remove(transfer)
            return whole._replace(seconds=left)
        stop = whole.start + seconds / whole.seconds
        transfer.operation = whole._replace(start=stop)
        return whole._replace(seconds=seconds, stop=stop)


def _visits(passes: Iterable[tuple[str, int, int]], chunks: Sequence[Sequence[int]]) -> list[_Visit]:
    visits = []
    for kind, chunk, micro_batch in passes:
        if kind not in ("forward", "backward") or not 0 <= chunk < len(chunks):
            raise ValueError(f"pass {(kind, chunk, micro_batch)} is not a forward or backward of {len(chunks)} chunks")
        blocks = list(enumerate(chunks[chunk]))
        for position, block in blocks if kind == "forward" else reversed(blocks):
            visits.append(_Visit(kind == "forward", chunk, position, block, micro_batch))
    return visits


def exposed_seconds(schedule: Iterable[Operation]) -> float:
    """Seconds of transfers that nothing hides."""
    return sum(step.seconds for step in schedule if step.kind in ("Trans", "Agg") and step.under is None)


def render(schedule: Sequence[Operation]) -> str:
    """The schedule as text: a line for each compute operation, with what runs under it."""
    under: dict[int, list[str]] = {}
    lines = [f"{'operation':<16}{'ms':>9}  under it"]
    for at, step in enumerate(schedule):
        if step.under is not None:
            under.setdefault(step.under, []).append(_transfer(step))
            continue
        if step.kind in ("Trans", "Agg"):
            lines.append(f"{'(wait)':<16}{step.seconds * 1e3:>9.3f}  {_transfer(step)}")
        elif step.block < 0 or step.kind == "Reduce":
            lines.append(step.kind if step.block < 0 else f"{step.kind} {step.block}")
        else:
            name = f"{step.kind} {step.block} mb {step.micro_batch}"
            lines.append(f"{name:<16}{step.seconds * 1e3:>9.3f}  {', '.join(under.get(at, []))}".rstrip())
    return "\n".join(lines)


def _transfer(step: Operation) -> str:
    if step.kind == "Plan":
        return f"Plan {step.block} of the next iteration"
    part = "" if step.start == 0 and step.stop == 1 else f" {step.start:.0%} to {step.stop:.0%}"
    buffer = "" if step.buffer is None else f" into buffer {step.buffer}"
    return f"{step.kind} {step.block} mb {step.micro_batch}{part}{buffer} ({step.seconds * 1e3:.3f} ms)"
