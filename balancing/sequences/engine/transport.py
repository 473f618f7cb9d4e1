"""Transfers of rows between ranks, started without blocking.

A transfer group is one collective, an uneven all-to-all, of which the host starts one. All ranks of the plan take part
in it, those without rows as well. Rows that are not adjacent are packed in one operation. Received rows lie in the
order of peers.

Three kinds of groups are messages between pairs of ranks instead, batched on a GPU: rounds of rings, where a rank has
one peer or two; groups with a route; and over gloo the groups of a plan with a `Chain`, which a thread starts while
other groups start, so that ranks start them in different orders. A rank posts its receives first, because gloo holds
back a receive that is posted after a send to the same rank.

Transfer groups of a `Chain` start one after another, each once the group before it has arrived, even if the rank is
computing: on a GPU on a stream of their own, over gloo in a thread.

With a route, messages between nodes are sent in slices through other ranks, which relay them. On a GPU the order of
transfers on the communicator's stream is enough to relay. Elsewhere a thread relays; it sleeps until a slice arrives.
"""

import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from balancing.kernels import merging
from balancing.messages import connect, runs_nccl, start_all_to_all, start_message
from balancing.ranges import named
from balancing.sequences.engine.program import Messages, TransferGroup
from balancing.sequences.engine.routing import Slice
from balancing.sequences.engine.row_indices import MessageRows, rows_of
from balancing.threads import start_thread

__all__ = ["Chain", "Exchange", "Pending", "Statistics", "Transport"]

Ends = tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]  # by peer: rows to send, rows to receive

_SLICE_NUMBERS = 1 << 17  # tags of one transfer group: 0 for direct messages, then those of slices


@dataclass(frozen=True)
class Exchange:
    """One transfer group of a rank, prepared once a plan.

    rows: of the messages, on the device.
    adds: whether received rows are added to rows instead of replacing them.
    sends, receives: rows by peer, in order of peers.
    sizes: rows from and to each rank of the plan, if the group is a collective; None if it is messages.
    alone: whether rows only change their order on this rank.
    slices: this rank's part in routed messages.
    tag: below 16384, different for groups that are under way together.
    wide: peers whose rows keep the type of sums.
    sent: rows that the rank sends in its node in the type of sums, in its node, and to other nodes; relayed ones
        included.
    """

    rows: MessageRows
    adds: bool
    sends: dict[int, int]
    receives: dict[int, int]
    sizes: tuple[list[int], list[int]] | None
    alone: bool
    slices: Sequence[Slice]
    tag: int
    wide: frozenset[int]
    sent: tuple[int, int, int]

    @property
    def tokens(self) -> int:
        """Number of received rows."""
        return sum(self.receives.values())


class Pending:
    """Messages under way. Their tensors must not be touched until `wait` has returned.

    On a GPU `wait` makes the current stream wait, not the host. `wait` raises RuntimeError if a rank has failed or has
    not answered within the process group's timeout.
    """

    def __init__(self, exchange: Exchange, into: torch.Tensor) -> None:
        self.exchange, self.into = exchange, into
        self.on_cuda = into.is_cuda
        self.works: list[dist.Work] = []
        self.arriving: list[torch.Tensor] = []  # received rows that are added or change their order
        self.sent: list[torch.Tensor] = []  # kept alive until sent
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def hand_on(self, relays: Sequence[tuple[dist.Work, dist.P2POp]]) -> None:
        """Relay in a thread: for one pair after the other, wait for the first message, then start the second."""
        if relays:
            self._thread = start_thread(self._hand_on, relays)

    def _hand_on(self, relays: Sequence[tuple[dist.Work, dist.P2POp]]) -> None:
        try:
            for arrival, send in relays:
                arrival.wait()
                self.works.append(start_message(send))
        except BaseException as error:  # raised again by `wait`
            self._error = error

    def wait(self) -> None:
        """Return when all messages are sent and received. Added rows are summed in order of peers."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        for work in self.works:
            work.wait()
        if self.arriving:
            came = self.arriving[0]
            if len(self.arriving) > 1:
                came = torch.cat([part.to(self.into.dtype) for part in self.arriving])
            rows = self.exchange.rows
            if isinstance(rows.receives, torch.Tensor):
                torch.index_select(came, 0, rows.receives, out=self.into)
            elif rows.added is not None:
                merging.choose_add(came.device)(self.into, rows.added.rows, (came,), rows.added.terms)
        self.works, self.arriving, self.sent = [], [], []


class Chain:
    """Transfer groups that start one after another, each once the group before it has arrived.

    starts: for each transfer group, in order, a function that starts its messages.
    in_order: as in `Transport`. If not, a thread of the host starts the groups.
    stream: the stream of a GPU, for packing, sending and receiving.

    Call `start` for each group in order, and later `wait`. With a thread the first call of `start` starts the whole
    chain. Otherwise `start` puts its group on the stream. That gives all ranks the same order of transfers on a
    communicator, and starts a group before the computation that needs the group before it.
    """

    def __init__(
        self,
        starts: Mapping[TransferGroup, Callable[[], Pending]],
        in_order: bool = False,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.on_cuda = stream is not None
        self._starts, self._in_order, self._stream = starts, in_order, stream
        self._under_way: tuple[TransferGroup, Pending] | None = None
        self._events: dict[TransferGroup, torch.cuda.Event] = {}
        self._came = {transfer_group: threading.Event() for transfer_group in starts}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())

    def start(self, transfer_group: TransferGroup) -> None:
        """Start the messages of a group once the group before it has arrived."""
        if self._in_order:
            with self._on_stream():
                self._finish()
                self._under_way = transfer_group, self._starts[transfer_group]()
        elif self._thread is None:
            self._thread = start_thread(self._run)

    def wait(self, transfer_group: TransferGroup) -> None:
        """Return when the messages of a group have arrived; on a GPU the current stream waits."""
        if self._in_order:
            with self._on_stream():
                self._finish()
            if self._stream is not None:
                torch.cuda.current_stream().wait_event(self._events.pop(transfer_group))
            return
        self._came[transfer_group].wait()
        if self._error is not None:
            raise self._error

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _finish(self) -> None:
        """Make the stream wait for the group under way."""
        if self._under_way is not None:
            transfer_group, pending = self._under_way
            pending.wait()
            if self._stream is not None:
                self._events[transfer_group] = torch.cuda.Event()
                self._events[transfer_group].record()
            self._under_way = None

    def _run(self) -> None:
        try:
            for transfer_group, start in self._starts.items():
                start().wait()
                self._came[transfer_group].set()
        except BaseException as error:  # raised again by `wait` for groups that have not arrived
            self._error = error
        for came in self._came.values():
            came.set()


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

    def add_bytes(self, other: "Statistics") -> None:
        """Count the bytes of `other` once more."""
        for name in ("intra_bytes", "inter_bytes", "remap_intra_bytes", "remap_inter_bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

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


class Transport:
    """Starts messages on the communicator of `process_group` (all ranks by default).

    rank: in the process group.
    in_order: whether the communicator runs messages in the order in which they are started, as NCCL does. Over gloo a
        message runs when both of its ranks have started it.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        group = dist.group.WORLD if process_group is None else process_group
        assert group is not None, "torch.distributed is initialized"
        self.process_group: dist.ProcessGroup = group
        self.rank = dist.get_rank(self.process_group)
        self.in_order = runs_nccl(group) or "gloo" not in dist.get_backend(group)
        self._ranks = dist.get_process_group_ranks(self.process_group)
        connect(self.process_group)

    @staticmethod
    @functools.cache
    def stream(device: torch.device) -> torch.cuda.Stream:
        """The stream for chains on `device`, one for all micro-batches: PyTorch keeps freed memory for each stream."""
        return torch.cuda.Stream(device)

    def prepare(
        self,
        messages: Messages,
        rows: MessageRows,
        slices: Sequence[Slice] | None,
        same_node: Callable[[int], bool],
        *,
        tag: int = 0,
        collective: bool = True,
        alone: bool = False,
        wide: bool = False,
    ) -> Exchange:
        """Prepare a transfer group.

        messages: the messages of this rank.
        rows: of the messages, on the device.
        slices: this rank's part in routed messages, from `Route.of`; None if the group has no route on any rank.
        same_node: whether a peer is on this rank's node.
        tag: as in `Exchange`.
        collective: whether all ranks of the process group take part.
        alone: as in `Exchange`.
        wide: whether rows stay in the type of sums inside the node.
        """
        sends, receives = ({one.peer: one.tokens for one in side} for side in (messages.sends, messages.receives))
        sizes = None
        if collective and slices is None:
            ranks = range(len(self._ranks))
            sizes = [receives.get(rank, 0) for rank in ranks], [sends.get(rank, 0) for rank in ranks]
        kept = frozenset(peer for peer in {*sends, *receives} if wide and same_node(peer))
        routed, counted = {piece.flow for piece in slices or ()}, [0, 0, 0]
        for peer, tokens in sends.items():
            if peer != self.rank and (self.rank, peer) not in routed:
                counted[0 if peer in kept else 1 if same_node(peer) else 2] += tokens
        for piece in slices or ():
            if self.rank != piece.path[-1]:
                counted[1 if same_node(piece.path[piece.path.index(self.rank) + 1]) else 2] += piece.stop - piece.start
        sent = counted[0], counted[1], counted[2]
        return Exchange(rows, messages.adds, sends, receives, sizes, alone, slices or (), tag, kept, sent)

    @named("transfer of keys and values")
    def start(self, exchange: Exchange, rows: torch.Tensor, into: torch.Tensor, dtype: torch.dtype) -> Pending:
        """Start a transfer group.

        rows: [row, ...], contiguous; rows of it are sent.
        into: [row, ...], contiguous; received rows are written to it or added to it.
        dtype: in which rows are sent, but for wide ones.

        All ranks that take part in common groups must start them in the same order.
        """
        pending, receives = Pending(exchange, into), exchange.rows.receives
        sent = _outgoing(exchange, rows)
        in_place = isinstance(receives, slice) and not exchange.adds
        arriving = into[receives] if in_place else None
        if exchange.alone:
            if arriving is None:
                pending.arriving = [sent]
            else:
                arriving.copy_(sent)
            return pending
        if exchange.sizes is None:
            self._start_messages(pending, sent, arriving, dtype)
            return pending
        sent = sent.to(dtype)
        if arriving is None:
            arriving = into.new_empty(exchange.tokens, *into.shape[1:], dtype=dtype)
            pending.arriving = [arriving]
        pending.sent = [sent, arriving]
        pending.works = [start_all_to_all(arriving, sent, *exchange.sizes, self.process_group)]
        return pending

    def _start_messages(
        self, pending: Pending, sent: torch.Tensor, arriving: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        """Start a transfer group as messages between pairs of ranks."""
        exchange, into = pending.exchange, pending.into

        def of(peer: int) -> torch.dtype:
            return into.dtype if peer in exchange.wide else dtype

        parts = zip(exchange.sends, sent.split(list(exchange.sends.values())), strict=True) if exchange.sends else ()
        sends = {peer: part.to(of(peer)) for peer, part in parts}
        if arriving is None:
            receives = {
                peer: into.new_empty(tokens, *into.shape[1:], dtype=of(peer))
                for peer, tokens in exchange.receives.items()
            }
            pending.arriving = list(receives.values())
        else:
            pieces = arriving.split(list(exchange.receives.values())) if exchange.receives else ()
            receives = dict(zip(exchange.receives, pieces, strict=True))
        if self.rank in receives:
            receives[self.rank].copy_(sends[self.rank])
        others = {peer: buffer for peer, buffer in receives.items() if peer != self.rank}
        pending.sent = [*sends.values(), *receives.values()]
        routed = {piece.flow for piece in exchange.slices}
        tag = exchange.tag * _SLICE_NUMBERS
        direct = [
            self._operation(dist.irecv, buffer, peer, tag)
            for peer, buffer in others.items()
            if (peer, self.rank) not in routed
        ] + [
            self._operation(dist.isend, buffer, peer, tag)
            for peer, buffer in sends.items()
            if peer != self.rank and (self.rank, peer) not in routed
        ]
        start = self._in_turns if self.in_order else self._on_host
        start(pending, direct, dtype, (sends, others), tag)

    def _on_host(
        self, pending: Pending, direct: Sequence[dist.P2POp], dtype: torch.dtype, ends: Ends, tag: int
    ) -> None:
        outgoing = [operation for operation in direct if operation.op is dist.isend]
        pending.works = [start_message(operation) for operation in direct if operation.op is dist.irecv]
        relays = []
        for piece in pending.exchange.slices:
            assert piece.number + 1 < _SLICE_NUMBERS, f"slice {piece.number} has the number of another group"
            place = piece.path.index(self.rank)
            buffer = self._buffer(piece, pending, dtype, *ends)
            coming, going = self._hops(piece, place, buffer, tag + piece.number + 1)
            if coming is not None and going is not None:
                relays.append((start_message(coming), going))
            elif coming is not None:
                pending.works.append(start_message(coming))
            elif going is not None:
                outgoing.append(going)
        pending.works += [start_message(operation) for operation in outgoing]
        pending.hand_on(relays)

    def _in_turns(
        self, pending: Pending, direct: Sequence[dist.P2POp], dtype: torch.dtype, ends: Ends, tag: int
    ) -> None:
        # Messages run in the order in which they are started. So all ranks start the messages of one turn
        # together, and a slice has arrived before the next turn sends it on.
        turns: dict[int, list[dist.P2POp]] = defaultdict(list)
        turns[0] = list(direct)
        for piece in pending.exchange.slices:
            place = piece.path.index(self.rank)
            buffer = self._buffer(piece, pending, dtype, *ends)
            coming, going = self._hops(piece, place, buffer, tag + piece.number + 1)
            if coming is not None:
                turns[piece.turn + place - 1].append(coming)
            if going is not None:
                turns[piece.turn + place].append(going)
        for turn in sorted(turns):
            if turns[turn]:
                pending.works += dist.batch_isend_irecv(turns[turn])

    def _buffer(self, piece: Slice, pending: Pending, dtype: torch.dtype, sends: dict, receives: dict) -> torch.Tensor:
        """Memory of a slice on this rank: at source and target part of the message, on a relay a new buffer."""
        source, target = piece.flow
        if self.rank == source:
            return sends[target][piece.start : piece.stop]
        if self.rank == target:
            return receives[source][piece.start : piece.stop]
        buffer = pending.into.new_empty(piece.stop - piece.start, *pending.into.shape[1:], dtype=dtype)
        pending.sent.append(buffer)
        return buffer

    def _hops(
        self, piece: Slice, place: int, buffer: torch.Tensor, tag: int
    ) -> tuple[dist.P2POp | None, dist.P2POp | None]:
        """The operations that receive a slice on this rank and that send it on; None where it starts or ends here."""
        coming = self._operation(dist.irecv, buffer, piece.path[place - 1], tag) if place else None
        last = place == len(piece.path) - 1
        return coming, None if last else self._operation(dist.isend, buffer, piece.path[place + 1], tag)

    def _operation(self, kind: Callable, tensor: torch.Tensor, peer: int, tag: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, self._ranks[peer], self.process_group, tag)


def _outgoing(exchange: Exchange, rows: torch.Tensor) -> torch.Tensor:
    """The rows to send, in order of peers."""
    return rows_of(rows, exchange.rows.sends)
