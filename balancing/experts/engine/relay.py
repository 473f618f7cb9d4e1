"""Relay of weights and gradients along chains of ranks, so that an expert leaves its home once for all its replicas.

If a home rank sent every replica itself, its link would be the limit: eight copies through one NIC take eight times as
long as one. Along a chain each rank receives once and sends once. Messages are sent in pieces, so that all links of the
chain are busy at the same time. `ReplicaPlacement.chains` has the order of ranks. Gradients travel in the reverse
order, and each rank adds its own.

A rank in the middle of a chain receives a message and then sends it on, while it computes. On a GPU, the order of work
on a stream does this. On a CPU, a thread does it and sleeps until a message has arrived.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from balancing.messages import start_message
from balancing.ranges import named
from balancing.threads import start_thread

__all__ = ["Hop", "Relay", "number_of_pieces", "split_pieces"]

_PIECE_BYTES = 16 << 20  # large enough for the full bandwidth of a link, small compared with an expert


def split_pieces(flat: torch.Tensor) -> Sequence[torch.Tensor]:
    """Views of the pieces in which `flat` is sent. All ranks get the same pieces for the same length and type."""
    return flat.split(_piece_size(flat.dtype))


def number_of_pieces(size: int, dtype: torch.dtype) -> int:
    """The number of pieces in which `size` elements are sent."""
    return -(-size // _piece_size(dtype))


def _piece_size(dtype: torch.dtype) -> int:
    """The elements of a piece."""
    return max(1, _PIECE_BYTES // dtype.itemsize)


@dataclass(frozen=True)
class Hop:
    """One rank's part in relaying one piece of one expert: receive it, add this rank's tensor, and send the sum.

    source: rank in the group to receive from; None at the start of the chain.
    target: rank in the group to send to; None at the end of the chain.
    piece: tensor that is received into and sent.
    add: tensor that is added before sending, or None.
    tag: number of the message, unique among the messages of two ranks that may be in flight together.
    turn: step of the transfer in which this rank sends; this rank receives in the step before. Ranks that work in the
        order of steps cannot deadlock.
    """

    source: int | None
    target: int | None
    piece: torch.Tensor
    add: torch.Tensor | None
    tag: int
    turn: int

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends for the hop."""
        return 0 if self.target is None else self.piece.numel() * self.piece.element_size()

    def combine(self) -> None:
        """Add this rank's tensor to the received piece."""
        if self.add is not None:
            self.piece.add_(self.add)


class Relay:
    """The hops of one rank in one transfer, in flight from construction until `wait_sent`.

    hops: the hops of this rank, in any order.
    process_group: used for nothing else at the same time.
    stream: the stream of a GPU's messages; None on the CPU. Successive relays may use the same stream.
    turns: number of steps of the longest chain of the group; `post` then posts them. None posts all steps now.

    There are two reasons to post a few steps at a time. First, steps posted together run one after the other and
    compete for the links with all other messages. Posted when compute begins, a few steps leave the links free for the
    messages between stretches of compute. Second, with CUDA_DEVICE_MAX_CONNECTIONS=1 all streams share one queue, and a
    kernel starts only after all kernels queued earlier have started. Steps queued together delay the compute queued
    after them until the last step has started. Steps queued one at a time, with compute in between, do not.

    On a GPU, waiting blocks the current stream, not the host. Waiting raises RuntimeError if a rank has died or has not
    answered within the group's timeout.
    """

    def __init__(
        self,
        hops: Sequence[Hop],
        process_group: dist.ProcessGroup,
        stream: torch.cuda.Stream | None = None,
        turns: int | None = None,
    ) -> None:
        self._process_group = process_group
        self._hops = sorted(hops, key=lambda hop: hop.turn)  # keeps the tensors alive, too
        self._incoming: list[dist.Work] = []
        self._outgoing: list[dist.Work] = []
        self._arriving: dict[int, dist.Work] = {}  # receives of messages that this rank sends on, by tag
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None
        self._received: torch.cuda.Event | None = None
        self._sent: torch.cuda.Event | None = None
        self._stream = stream if hops else None
        self.posted = 0  # number of steps posted
        self.turns = max((hop.turn + 1 for hop in hops), default=0) if turns is None else turns
        if self._stream is not None:
            self._last_received = max((hop.turn - 1 for hop in hops if hop.source is not None), default=-1)
        else:
            self._receive_on_host()
        if turns is None:
            self.post_rest()

    def wait_received(self) -> None:
        """Post all remaining steps and wait for everything that this rank receives. It may still be sending."""
        self.post_rest()
        if self._received is not None:
            torch.cuda.current_stream().wait_event(self._received)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        if self._error is not None:
            raise self._error
        for work in self._incoming:
            work.wait()
        self._incoming.clear()

    def wait_sent(self) -> None:
        """Wait until everything is received and sent. The tensors may then be overwritten."""
        self.wait_received()
        if self._sent is not None:
            torch.cuda.current_stream().wait_event(self._sent)
        for work in self._outgoing:
            work.wait()
        self._outgoing.clear()

    def _receive_on_host(self) -> None:
        # Receives start before sends, since gloo queues the notice of a receive behind the data of a send to that rank.
        for hop in self._hops:
            if hop.source is not None and hop.target is not None:
                self._arriving[hop.tag] = self._receive(hop)
            elif hop.source is not None:
                self._incoming.append(self._receive(hop))

    def _send_on_host(self, turns: range) -> None:
        sent = [hop for hop in self._hops if hop.target is not None and hop.turn in turns]
        self._outgoing += [self._send(hop) for hop in sent if hop.source is None]
        passing = [hop for hop in sent if hop.source is not None]
        if passing:
            self._threads.append(start_thread(self._hand_on, passing))

    def _hand_on(self, passing: list[Hop]) -> None:
        try:
            for hop in passing:
                self._arriving[hop.tag].wait()
                with torch.no_grad():
                    hop.combine()
                self._outgoing.append(self._send(hop))
        except BaseException as error:  # `wait_received` raises it on the calling thread
            self._error = error

    @property
    def is_posted(self) -> bool:
        """Whether all steps are posted."""
        return self.posted == self.turns

    @named("transfer of replicas")
    def post(self, turns: int = 1) -> None:
        """Post the next `turns` steps, or all remaining steps if there are fewer.

        All ranks of the group must call it at the same point. On a GPU the steps start after the work queued on the
        current stream so far.
        """
        following = range(self.posted, min(self.posted + turns, self.turns))
        self.posted += len(following)
        if self._stream is None:
            self._send_on_host(following)
            return
        if following:
            self._stream.wait_stream(torch.cuda.current_stream())
        for turn in following:
            # NCCL runs messages in the order in which they are started, so all ranks start those of a step together.
            with torch.cuda.stream(self._stream):
                operations = []
                for hop in self._hops:
                    if hop.source is not None and hop.turn == turn + 1:
                        operations.append(self._operation(dist.irecv, hop, hop.source))
                    if hop.target is not None and hop.turn == turn:
                        hop.combine()
                        operations.append(self._operation(dist.isend, hop, hop.target))
                for work in dist.batch_isend_irecv(operations) if operations else []:
                    work.wait()
                if turn == self._last_received:
                    self._received = self._stream.record_event()
                if turn + 1 == self.turns:
                    self._sent = self._stream.record_event()

    def post_rest(self) -> None:
        """Post all remaining steps. All ranks of the group must call it at the same point."""
        self.post(self.turns)

    def _operation(self, send_or_receive: Callable, hop: Hop, other: int) -> dist.P2POp:
        return dist.P2POp(send_or_receive, hop.piece, group=self._process_group, tag=hop.tag, group_peer=other)

    def _receive(self, hop: Hop) -> dist.Work:
        assert hop.source is not None
        return start_message(self._operation(dist.irecv, hop, hop.source))

    def _send(self, hop: Hop) -> dist.Work:
        assert hop.target is not None
        return start_message(self._operation(dist.isend, hop, hop.target))
