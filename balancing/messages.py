"""Messages between ranks: the communicator that they need, and a lock under which one thread at a time starts them.

Beside the thread that trains there are some that hand messages on. A process group is not promised to bear two threads
that start messages at once, so whoever may share it with another thread starts them here. Waiting needs no turn.
"""

import threading
import weakref

import torch
import torch.distributed as dist

__all__ = ["connect", "start_message"]

_starting = threading.Lock()
_connected: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def connect(group: dist.ProcessGroup) -> None:
    """Build the communicator of `group`, which all of its ranks do together. Does nothing the second time.

    NCCL builds it at the first use of the group. If that were a message between two ranks, they would hang, since the
    others do not take part in it.
    """
    if group not in _connected:
        if dist.get_backend(group) == "nccl":
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
        _connected.add(group)


def start_message(operation: dist.P2POp) -> dist.Work:
    """Start to send or receive, on gloo. This rank must be part of the operation's group.

    NCCL would first build a communicator of the two ranks for a message outside of a batch, for which each rank waits.
    """
    assert dist.get_backend(operation.group) != "nccl", "messages over NCCL are started in batches"
    with _starting:
        work = operation.op(operation.tensor, operation.peer, operation.group, operation.tag)
    assert work is not None, "this rank is part of the group"
    return work
