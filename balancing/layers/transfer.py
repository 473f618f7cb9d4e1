"""Who sends which part of which tensor to whom, when the ranks that hold it change.

A layer that moves to another pipeline stage takes all its state along: weights, main parameters and moments. Of these
a distributed optimizer keeps pieces on all data-parallel ranks, cut anew on each stage. Both are one problem: ranges of
flat tensors lie on some ranks and must lie on others. `plan_transfers` solves it from the two lists alone, so that
every rank knows its part without asking; `exchange` carries it out, one message for each pair of ranks, all under way
at once.
"""

import datetime
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

__all__ = ["Piece", "Transfer", "exchange", "plan_transfers"]


class Piece(NamedTuple):
    """Elements start to stop of the flat tensor named `tensor`, on `rank`."""

    tensor: str
    rank: int
    start: int
    stop: int


class Transfer(NamedTuple):
    """Elements start to stop of the flat tensor go from rank `source` to rank `target`, which may be the same."""

    tensor: str
    source: int
    target: int
    start: int
    stop: int


def plan_transfers(held: Iterable[Piece], wanted: Iterable[Piece]) -> list[Transfer]:
    """The transfers that give every rank what it shall hold, in the order of tensors in `wanted`.

    What a rank has already it takes from itself. Else, of the ranks that hold the same elements, the first of the new
    ranks takes from the first of the old, the second from the second: replicas share the work, and state that differs
    between replicas goes to the same place among them. Raises ValueError where nobody holds what is wanted.
    """
    holders: dict[str, list[Piece]] = defaultdict(list)
    for piece in sorted(held):
        holders[piece.tensor].append(piece)
    by_tensor: dict[str, list[Piece]] = {}
    for piece in wanted:
        by_tensor.setdefault(piece.tensor, []).append(piece)
    transfers = []
    for tensor, pieces in by_tensor.items():
        for number, piece in enumerate(sorted(pieces)):
            transfers += _fill(piece, holders[tensor], number)
    return transfers


def _fill(wanted: Piece, held: Sequence[Piece], number: int) -> list[Transfer]:
    """What fills `wanted`, the `number`-th piece of its tensor, from `held`."""
    transfers = []
    at = wanted.start
    own = [piece for piece in held if piece.rank == wanted.rank and piece.start < wanted.stop]
    while at < wanted.stop:
        source = next((piece for piece in own if piece.start <= at < piece.stop), None)
        stop = wanted.stop
        if source is None:
            there = [piece for piece in held if piece.start <= at < piece.stop]
            if not there:
                raise ValueError(f"no rank holds element {at} of {wanted.tensor}, which rank {wanted.rank} needs")
            source = there[number % len(there)]
            stop = min([stop, *(piece.start for piece in own if piece.start > at)])
        stop = min(stop, source.stop)
        transfers.append(Transfer(wanted.tensor, source.rank, wanted.rank, at, stop))
        at = stop
    return transfers


def exchange(
    transfers: Sequence[Transfer],
    read: Callable[[Transfer], torch.Tensor],
    write: Callable[[Transfer], torch.Tensor],
    group: dist.ProcessGroup,
    timeout: datetime.timedelta,
) -> int:
    """Carry out this rank's part of `transfers`, and return the bytes that it sent to others.

    read, write: the flat tensor of the elements that a transfer takes on this rank, and of those that it fills here.
    group: its ranks are numbered as in the transfers; all of its ranks must have met in a collective before. timeout:
    of each wait. Every rank calls it with the same transfers in the same order. Raises RuntimeError when a message does
    not arrive in time or its peer is gone.
    """
    rank = dist.get_rank(group)
    outgoing: dict[int, list[torch.Tensor]] = defaultdict(list)
    incoming: dict[int, list[torch.Tensor]] = defaultdict(list)
    for transfer in transfers:
        if transfer.source == rank == transfer.target:
            write(transfer).copy_(read(transfer))
        elif transfer.source == rank:
            outgoing[transfer.target].append(read(transfer))
        elif transfer.target == rank:
            incoming[transfer.source].append(write(transfer))
    messages = {peer: _packed(parts) for peer, parts in outgoing.items()}
    arriving = {peer: parts[0].new_empty(_bytes(parts), dtype=torch.uint8) for peer, parts in incoming.items()}
    operations = [_operation(dist.isend, flat, peer, group) for peer, flat in messages.items()]
    operations += [_operation(dist.irecv, flat, peer, group) for peer, flat in arriving.items()]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait(timeout)
    for peer, parts in incoming.items():
        at = 0
        for part in _widest_first(parts):
            size = part.numel() * part.element_size()
            part.copy_(arriving[peer][at : at + size].view(part.dtype))
            at += size
    return sum(flat.numel() for flat in messages.values())


def _operation(kind: Callable, flat: torch.Tensor, peer: int, group: dist.ProcessGroup) -> dist.P2POp:
    return dist.P2POp(kind, flat, dist.get_global_rank(group, peer), group)


def _widest_first(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """In an order in which each part of a message begins at a multiple of the size of its elements."""
    return sorted(parts, key=lambda part: -part.element_size())


def _packed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.contiguous().view(torch.uint8) for part in _widest_first(parts)])


def _bytes(parts: Sequence[torch.Tensor]) -> int:
    return sum(part.numel() * part.element_size() for part in parts)
