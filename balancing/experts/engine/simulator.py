"""Simulator of `ReplicaSlots`: the order of compute and replica transfers in one iteration, from the time each takes.

Pro-Prophet (arXiv 2411.10003, section V, Algorithm 2) overlaps transfers with compute that does not depend on them:
while a block computes, the next block's replicas receive weights (Trans), and while a block runs backward, the
gradients of the block that ran backward before it return to their homes (Agg). A transfer is split where it outlasts
the compute that it overlaps; the rest overlaps the following compute. What no compute is left for is exposed. The
placement for the next iteration is computed during an all-to-all.

`_SlotSimulator` repeats the decisions of `balancing.experts.engine.slots.ReplicaSlots` (which transfer starts when, and
who waits for it) on durations instead of tensors; `tests/experts/test_transfer.py` executes the real slots in the
simulated order and compares when transfers start. Weights of the first block leave when the step begins, those of the
next block when a block's experts begin; experts wait for their own. Gradients leave when a block's experts have run
backward; the last compute that may hide them is the expert backward of the next block (shared slots) or of the block
after it (resident slots). Transfers run one after another here; on a network they share the links.

Operations have the paper's names. For block i, FNEC_i and FEC_i are non-expert and expert compute forward, BNEC_i and
BEC_i backward, and A2A_i the token exchanges around the experts. Reduce_i is the point from which the home gradients
may be reduced over data-parallel ranks. At Step, weights are final.

Slots have two modes. Resident slots are separate for each layer and are filled and emptied once an iteration, whatever
the number of micro-batches. Shared slots are two buffers for all layers of a model chunk: one is used while the other
is filled, so every pass through a layer needs a transfer unless a buffer still holds that layer.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

__all__ = ["BlockSeconds", "ScheduleEntry", "exposed_seconds", "render_schedule", "simulate_iteration"]

Kind = Literal["Step", "Plan", "Trans", "Agg", "FNEC", "A2A", "FEC", "BEC", "BNEC", "Reduce"]
Mode = Literal["resident", "shared"]


@dataclass(frozen=True)
class BlockSeconds:
    """Durations in seconds of one block: an MoE layer, the attention before it, and the dense layers in between.

    non_expert: forward compute outside the experts.
    expert: forward compute of the experts.
    trans: transfer of the weights of all of the block's replicas.
    agg: transfer of the gradients of all of the block's replicas.
    all_to_all: one exchange of tokens; a forward or a backward pass has two.
    non_expert_backward: backward compute outside the experts; twice `non_expert` by default.
    expert_backward: backward compute of the experts; twice `expert` by default.
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


class ScheduleEntry(NamedTuple):
    """One operation of a schedule. Entries are in the order in which a rank starts them.

    kind: the operation, as the paper names it.
    block: the block's number; -1 for Step.
    micro_batch: the micro-batch's number; -1 for Step and Reduce.
    seconds: duration of the operation, or of this part of a transfer.
    under: index of the compute entry, later in the schedule, that starts together with this transfer and hides it; None
        for compute and for an exposed transfer.
    start, stop: which part of the transfer this is, 0 to 1.
    buffer: the buffer that weights go to with shared slots, 2 c or 2 c + 1 in chunk c; None otherwise.

    A block's Trans is complete before its next FEC or BEC.
    """

    kind: Kind
    block: int = -1
    micro_batch: int = -1
    seconds: float = 0.0
    under: int | None = None
    start: float = 0.0
    stop: float = 1.0
    buffer: int | None = None


class _BlockPass(NamedTuple):
    """One pass of a micro-batch through a block, which is number `position` in its chunk."""

    forward: bool
    chunk: int
    position: int
    block: int
    micro_batch: int


@dataclass(eq=False)
class _Transfer:
    """operation: the whole transfer; its `start` is the part that is done."""

    operation: ScheduleEntry


def simulate_iteration(
    blocks: Sequence[BlockSeconds],
    *,
    mode: Mode,
    micro_batches: int = 1,
    passes: Iterable[tuple[str, int, int]] | None = None,
    chunks: Sequence[Sequence[int]] | None = None,
    overlap: bool = True,
) -> tuple[ScheduleEntry, ...]:
    """Simulate one iteration on one rank; returns its operations in order.

    blocks: durations of the rank's blocks, in model order, at least one.
    mode: "resident" or "shared" slots.
    micro_batches: number of micro-batches; each runs forward and then backward unless `passes` is given.
    passes: ("forward" or "backward", chunk, micro-batch) in order, as `balancing.layers.operations` gives for one rank.
    chunks: numbers of the blocks of each model chunk; by default one chunk with all blocks.
    overlap: False leaves every transfer exposed.

    Raises ValueError for no blocks, an unknown mode, and passes with an unknown chunk or kind.
    """
    if not blocks or micro_batches < 1:
        raise ValueError(f"{len(blocks)} blocks and {micro_batches} micro-batches: a schedule needs at least 1 of each")
    if mode not in ("resident", "shared"):
        raise ValueError(f"mode={mode!r} is not one of resident, shared")
    chunks = [range(len(blocks))] if chunks is None else chunks
    if passes is None:
        passes = [(kind, 0, batch) for batch in range(micro_batches) for kind in ("forward", "backward")]
    block_passes = _block_passes(passes, chunks)
    last_forward = {block_pass.block: at for at, block_pass in enumerate(block_passes) if block_pass.forward}
    last_backward = {block_pass.block: at for at, block_pass in enumerate(block_passes) if not block_pass.forward}
    simulator = _SlotSimulator(blocks, chunks, mode == "shared", overlap)
    simulator.begin_step()
    for at, block_pass in enumerate(block_passes):
        if block_pass.forward:
            simulator.compute("FNEC", block_pass)
            simulator.exchange(block_pass, plans=last_forward[block_pass.block] == at)
            simulator.acquire(block_pass)
            simulator.compute("FEC", block_pass)
            simulator.exchange(block_pass)
        else:
            simulator.exchange(block_pass)
            simulator.acquire(block_pass)
            simulator.compute("BEC", block_pass)
            simulator.accumulate_gradients(block_pass, is_last=last_backward[block_pass.block] == at)
            simulator.end_pass(block_pass, is_last=last_backward[block_pass.block] == at)
            simulator.exchange(block_pass)
            simulator.compute("BNEC", block_pass)
    simulator.end_step()
    return tuple(simulator.schedule)


@dataclass
class _SlotSimulator:
    """Records what `ReplicaSlots` would do: methods of its names make the same decisions, on durations."""

    blocks: Sequence[BlockSeconds]
    chunks: Sequence[Sequence[int]]
    shared: bool
    overlap: bool
    schedule: list[ScheduleEntry] = field(default_factory=list)
    under_way: list[_Transfer] = field(default_factory=list)  # in the order in which they were started
    # By chunk: transfers of gradients that were not waited for, by block; and the latest backward passes, each with
    # whether it was its block's last.
    reducing: defaultdict[int, dict[int, _Transfer]] = field(default_factory=lambda: defaultdict(dict))
    passed: defaultdict[int, list[tuple[_BlockPass, bool]]] = field(default_factory=lambda: defaultdict(list))
    # (chunk, buffer) -> the block whose weights it holds or is being filled with.
    holds: dict[tuple[int, int], int] = field(default_factory=dict)

    def begin_step(self) -> None:
        self.schedule.append(ScheduleEntry("Step"))
        for chunk in range(len(self.chunks)):
            self._prefetch_next(chunk, range(len(self.chunks[chunk])), 0)

    def compute(self, kind: Kind, block_pass: _BlockPass) -> None:
        """Append a compute operation, and before it the transfers that it hides, as far as they fit."""
        seconds = left = self.blocks[block_pass.block].compute(kind)
        parts = []
        while self.overlap and left > 0 and self.under_way:
            transfer = self.under_way[0]
            part = self._part(transfer, left)
            parts.append(part)
            left -= part.seconds
        at = len(self.schedule) + len(parts)
        self.schedule += [part._replace(under=at) for part in parts]
        self.schedule.append(ScheduleEntry(kind, block_pass.block, block_pass.micro_batch, seconds))

    def exchange(self, block_pass: _BlockPass, plans: bool = False) -> None:
        if plans:
            self.schedule.append(
                ScheduleEntry("Plan", block_pass.block, block_pass.micro_batch, under=len(self.schedule) + 1)
            )
        seconds = self.blocks[block_pass.block].all_to_all
        self.schedule.append(ScheduleEntry("A2A", block_pass.block, block_pass.micro_batch, seconds))

    def acquire(self, block_pass: _BlockPass) -> None:
        """Wait for the weights of this block's replicas and start the transfer of the next block's."""
        self._prefetch(block_pass.chunk, block_pass.position, block_pass.micro_batch)
        for transfer in [each for each in self.under_way if each.operation[:2] == ("Trans", block_pass.block)]:
            self._wait(transfer)
        if self.blocks[block_pass.block].trans > 0:
            end = len(self.chunks[block_pass.chunk])
            others = (
                range(block_pass.position + 1, end) if block_pass.forward else range(block_pass.position - 1, -1, -1)
            )
            self._prefetch_next(block_pass.chunk, others, block_pass.micro_batch, used=block_pass.position)

    def accumulate_gradients(self, block_pass: _BlockPass, is_last: bool) -> None:
        """After the experts' backward pass: start sending gradients; with resident slots after the last micro-batch."""
        seconds = self.blocks[block_pass.block].agg
        if seconds == 0:
            return
        if self.shared:
            for block in list(self.reducing[block_pass.chunk]):
                self._finish_reduction(block_pass.chunk, block)
        if self.shared or is_last:
            transfer = _Transfer(ScheduleEntry("Agg", block_pass.block, block_pass.micro_batch, seconds))
            self.reducing[block_pass.chunk][block_pass.block] = transfer
            self.under_way.append(transfer)

    def end_pass(self, block_pass: _BlockPass, is_last: bool) -> None:
        """Wait for the gradients of the block before the last two; after its last micro-batch they may be reduced."""
        self.passed[block_pass.chunk].append((block_pass, is_last))
        self._finish(block_pass.chunk, but=2)

    def end_step(self) -> None:
        for chunk in range(len(self.chunks)):
            self._finish(chunk, but=0)
        self.schedule.append(ScheduleEntry("Step"))

    def _finish(self, chunk: int, but: int) -> None:
        while len(self.passed[chunk]) > but:
            block_pass, is_last = self.passed[chunk].pop(0)
            self._finish_reduction(chunk, block_pass.block)
            if is_last:
                self.schedule.append(ScheduleEntry("Reduce", block_pass.block))

    def _finish_reduction(self, chunk: int, block: int) -> None:
        if (transfer := self.reducing[chunk].pop(block, None)) is not None:
            self._wait(transfer)

    def _prefetch_next(self, chunk: int, positions: range, micro_batch: int, used: int | None = None) -> None:
        """Start the transfer of the first of `positions` with replicas, unless position `used` occupies its buffer."""
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
        whole = ScheduleEntry("Trans", block, micro_batch, self.blocks[block].trans, buffer=buffer)
        self.under_way.append(_Transfer(whole))

    def _wait(self, transfer: _Transfer) -> None:
        """Append what is left of a transfer, exposed."""
        if transfer in self.under_way:
            self.schedule.append(self._part(transfer, float("inf")))

    def _part(self, transfer: _Transfer, seconds: float) -> ScheduleEntry:
        """The next part of a transfer, of at most `seconds`; removes a transfer that is then complete."""
        whole = transfer.operation
        left = (1 - whole.start) * whole.seconds
        if left <= seconds:
            self.under_way.remove(transfer)
            return whole._replace(seconds=left)
        stop = whole.start + seconds / whole.seconds
        transfer.operation = whole._replace(start=stop)
        return whole._replace(seconds=seconds, stop=stop)


def _block_passes(passes: Iterable[tuple[str, int, int]], chunks: Sequence[Sequence[int]]) -> list[_BlockPass]:
    block_passes = []
    for kind, chunk, micro_batch in passes:
        if kind not in ("forward", "backward") or not 0 <= chunk < len(chunks):
            raise ValueError(f"pass {(kind, chunk, micro_batch)} is not a forward or backward of {len(chunks)} chunks")
        blocks = list(enumerate(chunks[chunk]))
        for position, block in blocks if kind == "forward" else reversed(blocks):
            block_passes.append(_BlockPass(kind == "forward", chunk, position, block, micro_batch))
    return block_passes


def exposed_seconds(schedule: Iterable[ScheduleEntry]) -> float:
    """Seconds of transfers that no compute hides."""
    return sum(step.seconds for step in schedule if step.kind in ("Trans", "Agg") and step.under is None)


def render_schedule(schedule: Sequence[ScheduleEntry]) -> str:
    """The schedule as text: one line for each compute operation, with the transfers that it hides."""
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


def _transfer(step: ScheduleEntry) -> str:
    if step.kind == "Plan":
        return f"Plan {step.block} of the next iteration"
    part = "" if step.start == 0 and step.stop == 1 else f" {step.start:.0%} to {step.stop:.0%}"
    buffer = "" if step.buffer is None else f" into buffer {step.buffer}"
    return f"{step.kind} {step.block} mb {step.micro_batch}{part}{buffer} ({step.seconds * 1e3:.3f} ms)"
