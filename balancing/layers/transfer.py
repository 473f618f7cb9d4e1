"""Transfers of tensors between ranks when layers move: which rank sends which elements to which other rank.

A layer moves to another pipeline stage with its weights, main parameters and optimizer moments. A distributed optimizer
shards main parameters and moments over data-parallel ranks, differently on each stage. Both cases are the same problem:
ranges of flat tensors are on some ranks and must be on others. `plan_transfers` needs only these two lists, so all
ranks compute the same transfers without communication. `run_transfers` carries them out with one message for each pair
of ranks, all in flight at once.
"""

import datetime
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

__all__ = ["Piece", "Transfer", "plan_transfers", "run_transfers"]


class Piece(NamedTuple):
    """Elements start to stop - 1 of the flat tensor named `tensor`, on `rank`."""

    tensor: str
    rank: int
    start: int
    stop: int


class Transfer(NamedTuple):
    """Elements start to stop - 1 of the flat tensor go from rank `source` to rank `target`, which may be the same."""

    tensor: str
    source: int
    target: int
    start: int
    stop: int


def plan_transfers(stored: Iterable[Piece], requested: Iterable[Piece]) -> list[Transfer]:
    """The transfers that give every rank the pieces it requests, in the order of tensors in `requested`.

    A rank that already holds elements copies them from itself. Otherwise, of the ranks that request the same elements,
    the first receives from the first rank that holds them, the second from the second, and so on. Replicas thus share
    the work, and state that differs between replicas stays with the replica of the same number. Raises ValueError if no
    rank holds a requested element.
    """
    holders: dict[str, list[Piece]] = defaultdict(list)
    for piece in sorted(stored):
        holders[piece.tensor].append(piece)
    by_tensor: dict[str, list[Piece]] = {}
    for piece in requested:
        by_tensor.setdefault(piece.tensor, []).append(piece)
    transfers = []
    for tensor, pieces in by_tensor.items():
        for number, piece in enumerate(sorted(pieces)):
            transfers += _fill(piece, holders[tensor], number)
    return transfers


def _fill(requested: Piece, stored: Sequence[Piece], number: int) -> list[Transfer]:
    """The transfers from `stored` that fill `requested`, the `number`-th piece of its tensor."""
    transfers = []
    element = requested.start
    local = [piece for piece in stored if piece.rank == requested.rank and piece.start < requested.stop]
    while element < requested.stop:
        source = next((piece for piece in local if piece.start <= element < piece.stop), None)
        stop = requested.stop
        if source is None:
            sources = [piece for piece in stored if piece.start <= element < piece.stop]
            if not sources:
                needs = f"{requested.tensor}, which rank {requested.rank} needs"
                raise ValueError(f"no rank holds element {element} of {needs}")
            source = sources[number % len(sources)]
            stop = min([stop, *(piece.start for piece in local if piece.start > element)])
        stop = min(stop, source.stop)
        transfers.append(Transfer(requested.tensor, source.rank, requested.rank, element, stop))
        element = stop
    return transfers


def run_transfers(
    transfers: Sequence[Transfer],
    read: Callable[[Transfer], torch.Tensor],
    write: Callable[[Transfer], torch.Tensor],
    process_group: dist.ProcessGroup,
    timeout: datetime.timedelta,
) -> int:
    """Carry out this rank's part of `transfers`. Returns the bytes that it sent to other ranks.

    transfers: the same on every rank and in the same order.
    read: transfer -> flat tensor of the elements that the transfer takes from this rank.
    write: transfer -> flat tensor of the elements that the transfer fills on this rank.
    process_group: its ranks have the numbers used in `transfers`. A collective must have run in it before, to connect
        its ranks.
    timeout: longest wait for a message.

    Raises RuntimeError if a message does not arrive in time or its peer has ended.
    """
    rank = dist.get_rank(process_group)
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
    operations = [_operation(dist.isend, flat, peer, process_group) for peer, flat in messages.items()]
    operations += [_operation(dist.irecv, flat, peer, process_group) for peer, flat in arriving.items()]
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


def _operation(kind: Callable, flat: torch.Tensor, peer: int, process_group: dist.ProcessGroup) -> dist.P2POp:
    return dist.P2POp(kind, flat, dist.get_global_rank(process_group, peer), process_group)


def _widest_first(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`parts` by descending element size, so that each part of a message begins at a multiple of its element size."""
    return sorted(parts, key=lambda part: -part.element_size())


def _packed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.contiguous().view(torch.uint8) for part in _widest_first(parts)])


def _bytes(parts: Sequence[torch.Tensor]) -> int:
    return sum(part.numel() * part.element_size() for part in parts)
