"""Messages between two ranks and between all: set-up of the communicator, and how a message is started.

Other threads than the training thread relay messages. torch does not promise that two threads may start messages in one
process group at once, so code that shares a process group between threads starts its messages here. Waiting for a
message needs no lock.

`torch.distributed.all_to_all_single` and `isend` check their arguments and their process group at every call, in twenty
functions of Python. What a plan has prepared needs no check at each layer.
"""

import threading
import weakref
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from balancing.launch import detect_launch

__all__ = ["connect", "runs_nccl", "start_all_to_all", "start_message"]

_starting = threading.Lock()
_connected: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
# In newer versions of torch, and in older ones.
_ALL_TO_ALL = "all_to_all_single" if hasattr(dist.ProcessGroup, "all_to_all_single") else "alltoall_base"
_options = dist.AllToAllOptions()
_options.asyncOp = True
_ALL_PAIRS = 16  # ranks of the largest process group in which all pairs are connected


def runs_nccl(process_group: dist.ProcessGroup | None = None) -> bool:
    """Whether messages of GPUs go over NCCL. A loop may name a backend for each device: "cpu:gloo,cuda:nccl"."""
    return "nccl" in dist.get_backend(process_group)


def connect(process_group: dist.ProcessGroup, peers: Iterable[int] | None = None) -> None:
    """Build the communicator of `process_group` and connect pairs of its ranks. All its ranks call it together. A
    second call does nothing.

    peers: global ranks to connect this rank to, if the process group has more than 16 ranks; by default the ranks of
        its node. The choice must be mutual: each peer names this rank, too. Smaller groups connect all pairs.

    NCCL builds a communicator at its first use. If the first use were a message between two ranks, they would hang,
    since the other ranks do not take part in it. NCCL connects a pair of ranks at their first message: both hosts wait
    for each other, and NCCL allocates memory that a measurement of free memory would otherwise miss. Pairs that are not
    among `peers` connect at their first message.
    """
    if process_group in _connected:
        return
    if runs_nccl(process_group):
        dist.all_reduce(torch.zeros(1, device="cuda"), group=process_group)
        _connect_pairs(process_group, _peers(process_group, peers))
    _connected.add(process_group)


def _peers(process_group: dist.ProcessGroup, peers: Iterable[int] | None) -> list[int]:
    """The ranks to connect with, ascending."""
    rank, ranks = dist.get_rank(), dist.get_process_group_ranks(process_group)
    if len(ranks) > _ALL_PAIRS:
        per_node = detect_launch().ranks_per_node
        wanted = range(rank // per_node * per_node, (rank // per_node + 1) * per_node) if peers is None else peers
        ranks = sorted(set(ranks) & set(wanted))
    return [peer for peer in ranks if peer != rank]


def _connect_pairs(process_group: dist.ProcessGroup, peers: list[int]) -> None:
    """Exchange a byte with each of `peers`, in one batch."""
    sent = torch.zeros(1, dtype=torch.uint8, device="cuda")
    messages = [dist.P2POp(dist.isend, sent, peer, process_group) for peer in peers]
    messages += [dist.P2POp(dist.irecv, torch.empty_like(sent), peer, process_group) for peer in peers]
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()


def start_message(operation: dist.P2POp) -> dist.Work:
    """Start to send or receive over gloo. This rank must be part of the operation's process group.

    Not for NCCL: for a message outside of a batch, NCCL first builds a communicator of the two ranks, and both wait.
    """
    assert not runs_nccl(operation.group), "messages over NCCL are started in batches"
    start = operation.group.send if operation.op is dist.isend else operation.group.recv
    with _starting:
        work: dist.Work = start([operation.tensor], operation.group_peer, operation.tag)
    return work


def start_all_to_all(
    into: torch.Tensor,
    rows: torch.Tensor,
    received: Sequence[int],
    sent: Sequence[int],
    process_group: dist.ProcessGroup,
) -> dist.Work:
    """Start an uneven all-to-all. This rank must be part of the process group.

    into, rows: contiguous tensors of one type, of received rows and of rows to send.
    received, sent: rows from and to each rank of the process group.
    """
    work: dist.Work = getattr(process_group, _ALL_TO_ALL)(into, rows, received, sent, _options)
    return work
