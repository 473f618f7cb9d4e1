"""Accesses to memory, each checked against those of other streams before it.

On a GPU a stream reads what another one writes whenever it likes, unless an event, a wait for a stream or for a message
lies between. `StreamRaces` sees every kernel that torch starts (a dispatch mode, as torch's own
`torch.cuda._sanitizer` is) and every message and collective of `device_log`, with the clocks that are kept there. What
it adds to torch's sanitizer are ranges of bytes, since slots, buckets and packed messages are parts of one tensor, and
memory that goes back to the allocator. Two rules:

- A read comes after the last write of the same bytes; a write comes after all accesses. Messages read what is sent from
  the moment they are started and write what is received until somebody waits for them.
- Memory goes back to the stream that it was allocated on, which may give it to its next kernel: no other stream may
  still use it then, unless `record_stream` has said so.

On a GPU a backward pass runs on the stream of its forward pass. Nothing here needs that: side streams carry transfers
and what is added on their way, without gradients.
"""

import re
import weakref
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.checkers.device_log import DeviceLog, Site, show, site

__all__ = ["StreamRaces", "watch_streams"]

_ONLY_ALLOCATES = re.compile(r"aten::(empty|new_empty|empty_like|empty_strided|new_empty_strided)$")
_KEPT = 64  # findings
_MOST_RUNS = 8  # of rows that an operator takes; scattered over more, they count as all rows


class _Access(NamedTuple):
    stream: Any
    number: int  # of the kernel
    where: Site


class _Range:
    """Bytes that were accessed as one. reads: the last one of each stream since the write."""

    __slots__ = ("reads", "start", "stop", "write")

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.write: _Access | None = None
        self.reads: dict[Any, _Access] = {}

    def accesses(self) -> Iterable[_Access]:
        return self.reads.values() if self.write is None else (*self.reads.values(), self.write)


class _Memory:
    """A storage. stream: that it was allocated on. recorded: streams that it is kept for."""

    __slots__ = ("ranges", "recorded", "reference", "stream", "where")

    def __init__(self, stream: Any, where: Site) -> None:
        self.stream, self.where = stream, where
        self.ranges: dict[tuple[int, int], _Range] = {}
        self.recorded: set[Any] = set()
        self.reference: Any = None


class _Operator(NamedTuple):
    """What is known of an operator. written: places and names of arguments. fresh: its results are memory of their own.
    writes: and they are written."""

    kernel: bool
    written: frozenset[Any]
    fresh: bool
    writes: bool


class StreamRaces(TorchDispatchMode):
    """found: what is wrong, each pair of call sites once."""

    def __init__(self, log: DeviceLog) -> None:
        super().__init__()
        self.found: list[str] = []
        self._log = log
        self._memory: dict[int, _Memory] = {}
        self._operators: dict[Any, _Operator] = {}
        self._told: set[tuple[str, Site, Site]] = set()
        self._free: list[tuple[Any, Site, list[_Access]]] = []  # went back to a stream while these were under way

    # Kernels.

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = _known(func)
        if not operator.kernel or self._log.quiet:
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            reads: list[torch.Tensor] = []
            writes: list[torch.Tensor] = []
            for place, value in (*enumerate(args), *kwargs.items()):
                if isinstance(value, torch.Tensor):
                    (writes if place in operator.written else reads).append(value)
                elif isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
                    (writes if place in operator.written else reads).extend(t for t in value if t is not None)
            where = site(2)
            if operator.fresh:
                given = {tensor.untyped_storage()._cdata for tensor in (*reads, *writes) if _has_storage(tensor)}
                for tensor in result if isinstance(result, (list, tuple)) else (result,):
                    if _has_storage(tensor) and tensor.untyped_storage()._cdata not in given:
                        self._allocated(where)
                        if operator.writes:
                            writes.append(tensor)
                        else:
                            self._of(tensor, self._log.stream, where)
            if not operator.writes:
                reads = []
            reads, writes = _rows_alone(func, args, reads), _rows_alone(func, args, writes)
            if reads or writes:
                stream = self._log.stream
                self._log.launch(stream)
                self.accesses(stream, reads, writes, where)
        return result

    def accesses(self, stream: Any, reads: list[torch.Tensor], writes: list[torch.Tensor], where: Site) -> None:
        """The last kernel of a stream reads and writes these."""
        access = _Access(stream, self._log.number, where)
        with torch._C.DisableTorchFunction():
            for tensor in reads:
                self._access(tensor, access, False)
            for tensor in writes:
                self._access(tensor, access, True)

    def _of(self, tensor: torch.Tensor, stream: Any, where: Site) -> _Memory | None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        memory = self._memory.get(key)
        if memory is None:
            memory = self._memory[key] = _Memory(0 if isinstance(stream, str) else stream, where)
            memory.reference = weakref.ref(storage, lambda _: self._freed(key))
        return memory

    def _access(self, tensor: torch.Tensor, access: _Access, writes: bool) -> None:
        if not _has_storage(tensor) or not tensor.numel():
            return
        memory = self._of(tensor, access.stream, access.where)
        item = tensor.element_size()
        start = tensor.storage_offset() * item
        if tensor.is_contiguous():
            stop = start + tensor.numel() * item
        else:
            stop = start + item * (
                1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
            )
        ranges = memory.ranges
        own = ranges.get((start, stop))
        for other in list(ranges.values()) if len(ranges) > (own is not None) else ():
            if other is not own and other.start < stop and start < other.stop:
                self._check(other, access, writes)
                if writes and start <= other.start and other.stop <= stop:
                    del ranges[other.start, other.stop]
        if own is None:
            own = ranges[start, stop] = _Range(start, stop)
        else:
            self._check(own, access, writes)
        if writes:
            own.write = access
            own.reads = {}
        else:
            own.reads[access.stream] = access

    def _check(self, other: _Range, access: _Access, writes: bool) -> None:
        if other.write is not None and not self._ordered(other.write, access.stream):
            self._tell("written" if writes else "read", access.where, access.stream, "written", other.write)
        if writes:
            for read in other.reads.values():
                if not self._ordered(read, access.stream):
                    self._tell("written", access.where, access.stream, "read", read)

    def _ordered(self, access: _Access, stream: Any) -> bool:
        return (
            access.stream == stream
            or access.number in self._log.finished
            or self._log.clock(stream).get(access.stream, -1) >= access.number
        )

    def _tell(self, what: str, where: Site, stream: Any, before: str, other: _Access) -> None:
        if (what, where, other.where) not in self._told and len(self.found) < _KEPT:
            self._told.add((what, where, other.where))
            self.found.append(
                f"{what} on {_name(stream)} at {show(where)} while it may still be {before} on {_name(other.stream)} "
                f"at {show(other.where)}"
            )

    # The allocator.

    def _freed(self, key: int) -> None:
        memory = self._memory.pop(key)
        late = [
            access
            for part in memory.ranges.values()
            for access in part.accesses()
            # It is given away once the streams that it is kept for have done what they were given until now.
            if not any(self._ordered(access, stream) for stream in (memory.stream, *memory.recorded))
        ]
        if late:
            self._free.append((memory.stream, site(2) or memory.where, late))

    def _allocated(self, where: Site) -> None:
        """The current stream may get any memory that went back to it."""
        stream = self._log.stream
        for entry in [entry for entry in self._free if entry[0] == stream]:
            self._free.remove(entry)
            for access in entry[2]:
                if not self._ordered(access, stream):
                    self._tell("freed", entry[1], stream, "used", access)

    def record(self, tensor: torch.Tensor, stream: Any) -> None:
        with torch._C.DisableTorchFunction():
            self._of(tensor, self._log.stream, site(2)).recorded.add(stream.stream_id)


def _name(stream: Any) -> str:
    return f"the stream of {stream}" if isinstance(stream, str) else f"stream {stream}"


def _has_storage(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type == "cpu"


def _rows_alone(func: Any, args: tuple, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """`tensors`, where an operator that takes the rows of an index has these rows alone in the place of all."""
    name, target = func._schema.name, args[0] if args else None
    if name in ("aten::index_select", "aten::index_add_") and args[1] == 0:
        index = args[2]
    elif name in ("aten::index", "aten::index_put_") and len(args[1]) == 1:
        index = args[1][0]
    else:
        return tensors
    if not any(tensor is target for tensor in tensors) or index.dtype is torch.bool:
        return tensors
    wanted = index.unique()
    bounds = [0, *((wanted.diff() != 1).nonzero().flatten() + 1).tolist(), len(wanted)]
    if len(bounds) > _MOST_RUNS:
        return tensors
    runs = [(int(wanted[start]), int(wanted[stop - 1]) + 1) for start, stop in pairwise(bounds) if start < stop]
    return [tensor for tensor in tensors if tensor is not target] + [target[start:stop] for start, stop in runs]


def _known(func: Any) -> _Operator:
    schema = func._schema
    if func.namespace == "c10d" or func is torch.ops.aten.record_stream.default:
        return _Operator(False, frozenset(), False, False)
    written: set[Any] = set()
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {place, argument.name}
    returned = [result.alias_info for result in schema.returns]
    fresh = any(alias is None for alias in returned)
    writes = not _ONLY_ALLOCATES.match(schema.name)
    return _Operator(bool(written) or fresh, frozenset(written), fresh, writes)


def watch_streams(log: DeviceLog) -> StreamRaces:
    """Check from now on what this thread does."""
    races = StreamRaces(log)
    log.accesses = races.accesses
    torch.Tensor.record_stream = lambda tensor, stream: races.record(tensor, stream)
    races.__enter__()
    return races
