"""In which order a training step computes, sends replicas their weights and brings their gradients home.

Pro-Prophet (arXiv 2411.10003, section V, Algorithm 2) hides transfers under compute that does not need them: while a
block computes, the next block's replicas receive weights (Trans), and while a block runs backward, the gradients of the
block before it in that direction go home (Agg). A transfer is cut in two: one part as long as the block's non-expert
compute, the rest under its expert compute. What does not fit sticks out in the paper; here weights may still come under
the attention of the block that needs them. The plan of the next iteration is made under an all-to-all.

Operations have the paper's names. Of block i: FNEC_i, FEC_i are non-expert and expert compute forward, BNEC_i, BEC_i
backward, A2A_i the exchanges of tokens around expert compute. Reduce_i is when the data-parallel reduction of the home
gradients may start, and Step when weights are final.

Two modes. With resident slots every layer has its own, filled once and emptied once an iteration, whatever the number
of micro-batches. With shared slots two buffers serve all layers in turn: one is in use while the other is filled, so
every pass through a layer needs a transfer, unless a buffer happens to hold that layer still.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
    weights, with shared slots. A block's Trans must be complete before its next FEC or BEC.
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
    """One pass of a micro-batch through a block."""

    forward: bool
    block: int
    micro_batch: int

    @property
    def order(self) -> tuple[Kind, ...]:
        return ("FNEC", "A2A", "FEC", "A2A") if self.forward else ("A2A", "BEC", "A2A", "BNEC")

    @property
    def use(self) -> int:
        """Where in the order the experts' weights are needed."""
        return self.order.index("FEC" if self.forward else "BEC")


class _Part(NamedTuple):
    """A part of a transfer, and the place of the compute that hides it in its visit; None if it is exposed."""

    operation: Operation
    place: int | None


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
    needs = _resident(visits) if mode == "resident" else _shared(visits)
    last_forward = {visit.block: at for at, visit in enumerate(visits) if visit.forward}
    last_backward = {visit.block: at for at, visit in enumerate(visits) if not visit.forward}
    comes_home = [
        not visit.forward and (mode == "shared" or last_backward[visit.block] == at) for at, visit in enumerate(visits)
    ]
    schedule = [Operation("Step")]
    waiting: list[int] = []  # blocks whose gradients are home after this visit
    arrived = 0.0  # the part of the weights that this visit needs which came during the one before
    for at, visit in enumerate(visits):
        room = _Room(blocks[visit.block], visit, overlap)
        parts: list[_Part] = []
        trans = blocks[visit.block].trans
        if needs[at] is not None and arrived < 1:
            parts, done = room.cut(_transfer_of("Trans", visit, needs[at], mode), trans, start=arrived, before_use=True)
            parts += room.rest(_transfer_of("Trans", visit, needs[at], mode), trans, start=done)
        following, arrived = (visits[at + 1], 0.0) if at + 1 < len(visits) else (None, 1.0)
        if following and needs[at + 1] is not None:
            incoming = _transfer_of("Trans", following, needs[at + 1], mode)
            early, arrived = room.cut(incoming, blocks[following.block].trans)
            parts += early
        if at and comes_home[at - 1]:
            outgoing, seconds = _transfer_of("Agg", visits[at - 1], None, mode), blocks[visits[at - 1].block].agg
            early, done = room.cut(outgoing, seconds)
            parts += early + room.rest(outgoing, seconds, start=done)
        _append(schedule, parts, visit, blocks[visit.block], plan=last_forward.get(visit.block) == at)
        schedule += [Operation("Reduce", block) for block in waiting]
        waiting = [visit.block] if last_backward.get(visit.block) == at else []
    if visits and comes_home[-1] and blocks[visits[-1].block].agg > 0:
        final = visits[-1]
        schedule.append(Operation("Agg", final.block, final.micro_batch, blocks[final.block].agg))
    schedule += [Operation("Reduce", block) for block in waiting]
    return (*schedule, Operation("Step"))


class _Room:
    """How much of a visit's compute still has no transfer under it."""

    def __init__(self, block: BlockSeconds, visit: _Visit, overlap: bool) -> None:
        self._visit = visit
        self._left = {kind: block.compute(kind) for kind in visit.order if kind != "A2A"} if overlap else {}

    def cut(
        self, transfer: Operation, seconds: float, *, start: float = 0.0, before_use: bool = False
    ) -> tuple[list[_Part], float]:
        """Parts that fit, and how far (0 to 1) they bring a transfer of which the part from `start` on is left.

        Non-expert compute is filled first, expert compute next. before_use: only the compute before the visit's experts
        counts, which need the transfer.
        """
        order, left, cuts = self._visit.order, (1 - start) * seconds, []
        for kind in ("FNEC", "BNEC", "FEC", "BEC"):
            fits = min(self._left.get(kind, 0.0), left)
            if fits > 0 and not (before_use and order.index(kind) >= self._visit.use):
                cuts.append((order.index(kind), fits))
                self._left[kind] -= fits
                left -= fits
        parts = []
        for place, length in sorted(cuts):  # what runs first is the first part
            stop = start + length / seconds
            parts.append(_Part(transfer._replace(seconds=length, start=start, stop=stop), place))
            start = stop
        if left == 0:
            start = 1.0
            parts[-1:] = [_Part(part.operation._replace(stop=1.0), part.place) for part in parts[-1:]]
        return parts, start

    def rest(self, transfer: Operation, seconds: float, *, start: float) -> list[_Part]:
        """What is left from `start` on, for which everything waits."""
        return [_Part(transfer._replace(seconds=(1 - start) * seconds, start=start), None)] if start < 1 else []


def _transfer_of(kind: Kind, visit: _Visit, buffer: int | None, mode: Mode) -> Operation:
    return Operation(kind, visit.block, visit.micro_batch, buffer=buffer if mode == "shared" else None)


def _append(schedule: list[Operation], parts: list[_Part], visit: _Visit, block: BlockSeconds, *, plan: bool) -> None:
    """The operations of one visit: each compute with the transfers under it just before it."""
    exposed = [part.operation for part in parts if part.place is None]
    for place, kind in enumerate(visit.order):
        if place == visit.use:
            schedule += [transfer for transfer in exposed if transfer.kind == "Trans"]
        under = [part.operation for part in parts if part.place == place]
        if plan and place == 1:
            under.append(Operation("Plan", visit.block, visit.micro_batch))
        at = len(schedule) + len(under)
        schedule += [operation._replace(under=at) for operation in under]
        schedule.append(Operation(kind, visit.block, visit.micro_batch, block.compute(kind)))
    schedule += [transfer for transfer in exposed if transfer.kind == "Agg"]


def _visits(passes: Iterable[tuple[str, int, int]], chunks: Sequence[Sequence[int]]) -> list[_Visit]:
    visits = []
    for kind, chunk, micro_batch in passes:
        if kind not in ("forward", "backward") or not 0 <= chunk < len(chunks):
            raise ValueError(f"pass {(kind, chunk, micro_batch)} is not a forward or backward of {len(chunks)} chunks")
        order = chunks[chunk] if kind == "forward" else reversed(chunks[chunk])
        visits += [_Visit(kind == "forward", block, micro_batch) for block in order]
    return visits


def _resident(visits: list[_Visit]) -> list[int | None]:
    """Which visits need a transfer first (a buffer, here the block's own) and which do not (None)."""
    seen: set[int] = set()
    first: list[int | None] = []
    for visit in visits:
        first.append(None if visit.block in seen else visit.block)
        seen.add(visit.block)
    return first


def _shared(visits: list[_Visit]) -> list[int | None]:
    """Which of two buffers is filled for each visit, None where one still holds the block.

    The buffer to fill is the one that the visit before, during which it is filled, does not use.
    """
    holds: list[int | None] = [None, None]
    used = 1
    into: list[int | None] = []
    for visit in visits:
        if visit.block in holds:
            into.append(None)
        else:
            holds[1 - used] = visit.block
            into.append(1 - used)
        used = holds.index(visit.block)
    return into


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
