"""Messages between ranks, under way while the rank computes.

An exchange is a set of messages, one a peer, each made of ranges of rows. All of them start together on one
communicator: receives first, because gloo holds back a receive that is posted after a send to the same rank. Rows that
stand behind one another are sent and received in place; others are packed.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from balancing.sequences.tasks import Exchange, Message

__all__ = ["Pending", "Transport"]


class Pending:
    """An exchange under way. The tensors it reads and writes belong to it until `wait` has returned.

    On a GPU `wait` makes the current stream wait, not the host.
    """

    def __init__(
        self,
        works: Sequence[dist.Work],
        arrived: Sequence[tuple[Message, torch.Tensor]],
        into: torch.Tensor,
        adds: bool,
    ) -> None:
        self._works, self._arrived, self._into, self._adds = works, arrived, into, adds

    def wait(self) -> None:
        """Return when everything has come and gone. What is to be added is added in order of peers."""
        for work in self._works:
            work.wait()
        for message, packed in self._arrived:
            row = 0
            for start, stop in message.rows:
                part = packed[row : row + stop - start]
                row += stop - start
                if self._adds:
                    self._into[start:stop] += part
                else:
                    self._into[start:stop] = part
        self._works, self._arrived = (), ()


class Transport:
    """Starts exchanges on one communicator, that of `group` (all ranks by default). rank: in the group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = dist.group.WORLD if group is None else group
        assert self.group is not None, "torch.distributed is initialized"
        self.rank = dist.get_rank(self.group)
        self._ranks = dist.get_process_group_ranks(self.group)

    def start(self, exchange: Exchange, rows: torch.Tensor, into: torch.Tensor, tag: int = 0) -> Pending:
        """Send rows of `rows` [row, ...] and receive rows of `into` [row, ...], both contiguous.

        All ranks start exchanges that meet in the same order. tag: differs between exchanges under way at once.
        """
        operations: list[dist.P2POp] = []
        arrived: list[tuple[Message, torch.Tensor]] = []
        own = {message.peer: message for message in exchange.sends}
        for message in exchange.receives:
            here = message.peer == self.rank
            if here:
                arrived.append((message, _packed(rows, own[self.rank])))
                continue
            in_place = len(message.rows) == 1 and not exchange.adds
            buffer = into[slice(*message.rows[0])] if in_place else into.new_empty(message.tokens, *into.shape[1:])
            if not in_place:
                arrived.append((message, buffer))
            operations.append(self._operation(dist.irecv, buffer, message.peer, tag))
        for message in exchange.sends:
            if message.peer != self.rank:
                operations.append(self._operation(dist.isend, _packed(rows, message), message.peer, tag))
        return Pending(self._launch(operations), arrived, into, exchange.adds)

    def _operation(self, kind: Callable, tensor: torch.Tensor, peer: int, tag: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, self._ranks[peer], self.group, tag)

    def _launch(self, operations: Sequence[dist.P2POp]) -> Sequence[dist.Work]:
        if not operations:
            return ()
        if operations[0].tensor.is_cuda:
            return dist.batch_isend_irecv(list(operations))
        return [_started(op.op(op.tensor, op.peer, op.group, op.tag)) for op in operations]


def _packed(rows: torch.Tensor, message: Message) -> torch.Tensor:
    parts = [rows[start:stop] for start, stop in message.rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is part of the group"
    return work
