"""Messages that ranks hand on along a chain, so that a hot expert leaves its home once however many replicas it has.

A home rank that sends every replica itself is limited by its own link: eight copies through a NIC take eight times as
long as one. Along a chain every rank receives once and sends once, and messages cut into pieces are under way on all
links at the same time (`ReplicaPlacement.hops` has the order). Gradients come home the same way backwards, each rank
adding its own.

To hand on is to wait for one message and then send another, while the rank computes. On a GPU that is the order of work
on a stream. Elsewhere a thread does it, which sleeps until a message has come.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from balancing.messages import start_message

__all__ = ["Hop", "Relay", "split_pieces"]

_PIECE_BYTES = 16 << 20  # large enough for a link's full rate, small beside an expert


def split_pieces(flat: torch.Tensor) -> Sequence[torch.Tensor]:
    """`flat` cut into the pieces in which it travels, the same on all ranks for the same length and type."""
    return flat.split(max(1, _PIECE_BYTES // flat.element_size()))


@dataclass(frozen=True)
class Hop:
    """What one rank does with one piece of one expert: receive it, add something of its own, and send it on.

    source, target: ranks in the group, None at the ends of the chain. piece: what is received into and sent. add: what
    is added in between, or None. tag: differs between messages of the same two ranks that may be under way at once.
    turn: how many messages come before the one that this rank sends; if all ranks work in the order of turns, no two
    wait for each other.
    """

    source: int | None
    target: int | None
    piece: torch.Tensor
    add: torch.Tensor | None
    tag: int
    turn: int

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends."""
        return 0 if self.target is None else self.piece.numel() * self.piece.element_size()

    def combine(self) -> None:
        """Add this rank's own, once the piece has come."""
        if self.add is not None:
            self.piece.add_(self.add)


class Relay:
    """Hops under way on one rank, from construction until `wait_sent`.

    On a GPU the waits make the current stream wait, not the host. They raise RuntimeError where a rank has gone or has
    not answered in the group's time.
    """

    def __init__(self, hops: Sequence[Hop], group: dist.ProcessGroup) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        self._hops = sorted(hops, key=lambda hop: hop.turn)  # keeps the tensors alive, too
        self._incoming: list[dist.Work] = []
        self._outgoing: list[dist.Work] = []
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._received: torch.cuda.Event | None = None
        self._sent: torch.cuda.Event | None = None
        if hops and hops[0].piece.is_cuda:
            self._on_stream(hops[0].piece.device)
        else:
            self._on_host()

    def wait_received(self) -> None:
        """All that this rank receives is here. It may still be sending."""
        if self._received is not None:
            torch.cuda.current_stream().wait_event(self._received)
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        for work in self._incoming:
            work.wait()
        self._incoming.clear()

    def wait_sent(self) -> None:
        """All is received and sent, so the tensors may be used for something else."""
        self.wait_received()
        if self._sent is not None:
            torch.cuda.current_stream().wait_event(self._sent)
        for work in self._outgoing:
            work.wait()
        self._outgoing.clear()

    def _on_host(self) -> None:
        # Receives first: gloo queues the note that a receive is ready behind the data of a send to the same rank.
        passing = []
        for hop in self._hops:
            if hop.source is not None:
                work = self._receive(hop)
                if hop.target is not None:
                    passing.append((work, hop))
                else:
                    self._incoming.append(work)
        self._outgoing = [self._send(hop) for hop in self._hops if hop.source is None]
        if passing:
            self._thread = threading.Thread(target=self._hand_on, args=(passing,), daemon=True)
            self._thread.start()

    def _hand_on(self, passing: list[tuple[dist.Work, Hop]]) -> None:
        try:
            for work, hop in passing:
                work.wait()
                with torch.no_grad():
                    hop.combine()
                self._outgoing.append(self._send(hop))
        except BaseException as error:  # for the thread that waits
            self._error = error

    def _on_stream(self, device: torch.device) -> None:
        # NCCL runs messages in the order in which they are started, so all ranks start those of one turn together.
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        turns = [hop.turn for hop in self._hops]
        last_received = max((hop.turn - 1 for hop in self._hops if hop.source is not None), default=-1)
        with torch.cuda.stream(stream):
            for turn in range(max(turns) + 1):
                operations = []
                for hop in self._hops:
                    if hop.source is not None and hop.turn == turn + 1:
                        operations.append(self._operation(dist.irecv, hop, hop.source))
                    if hop.target is not None and hop.turn == turn:
                        hop.combine()
                        operations.append(self._operation(dist.isend, hop, hop.target))
                for work in dist.batch_isend_irecv(operations) if operations else []:
                    work.wait()
                if turn == last_received:
                    self._received = stream.record_event()
            self._sent = stream.record_event()

    def _operation(self, send_or_receive: Callable, hop: Hop, other: int) -> dist.P2POp:
        return dist.P2POp(send_or_receive, hop.piece, self._ranks[other], self._group, hop.tag)

    def _receive(self, hop: Hop) -> dist.Work:
        assert hop.source is not None
        return start_message(self._operation(dist.irecv, hop, hop.source))

    def _send(self, hop: Hop) -> dist.Work:
        assert hop.target is not None
        return start_message(self._operation(dist.isend, hop, hop.target))
