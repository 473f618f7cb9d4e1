"""One call of attention: a rank's program, the transport that carries its messages, and counts of bytes sent."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import get_args

import torch

from balancing.ranges import named
from balancing.sequences.engine.call_rows import CallRows, MessageRows
from balancing.sequences.engine.kernels import Kernel
from balancing.sequences.engine.program import TO_ATTENTION, TO_LINEAR, Kind, Messages, TransferGroup
from balancing.sequences.engine.rank_program import RankProgram
from balancing.sequences.engine.transport import Chain, Exchange, Pending, Transport

__all__ = ["AttentionCall", "Statistics", "prepare_exchanges"]


@dataclass
class Statistics:
    """Bytes that attention has sent from this rank, messages relayed for other ranks included.

    intra_bytes, inter_bytes: keys, values and their gradients, to ranks of the same node and of other nodes.
    remap_intra_bytes, remap_inter_bytes: changes of layout, to ranks of the same node and of other nodes.
    timed: whether waits on CUDA are measured, at two events a wait.
    """

    intra_bytes: int = 0
    inter_bytes: int = 0
    remap_intra_bytes: int = 0
    remap_inter_bytes: int = 0
    timed: bool = True
    _waited: float = 0.0
    _marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    @property
    def exposed_seconds(self) -> float:
        """Seconds that the rank, on CUDA its stream, has waited for transfers. Blocks until all measured waits end."""
        for begin, end in self._marks:
            end.synchronize()
            self._waited += begin.elapsed_time(end) / 1e3
        self._marks.clear()
        return self._waited

    def wait(self, pending: Pending) -> None:
        """Wait for transfers and count the time."""
        self.timed_wait(pending.wait, pending.on_cuda)

    def timed_wait(self, wait: Callable[[], None], on_cuda: bool) -> None:
        """Wait for transfers by `wait` and count the time. on_cuda: whether the current stream waits."""
        if on_cuda and not self.timed:
            wait()
            return
        if on_cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            wait()
            end.record()
            self._marks.append((begin, end))
            return
        start = time.perf_counter()
        wait()
        self._waited += time.perf_counter() - start


@dataclass(frozen=True)
class AttentionCall:
    """Objects that the forward and the backward pass of one call share.

    rank_program: the program of this rank.
    transport: carries the program's messages.
    exchanges: of the program, from `prepare_exchanges`.
    statistics: counts the bytes of the messages.
    kernel: computes attention of pieces.
    scale: factor of the scores.
    calls: rows of the program's calls, on the device.
    """

    rank_program: RankProgram
    transport: Transport
    exchanges: dict[TransferGroup, Exchange]
    statistics: Statistics
    kernel: Kernel
    scale: float
    calls: list[CallRows]

    def start(self, transfer_group: TransferGroup, rows: torch.Tensor, dtype: torch.dtype) -> Pending:
        """Start the messages of a transfer group between the workspaces of the ranks.

        transfer_group: of the program.
        rows: the workspace [row, kv_heads, head_size + value_size], of keys and values or of their gradients.
        dtype: of keys.

        Gradients of gathered keys are sent in the type of keys: each rank that saw the keys rounds its gradients, and
        the sum of a node's ranks is rounded before it leaves the node. Sums on a ring keep their type inside a node and
        are rounded before they leave it.
        """
        exchange = self.exchanges[transfer_group]
        wide, near, far = exchange.sent
        number = rows.shape[1:].numel()
        self.statistics.intra_bytes += number * (wide * rows.itemsize + near * dtype.itemsize)
        self.statistics.inter_bytes += number * far * dtype.itemsize
        return self.transport.start(exchange, rows, rows, dtype)

    def chain(self, rows: torch.Tensor, dtype: torch.dtype) -> Chain:
        """The chain of the program's transfer groups of keys that ranks send on. rows, dtype: as in `start`."""
        groups = self.rank_program.program.chained
        stream = self.transport.stream(rows.device) if groups and rows.is_cuda else None
        starts = {group: partial(self.start, group, rows, dtype) for group in groups}
        return Chain(starts, self.transport.in_order, stream)

    @named("remap of tokens")
    def change_layout(self, messages: Messages, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Send `parts` to the other layout, in one message to each peer; returns them in that layout.

        messages: the program's `to_attention` or `to_linear`.
        parts: [token, heads, head_size] each; heads and sizes may differ.
        """
        exchange = self.exchanges[TO_ATTENTION if messages is self.rank_program.to_attention else TO_LINEAR]
        flat = len({part.shape[2] for part in parts}) > 1  # heads of several sizes: [token, numbers]
        joined = [part.flatten(1) for part in parts] if flat else parts
        before = (torch.cat(joined, 1) if len(parts) > 1 else parts[0]).contiguous()
        after = before.new_empty(exchange.tokens, *before.shape[1:])
        _, near, far = exchange.sent
        number = before.shape[1:].numel() * before.itemsize
        self.statistics.remap_intra_bytes += number * near
        self.statistics.remap_inter_bytes += number * far
        self.statistics.wait(self.transport.start(exchange, before, after, before.dtype))
        found = after.split([part.shape[1] for part in joined], 1)
        return (
            tuple(one.unflatten(1, part.shape[1:]) for one, part in zip(found, parts, strict=True)) if flat else found
        )


def prepare_exchanges(
    program: RankProgram, transport: Transport, rows: Mapping[TransferGroup, MessageRows]
) -> dict[TransferGroup, Exchange]:
    """The transfer groups of a rank's program, ready to start. rows: of its messages, on the device."""
    cluster, own = program.cluster, program.program
    changes = ((TO_ATTENTION, program.to_attention), (TO_LINEAR, program.to_linear))
    groups = own.messages | {group: messages for group, messages in changes if messages is not None}
    collective = transport.in_order or not own.chained
    found = {}
    for group, messages in groups.items():
        together = program.remapped if group in (TO_ATTENTION, TO_LINEAR) else group.kind in ("gather", "return")
        found[group] = transport.prepare(
            messages,
            rows[group],
            program.routes.get(group),
            lambda peer: cluster is None or cluster.same_node(peer, program.rank),
            tag=_tag(group),
            collective=collective and together,
            alone=not program.remapped and group in (TO_ATTENTION, TO_LINEAR),
            wide=group.kind == "ring return",
        )
    return found


def _tag(transfer_group: TransferGroup) -> int:
    """A number for each transfer group, the same on all ranks."""
    kinds = get_args(Kind)
    return kinds.index(transfer_group.kind) + len(kinds) * (transfer_group.inter + 2 * transfer_group.round)
