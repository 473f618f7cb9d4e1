"""What a GPU would be given by one rank: operations on communicators, and who waits for whom.

gloo forgives what NCCL and CUDA do not: on the CPU device everything has happened when its call returns. A `DeviceLog`
(put in place by `noted_device`) keeps what would have been left to happen. Each stream has a clock, for which torch's
own `torch.cuda._sanitizer.StreamSynchronizations` counts kernels and waits. As on a GPU each communicator is a stream
of its own, and a message outside of a batch goes over a communicator of its two ranks. What the host reads (`item`,
`tolist`) is no wait here, because the CPU device cannot tell tensors of the host from others.

`collective_order` replays the operations of all ranks, `stream_races` checks accesses to memory against the clocks.
"""

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda._sanitizer import StreamSynchronizations

from balancing import ranges

__all__ = ["COLLECTIVES", "MESSAGES", "Clock", "DeviceLog", "Message", "Operation", "Site", "show", "site"]

Clock = dict[Any, int]  # stream -> number of the last kernel on it that has ended
Site = tuple[tuple[str, int], ...]  # file and line, the innermost first

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
_REPOSITORY = str(Path(__file__).parents[2]) + "/"
_BETWEEN = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parents[3] / "megatron" / "balanced" / "cpu"),
    *(str(Path(__file__).with_name(name)) for name in ("device_log.py", "noted_device.py", "stream_races.py")),
    str(Path(functools.__file__).parent / "contextlib"),
    str(Path(functools.__file__).parent / "threading"),
    str(Path(functools.__file__).parent / "functools"),
    ranges.__file__,
    "<",
)
_is_between: dict[str, bool] = {}


def site(frames: int = 4) -> Site:
    """The innermost lines that are not torch's nor of what watches it."""
    found: list[tuple[str, int]] = []
    frame: Any = sys._getframe(1)
    while frame is not None and len(found) < frames:
        name = frame.f_code.co_filename
        between = _is_between.get(name)
        if between is None:
            between = _is_between[name] = name.startswith(_BETWEEN)
        if not between:
            found.append((name, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def show(where: Site) -> str:
    """Paths from the root of the repository, or of the packages."""
    short = [name.removeprefix(_REPOSITORY).rpartition("site-packages/")[2] for name, _ in where]
    return " < ".join(f"{name}:{line}" for name, (_, line) in zip(short, where, strict=True))


@dataclass(slots=True)
class Message:
    """One send or receive. peer: global rank."""

    sends: bool
    peer: int
    bytes: int
    dtype: str
    tag: int
    where: Site


@dataclass(slots=True, eq=False)
class Operation:
    """One operation of this rank on one communicator.

    signature: what must be the same on all ranks. splits: rows to and from each rank, and their width. messages: what a
    batch consists of, empty for collectives. on_host: of a communicator that keeps the host, not the device.
    number: in the order of kernels. after, host, queue: kernels that end before this one can start, before the host
    launches it, and before anything behind them in the device's only queue starts.
    """

    comm: str
    ranks: tuple[int, ...]
    kind: str
    where: Site
    on_host: bool = False
    signature: tuple[Any, ...] = ()
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    messages: list[Message] = field(default_factory=list)
    number: int = 0
    after: Clock = field(default_factory=dict)
    host: Clock = field(default_factory=dict)
    queue: Clock = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kind} on {self.comm} at {show(self.where)}"


class DeviceLog:
    """What this rank has given to its device. accesses: told each operation with the tensors it reads and writes."""

    def __init__(self) -> None:
        self.syncs = StreamSynchronizations()
        self.number = 0
        self.operations: list[Operation] = []
        self.finished: set[int] = set()  # numbers of operations that the host was told have ended
        self.accesses: Callable[[Any, list[torch.Tensor], list[torch.Tensor], Site], None] | None = None
        self._current = threading.local()
        self._streams = 0
        self.streams_of_engine = 0  # that a balancer has made
        self._events = 0
        self._works: weakref.WeakKeyDictionary[dist.Work, tuple[Operation, Clock]] = weakref.WeakKeyDictionary()
        self._queue: Clock = {}
        self._batch: tuple[Operation, list[dist.Work], list, list] | None = None
        self.host_groups: set[str] = set()
        self.quiet = False  # while gloo works, whose own kernels are none of NCCL's
        self.unheard = 0  # above 0, waits are not noted: for faults that are planted

    # Streams.

    @property
    def stream(self) -> Any:
        """The current stream of this thread."""
        return getattr(self._current, "stream", 0)

    @stream.setter
    def stream(self, stream: Any) -> None:
        self._current.stream = stream

    def new_stream(self) -> int:
        self._streams += 1
        self.syncs.create_stream(self._streams)
        return self._streams

    def new_event(self) -> int:
        self._events += 1
        self.syncs.create_event(self._events)
        return self._events

    def clock(self, stream: Any) -> Clock:
        self.syncs._ensure_stream_exists(stream)
        return self.syncs.current_sync_states[stream]

    def launch(self, stream: Any) -> int:
        """A kernel on a stream. Returns its number."""
        self.number += 1
        self.syncs.update_seq_num(stream, self.number)
        return self.number

    def wait(self, stream: Any, clock: Clock) -> None:
        """A stream waits until a clock is reached; so does what is behind that in the device's only queue."""
        if self.unheard:
            return
        for state in (self.clock(stream), self._queue):
            self.syncs._state_wait_for_other(state, clock)

    def host_wait(self, clock: Clock) -> None:
        """The host waits, and so does all that it launches from now on."""
        for state in (*self.syncs.current_sync_states.values(), self.syncs.host_sync_state):
            self.syncs._state_wait_for_other(state, clock)

    # Communicators.

    def start(self, operation: Operation, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> Clock:
        """Note an operation. Returns the clock that who waits for it reaches."""
        stream = operation.comm
        self.syncs._ensure_stream_exists(stream)
        operation.host = _of_communicators(self.syncs.host_sync_state)
        if not operation.on_host:
            self.syncs._state_wait_for_other(self.clock(stream), self.clock(self.stream))
            operation.after = _of_communicators(self.clock(self.stream))
            operation.queue = dict(_of_communicators(self._queue))
        operation.number = self.launch(stream)
        self.operations.append(operation)
        if self.accesses is not None and not operation.on_host:
            self.accesses(stream, reads, writes, operation.where)
        return self.clock(stream).copy()

    def _carry_out(self, call: Callable[[], Any]) -> Any:
        self.quiet = True
        try:
            return call()
        finally:
            self.quiet = False

    def wait_for(self, work: dist.Work, call: Callable[[], Any]) -> Any:
        """A stream waits for an operation, or the host where the operation is its own or a barrier."""
        result = self._carry_out(call)
        if work not in self._works:
            return result
        operation, clock = self._works[work]
        if operation.on_host or operation.kind == "barrier":
            self.host_wait(clock)
        else:
            self.wait(self.stream, clock)
        return result

    def completed(self, work: dist.Work) -> None:
        if work in self._works:
            self.finished.add(self._works[work][0].number)

    @contextmanager
    def batch(self, operations_: list[dist.P2POp]) -> Iterator[None]:
        """Messages started within are one operation."""
        group = operations_[0].group or dist.group.WORLD
        operation = Operation(*self.identity(group), "messages", site())
        operation.on_host = group.group_name in self.host_groups
        self._batch = operation, [], [], []
        try:
            yield
        finally:
            operation, works, reads, writes = self._batch
            self._batch = None
        clock = self.start(operation, reads, writes)
        for work in works:
            self._works[work] = operation, clock

    @staticmethod
    def identity(group: dist.ProcessGroup) -> tuple[str, tuple[int, ...]]:
        name = group.group_desc if group.group_desc not in ("undefined", "") else "group"
        return f"{name} {group.group_name}", tuple(dist.get_process_group_ranks(group))

    def message(self, group: dist.ProcessGroup, kind: str, args: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        """Send or receive, by itself or in a batch."""
        (tensor,), peer, tag = args[0], args[1], args[2]
        comm, ranks = self.identity(group)
        message = Message(kind == "send", ranks[peer], tensor.nbytes, str(tensor.dtype), tag, site())
        ends = ([tensor], []) if message.sends else ([], [tensor])
        if self._batch is not None:
            operation, works, reads, writes = self._batch
            operation.messages.append(message)
            reads += ends[0]
            writes += ends[1]
            work = self._carry_out(call)
            works.append(work)
            return work
        pair = tuple(sorted((dist.get_rank(), ranks[peer])))
        operation = Operation(f"{comm}, ranks {pair[0]} and {pair[1]} alone", pair, kind, message.where)
        operation.messages.append(message)
        if group.group_name in self.host_groups:
            operation.comm, operation.ranks, operation.on_host = comm, ranks, True
        clock = self.start(operation, *ends)
        work = self._carry_out(call)
        self._works[work] = operation, clock
        return work

    def collective(self, group: dist.ProcessGroup, kind: str, args: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        operation = Operation(*self.identity(group), kind, site(), group.group_name in self.host_groups)
        operation.signature, operation.splits = _signature(kind, args, len(operation.ranks))
        clock = self.start(operation, *_ends(kind, args))
        work = self._carry_out(call)
        self._works[work] = operation, clock
        return work

    def new_group(self, ranks: Any, call: Callable[[], Any], on_host: bool) -> Any:
        """All ranks of the job make a group together, in one order."""
        _, everyone = self.identity(dist.group.WORLD)
        operation = Operation(f"groups made in {dist.group.WORLD.group_name}", everyone, "new_group", site(), True)
        operation.signature = ("all" if ranks is None else tuple(ranks),)
        clock = self.start(operation, [], [])
        group = call()
        self.host_wait(clock)
        if on_host and isinstance(group, dist.ProcessGroup):
            self.host_groups.add(group.group_name)
        return group

    def destroy_group(self, group: dist.ProcessGroup | None, call: Callable[[], Any]) -> Any:
        """The ranks of a group destroy it together: the host of each waits for its operations and for the others."""
        names = dist.distributed_c10d._world.pg_names
        everything = group is None or group is dist.group.WORLD
        for each in sorted(names, key=lambda one: names[one], reverse=True) if everything else [group]:
            comm, ranks = self.identity(each)
            self.host_wait(self.clock(comm).copy())
            operation = Operation(f"{comm} at its end", ranks, "destroy_process_group", site(), True)
            self.host_wait(self.start(operation, [], []))
        return call()


def _of_communicators(clock: Clock) -> Clock:
    return {stream: number for stream, number in clock.items() if isinstance(stream, str) and number}


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, (list, tuple)) else []


def _signature(kind: str, args: tuple[Any, ...], ranks: int) -> tuple[tuple[Any, ...], Any]:
    """What must be the same on all ranks, and for an all-to-all what goes where."""
    options = args[-1]
    reduction = getattr(options, "reduceOp", None)
    named = str(getattr(reduction, "op", reduction)), getattr(options, "rootRank", None)
    if kind in ("all_to_all_single", "alltoall_base"):
        output, input_, *splits = args[:4]
        parts = []
        for tensor, split in zip((input_, output), (splits[1], splits[0]), strict=True):
            width = tensor[0].nbytes if len(tensor) else 0
            rows = list(split) if split else [len(tensor) // ranks] * ranks
            parts.append(tuple(count * width for count in rows))
        return (str(input_.dtype),), tuple(parts)
    if kind == "alltoall":
        parts = [tuple(tensor.nbytes for tensor in tensors) for tensors in (args[1], args[0])]
        return (), tuple(parts)
    if kind in ("gather", "scatter", "barrier"):
        return named, None
    return (*((tensor.numel(), str(tensor.dtype)) for arg in args[:2] for tensor in _tensors(arg)), *named), None


def _ends(kind: str, args: tuple[Any, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What a collective reads and what it writes."""
    if kind in ("allreduce", "allreduce_coalesced", "broadcast", "reduce"):
        return _tensors(args[0]), _tensors(args[0])
    return (_tensors(args[1]), _tensors(args[0])) if len(args) > 1 else ([], [])
