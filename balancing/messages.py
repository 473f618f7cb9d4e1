"""A lock under which a thread starts messages between ranks, one thread at a time.

Beside the thread that trains there are some that hand messages on. A process group is not promised to bear two threads
that start messages at once, so whoever may share it with another thread starts them here. Waiting needs no turn.
"""

import threading

import torch.distributed as dist

__all__ = ["start_message"]

_starting = threading.Lock()


def start_message(operation: dist.P2POp) -> dist.Work:
    """Start to send or receive. This rank must be part of the operation's group."""
    with _starting:
        work = operation.op(operation.tensor, operation.peer, operation.group, operation.tag)
    assert work is not None, "this rank is part of the group"
    return work
