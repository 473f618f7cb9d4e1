"""One call of attention: a rank's program, the transport that carries its messages, and counts of bytes sent."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import get_args

import torch

from balancing.ranges import named
from balancing.sequences.engine.call_rows import DeviceRows
from balancing.sequences.engine.kernels import Kernel
from balancing.sequences.engine.program import TO_ATTENTION, TO_LINEAR, Kind, Messages, TransferGroup
from balancing.sequences.engine.rank_program import RankProgram
from balancing.sequences.engine.routing import Slice
from balancing.sequences.engine.transport import NOTHING_LISTED, Chain, Dtypes, Pending, Transport, dtype_of

__all__ = ["AttentionCall", "Statistics"]


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
    statistics: counts the bytes of the messages.
    kernel: computes attention of pieces.
    scale: factor of the scores.
    rows: rows of the program's calls and messages, on the device.
    """

    rank_program: RankProgram
    transport: Transport
    statistics: Statistics
    kernel: Kernel
    scale: float
    rows: DeviceRows

    def start(self, transfer_group: TransferGroup, rows: torch.Tensor, dtype: torch.dtype) -> Pending:
        """Start the messages of a transfer group between the workspaces of the ranks.

        transfer_group: of the program.
        rows: the workspace [row, kv_heads, head_size + value_size], of keys and values or of their gradients.
        dtype: of keys.

        Gradients of gathered keys are sent in the type of keys: each rank that saw the keys rounds its gradients, and
        the sum of a node's ranks is rounded before it leaves the node. Sums on a ring keep their type inside a node and
        are rounded before they leave it.
        """
        return self._prepare(transfer_group, rows, dtype)()

    def chain(self, rows: torch.Tensor, dtype: torch.dtype) -> Chain:
        """The chain of the program's transfer groups of keys that ranks send on. rows, dtype: as in `start`."""
        groups = self.rank_program.program.chained
        stream = self.transport.stream(rows.device) if groups and rows.is_cuda else None
        starts = {group: self._prepare(group, rows, dtype) for group in groups}
        return Chain(starts, self.transport.in_order, stream)

    def _prepare(self, transfer_group: TransferGroup, rows: torch.Tensor, dtype: torch.dtype) -> Callable[[], Pending]:
        """Count the messages of a transfer group and return a function that starts them."""
        messages, slices = (
            self.rank_program.program.messages[transfer_group],
            self.rank_program.routes.get(transfer_group, ()),
        )
        near = rows.dtype if transfer_group.kind == "ring return" else dtype
        dtypes = {peer: near if self._same_node(peer) else dtype for peer in self._peers(messages, slices)}
        self._count(messages, rows, dtypes, slices, remap=False)
        listed = self.rows.messages.get(transfer_group, NOTHING_LISTED)
        return partial(self.transport.start, messages, rows, rows, listed, _tag(transfer_group), slices, dtypes)

    @named("remap of tokens")
    def change_layout(self, messages: Messages, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Send `parts` to the other layout, in one message to each peer; returns them in that layout.

        messages: the program's `to_attention` or `to_linear`.
        parts: [token, heads, head_size] each; heads and sizes may differ.
        """
        transfer_group = TO_ATTENTION if messages is self.rank_program.to_attention else TO_LINEAR
        flat = len({part.shape[2] for part in parts}) > 1  # heads of several sizes: [token, numbers]
        joined = [part.flatten(1) for part in parts] if flat else parts
        before = (torch.cat(joined, 1) if len(parts) > 1 else parts[0]).contiguous()
        after = before.new_empty(sum(message.tokens for message in messages.receives), *before.shape[1:])
        slices = self.rank_program.routes.get(transfer_group, ())
        dtypes = dict.fromkeys(self._peers(messages, slices), before.dtype)
        self._count(messages, before, dtypes, slices, remap=True)
        listed = self.rows.messages.get(transfer_group, NOTHING_LISTED)
        self.statistics.wait(self.transport.start(messages, before, after, listed, _tag(transfer_group), slices))
        found = after.split([part.shape[1] for part in joined], 1)
        return (
            tuple(one.unflatten(1, part.shape[1:]) for one, part in zip(found, parts, strict=True)) if flat else found
        )

    def _same_node(self, peer: int) -> bool:
        return self.rank_program.cluster is None or self.rank_program.cluster.same_node(peer, self.rank_program.rank)

    def _peers(self, messages: Messages, slices: Sequence[Slice]) -> set[int]:
        """The ranks that send to this rank or receive from it, and those whose messages it relays."""
        ends = {rank for piece in slices for rank in piece.flow}
        return ends | {message.peer for message in (*messages.sends, *messages.receives)}

    def _count(
        self, messages: Messages, rows: torch.Tensor, dtypes: Dtypes, slices: Sequence[Slice], *, remap: bool
    ) -> None:
        numbers = rows.shape[1:].numel()
        bytes_to = dict.fromkeys((False, True), 0)
        for peer, dtype, tokens in _sent(messages, self.rank_program.rank, dtypes, slices):
            bytes_to[not self._same_node(peer)] += tokens * numbers * dtype.itemsize
        if remap:
            self.statistics.remap_intra_bytes += bytes_to[False]
            self.statistics.remap_inter_bytes += bytes_to[True]
        else:
            self.statistics.intra_bytes += bytes_to[False]
            self.statistics.inter_bytes += bytes_to[True]


def _sent(
    messages: Messages, rank: int, dtypes: Dtypes, slices: Sequence[Slice]
) -> Iterator[tuple[int, torch.dtype, int]]:
    """(peer, type, rows) of each message that `rank` sends, relayed ones included."""
    routed = {piece.flow for piece in slices}
    for message in messages.sends:
        if message.peer != rank and (rank, message.peer) not in routed:
            yield message.peer, dtypes[message.peer], message.tokens
    for piece in slices:
        if rank != piece.path[-1]:
            yield piece.path[piece.path.index(rank) + 1], dtype_of(piece, dtypes), piece.stop - piece.start


def _tag(transfer_group: TransferGroup) -> int:
    """A number for each transfer group, the same on all ranks."""
    kinds = get_args(Kind)
    return kinds.index(transfer_group.kind) + len(kinds) * (transfer_group.inter + 2 * transfer_group.round)
