"""Messages between ranks that are under way while the rank computes.

A transfer group has one message for each peer, of ranges of rows. All messages of a group start together on one
communicator, receives first, because gloo holds back a receive that is posted after a send to the same rank. Adjacent
rows are sent and received in place. Other rows are packed, for all messages of a group in one operation.

Transfer groups of a `Chain` start one after another, each once the group before it has arrived, even if the rank is
computing: on a GPU on a stream of their own, elsewhere in a thread.

With a route, messages between nodes are sent in slices through other ranks, which relay them. On a GPU the order of
transfers on the communicator's stream is enough to relay. Elsewhere a thread relays; it sleeps until a slice arrives.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from balancing.messages import connect, start_message
from balancing.ranges import named
from balancing.sequences.engine.call_rows import MessageRows
from balancing.sequences.engine.program import Messages, TransferGroup
from balancing.sequences.engine.routing import Slice
from balancing.threads import start_thread

__all__ = ["NOTHING_LISTED", "Chain", "Dtypes", "Pending", "Transport", "dtype_of"]

Dtypes = Mapping[int, torch.dtype]  # by peer
NOTHING_LISTED = MessageRows(None, None, None, None)  # all rows are adjacent
Ends = tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]  # by peer: rows to send, rows to receive

_SLICE_NUMBERS = 1 << 17  # tags of one transfer group: 0 for direct messages, then those of slices


class Pending:
    """Messages under way. Their tensors must not be touched until `wait` has returned.

    On a GPU `wait` makes the current stream wait, not the host. `wait` raises RuntimeError if a rank has failed or has
    not answered within the process group's timeout.
    """

    def __init__(self, into: torch.Tensor, listed: MessageRows) -> None:
        self.into, self._listed = into, listed
        self.on_cuda = into.is_cuda
        self.dtypes: Dtypes = {}
        self.works: list[dist.Work] = []
        self.arriving: list[torch.Tensor] = []  # buffers of packed receives, in order of peers; one for each type
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
            parts = [part.to(self.into.dtype) for part in self.arriving]
            came = parts[0] if len(parts) == 1 else torch.cat(parts)
            if self._listed.receives is not None:
                self.into[self._listed.receives] = came
            rows, terms = self._listed.added, self._listed.terms
            if terms is not None:  # a row may come from several peers; their sum needs a fixed order
                zero = came.new_zeros(1, *came.shape[1:])
                came = torch.cat((came, zero)).index_select(0, terms.flatten()).unflatten(0, terms.shape).sum(0)
            if isinstance(rows, slice):
                self.into[rows] += came
            elif rows is not None:
                self.into.index_add_(0, rows, came)
        self.works, self.arriving, self.sent = [], [], []


class Chain:
    """Transfer groups that start one after another, each once the group before it has arrived.

    starts: for each transfer group, in order, a function that starts its messages.
    in_order: as in `Transport`. If not, a thread of the host starts the groups.
    stream: of a GPU, for packing, sending and receiving.

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


class Transport:
    """Starts messages on the communicator of `process_group` (all ranks by default).

    rank: in the process group.
    in_order: whether the communicator runs messages in the order in which they are started, as NCCL does. Over gloo a
        message runs when both of its ranks have started it.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = dist.group.WORLD if process_group is None else process_group
        assert self.process_group is not None, "torch.distributed is initialized"
        self.rank = dist.get_rank(self.process_group)
        self.in_order = dist.get_backend(self.process_group) != "gloo"
        self._ranks = dist.get_process_group_ranks(self.process_group)
        self._stream: torch.cuda.Stream | None = None
        connect(self.process_group)

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The stream for chains on `device`."""
        self._stream = self._stream or torch.cuda.Stream(device)
        return self._stream

    @named("transfer of keys and values")
    def start(
        self,
        messages: Messages,
        rows: torch.Tensor,
        into: torch.Tensor,
        listed: MessageRows = NOTHING_LISTED,
        tag: int = 0,
        slices: Sequence[Slice] = (),
        dtypes: Dtypes | None = None,
    ) -> Pending:
        """Start the messages of one transfer group.

        messages: of this rank.
        rows: [row, ...], contiguous; rows of it are sent.
        into: [row, ...], contiguous; received rows are written to it or added to it.
        listed: rows of packed messages, on the device of `rows`.
        tag: below 16384, different for groups that are under way together.
        slices: this rank's part in routed messages, from `Route.of`.
        dtypes: by peer, type in which rows to be added are sent; by default that of `rows`.

        All ranks that send, receive or relay must start their common groups in the same order.
        """
        pending = Pending(into, listed)
        if dtypes is None or not messages.adds:
            dtypes = defaultdict(lambda: rows.dtype)
        sends = _outgoing(messages, rows, listed, dtypes)
        receives = {
            message.peer: into[slice(*message.rows[0])]
            for message in messages.receives
            if not messages.adds and len(message.rows) == 1
        }
        packed = messages.packed_receives
        for dtype, same_type in groupby(packed, key=lambda message: dtypes[message.peer]):
            peers = {message.peer: message.tokens for message in same_type}
            pending.arriving.append(into.new_empty(sum(peers.values()), *into.shape[1:], dtype=dtype))
            receives |= dict(zip(peers, pending.arriving[-1].split(list(peers.values())), strict=True))
        if self.rank in receives:
            receives.pop(self.rank).copy_(sends[self.rank])
        pending.sent = [*sends.values(), *receives.values()]
        pending.dtypes = dtypes
        routed = {piece.flow for piece in slices}
        tag *= _SLICE_NUMBERS
        direct = [
            self._operation(dist.irecv, buffer, peer, tag)
            for peer, buffer in receives.items()
            if (peer, self.rank) not in routed
        ] + [
            self._operation(dist.isend, buffer, peer, tag)
            for peer, buffer in sends.items()
            if peer != self.rank and (self.rank, peer) not in routed
        ]
        if self.in_order:
            self._in_turns(pending, direct, slices, (sends, receives), tag)
        else:
            self._on_host(pending, direct, slices, (sends, receives), tag)
        return pending

    def _on_host(
        self, pending: Pending, direct: Sequence[dist.P2POp], slices: Sequence[Slice], ends: Ends, tag: int
    ) -> None:
        outgoing = [operation for operation in direct if operation.op is dist.isend]
        pending.works = [start_message(operation) for operation in direct if operation.op is dist.irecv]
        relays = []
        for piece in slices:
            assert piece.number + 1 < _SLICE_NUMBERS, f"slice {piece.number} has the number of another group"
            place = piece.path.index(self.rank)
            buffer = self._buffer(piece, pending, *ends)
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
        self, pending: Pending, direct: Sequence[dist.P2POp], slices: Sequence[Slice], ends: Ends, tag: int
    ) -> None:
        # Messages run in the order in which they are started. So all ranks start the messages of one turn
        # together, and a slice has arrived before the next turn sends it on.
        turns: dict[int, list[dist.P2POp]] = defaultdict(list)
        turns[0] = list(direct)
        for piece in slices:
            place = piece.path.index(self.rank)
            buffer = self._buffer(piece, pending, *ends)
            coming, going = self._hops(piece, place, buffer, tag + piece.number + 1)
            if coming is not None:
                turns[piece.turn + place - 1].append(coming)
            if going is not None:
                turns[piece.turn + place].append(going)
        for turn in sorted(turns):
            if turns[turn]:
                pending.works += dist.batch_isend_irecv(turns[turn])

    def _buffer(self, piece: Slice, pending: Pending, sends: dict, receives: dict) -> torch.Tensor:
        """Memory of a slice on this rank: at source and target part of the message, on a relay a new buffer."""
        source, target = piece.flow
        if self.rank == source:
            return sends[target][piece.start : piece.stop]
        if self.rank == target:
            return receives[source][piece.start : piece.stop]
        dtype = dtype_of(piece, pending.dtypes)
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


def dtype_of(piece: Slice, dtypes: Dtypes) -> torch.dtype:
    """The type of a slice, the same on all ranks of its path: the smaller of the types of its source and target."""
    return min((dtypes[end] for end in piece.flow), key=lambda dtype: dtype.itemsize)


def _outgoing(messages: Messages, rows: torch.Tensor, listed: MessageRows, dtypes: Dtypes) -> dict[int, torch.Tensor]:
    """The rows to send to each peer, in order of peers, packed and converted."""
    packed: dict[int, torch.Tensor] = {}
    if listed.sends is not None:
        together, start = rows.index_select(0, listed.sends), 0
        of_type = {dtype: together.to(dtype) for dtype in {dtypes[message.peer] for message in messages.packed_sends}}
        for message in messages.packed_sends:
            packed[message.peer] = of_type[dtypes[message.peer]][start : start + message.tokens]
            start += message.tokens
    return {
        message.peer: packed[message.peer]
        if message.peer in packed
        else rows[slice(*message.rows[0])].to(dtypes[message.peer])
        for message in messages.sends
    }
