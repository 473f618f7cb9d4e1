"""A record of the last operations that this rank started on each process group, for the report of a stall.

Every operation of `torch.distributed`, on a GPU or on a CPU, ends in a method of `ProcessGroup`, so these methods are
wrapped. Recorded are the kind of the operation, its number on the group, the shapes of its tensors, and the line that
called it. That costs the host a few microseconds an operation and never waits for the device. torch's flight recorder
is no replacement: on gloo it omits point-to-point messages, which pipelines wait for.

Operations that belong together have the same key and number on all ranks: a collective is the n-th of its group, a
message the n-th from one rank to another with its tag.
"""

import contextlib
import functools
import sys
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "BETWEEN", "COLLECTIVE", "COLLECTIVES", "MESSAGES", "GroupLog", "Operation", "key_of", "logs", "record_operations",
    "waiting_for",
]  # fmt: skip

COLLECTIVE = "collective"
_KEPT = 16  # operations of each group
MESSAGES = ("send", "recv")
# Methods of ProcessGroup. Names differ between versions of torch; those that exist are wrapped.
COLLECTIVES = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)
# Files whose frames lie between an operation and the line that called it.
_ROOT = Path(__file__).parents[3]
BETWEEN = (
    __file__,
    str(Path(torch.__file__).parent),
    str(_ROOT / "megatron" / "balanced" / "cpu"),
    str(_ROOT / "balancing" / "messages.py"),
)


@dataclass(slots=True, eq=False)
class Operation:
    """One operation that this rank started. number: from 1, among the operations with the same `key` on the group."""

    kind: str
    key: str
    number: int
    sizes: tuple[Any, ...]
    line: str
    at: float  # time.time()
    work: weakref.ref | None = None


class GroupLog:
    """The operations that this rank started on one group. ranks: global."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.description = group.group_desc
        try:
            self.ranks: list[int] = dist.get_process_group_ranks(group)
        except KeyError:  # a group that torch.distributed does not know
            self.ranks = list(range(group.size()))
        self.started: dict[str, int] = defaultdict(int)
        self.last: deque[Operation] = deque(maxlen=_KEPT)


logs: dict[str, GroupLog] = {}  # by the group's name, which is the same on all of its ranks
_waiting: dict[int, dist.Work] = {}  # by thread
_counting = threading.Lock()
_is_between: dict[str, bool] = {}  # by file


def key_of(kind: str, peer: int, tag: int) -> str:
    """The key of a message of this rank. kind: "send" or "recv". peer: the global rank at the other end."""
    return f"{kind} {peer} {tag}"


def waiting_for(thread: int) -> tuple[str, Operation] | None:
    """The group and the operation for whose end a host thread waits. thread: its ident."""
    work = _waiting.get(thread)
    if work is None:
        return None
    for name, log in [*logs.items()]:
        for operation in [*log.last]:
            if operation.work is not None and operation.work() is work:
                return name, operation
    return None


def _line() -> str:
    """The innermost line outside of torch and the other files of `BETWEEN`."""
    frame: Any = sys._getframe(2)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        between = _is_between.get(file)
        if between is None:
            between = _is_between[file] = file.startswith(BETWEEN)
        if not between:
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _sizes(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Shapes of tensors, for a list that of its first tensor, and split sizes."""
    sizes: list[Any] = []
    for arg in args:
        while isinstance(arg, (list, tuple)) and arg and not isinstance(arg[0], int):
            arg = arg[0]
        if isinstance(arg, torch.Tensor):
            sizes.append(tuple(arg.shape))
        elif isinstance(arg, list):
            sizes.append(arg)
    return tuple(sizes)


def _recorded(kind: str, original: Callable) -> Callable:
    is_message = kind in MESSAGES

    @functools.wraps(original)
    def start(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        log = logs.get(group.group_name)
        if log is None:
            log = logs[group.group_name] = GroupLog(group)
        key = key_of(kind, log.ranks[args[1]], args[2]) if is_message and len(args) > 2 else COLLECTIVE
        with _counting:
            log.started[key] = number = log.started[key] + 1
        operation = Operation(kind, key, number, _sizes(args), _line(), time.time())
        log.last.append(operation)  # before it starts, since it may never return
        work = original(group, *args, **kwargs)
        if work is not None:
            operation.work = weakref.ref(work)
        return work

    return start


def _recorded_wait(original: Callable) -> Callable:
    @functools.wraps(original)
    def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        _waiting[thread] = work
        try:
            return original(work, *args, **kwargs)
        finally:
            _waiting.pop(thread, None)

    return wait


@contextlib.contextmanager
def record_operations() -> Iterator[None]:
    """Record the operations that are started in this context."""
    owner: Any
    before = []
    for owner, names, replacement in (
        (dist.ProcessGroup, (*COLLECTIVES, *MESSAGES), _recorded),
        (dist.Work, ("wait",), lambda name, original: _recorded_wait(original)),
    ):
        for name in names:
            if (original := getattr(owner, name, None)) is not None:
                before.append((owner, name, original))
                setattr(owner, name, replacement(name, original))
    try:
        yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)
        logs.clear()
        _waiting.clear()
