"""Processor time of calls in additions of 8 x 8 numbers, and what they start: kernels, messages, functions of Python.

An addition is timed between the repeats of a call, on the same processor. So the multiple tells little of the machine,
and can be compared with that of another one. Processor time is that of all threads of the process.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.replaced import replace_name

__all__ = ["Counted", "Measured", "fake_ranks", "measure"]

_ADDITIONS = 500  # between two repeats
_MESSAGES = ("send", "recv")
_COLLECTIVES = (
    *("all_to_all_single", "alltoall_base", "alltoall", "allgather", "_allgather_base", "all_gather_single"),
    *("allreduce", "broadcast", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
)


@dataclass
class Counted:
    """What a call starts.

    launches: operations on tensors that write memory, and kernels.
    bytes: written by operations on tensors; kernels add theirs.
    sends, receives: messages from one rank to another.
    collectives: of a process group.
    calls: functions of Python that are entered.
    """

    launches: int = 0
    bytes: int = 0
    sends: int = 0
    receives: int = 0
    collectives: int = 0
    calls: int = 0

    @property
    def messages(self) -> int:
        """Messages, sent or received, and collectives."""
        return self.sends + self.receives + self.collectives


@dataclass(frozen=True)
class Measured:
    """A call, measured. seconds: of the processor. additions: as many take as long. counted: what it starts."""

    seconds: float
    additions: float
    counted: Counted


def measure(call: Callable[[], object], counted: Counted, repeats: int = 50) -> Measured:
    """Measure a call: the quickest of `repeats`, in additions of 8 x 8, the quickest as well.

    counted: counts of one call; kernels that the caller has replaced add to its `launches` meanwhile.
    """
    call()
    with _count(counted):
        counted.__init__()  # type: ignore[misc]
        call()
    found = Counted(**vars(counted))
    with _count_calls(found):
        call()
    numbers = torch.ones(8, 8)
    of_call, of_addition = [], []
    for _ in range(repeats):
        begin = time.process_time()
        for _ in range(_ADDITIONS):
            torch.add(numbers, numbers)
        middle = time.process_time()
        call()
        of_addition.append((middle - begin) / _ADDITIONS)
        of_call.append(time.process_time() - middle)
    return Measured(min(of_call), min(of_call) / min(of_addition), found)


class _Writes(TorchDispatchMode):
    """Counts operations that write memory, and the bytes."""

    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self._counted = counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        started = func.namespace == "c10d" or func.is_view
        if not (started or name.startswith(("empty", "new_empty", "detach", "_unsafe_view"))):
            outputs = result if isinstance(result, (tuple, list)) else (result,)
            if name.startswith(("index_add", "index_put", "index_copy")):  # in place, in some rows
                outputs = [x for x in args if isinstance(x, torch.Tensor)][-1:]
            self._counted.launches += 1
            self._counted.bytes += sum(x.numel() * x.itemsize for x in outputs if isinstance(x, torch.Tensor))
        return result


@contextmanager
def _count(counted: Counted) -> Iterator[None]:
    """Count launches and messages of this thread."""
    kind = dist.ProcessGroup
    originals = {name: vars(kind)[name] for name in (*_MESSAGES, *_COLLECTIVES) if name in vars(kind)}

    def replace(name: str, original: Callable) -> None:
        what = {"send": "sends", "recv": "receives"}.get(name, "collectives")

        def count(*args: Any, **kwargs: Any) -> Any:
            setattr(counted, what, getattr(counted, what) + 1)
            return original(*args, **kwargs)

        replace_name(kind, name, count)

    for name in originals:
        replace(name, getattr(kind, name))
    try:
        with _Writes(counted):
            yield
    finally:
        for name, original in originals.items():
            setattr(kind, name, original)


@contextmanager
def _count_calls(counted: Counted) -> Iterator[None]:
    """Count functions of Python that this thread enters."""

    def count(frame: Any, event: str, argument: Any) -> None:
        counted.calls += event == "call"

    counted.calls = 0
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)


@contextmanager
def fake_ranks(rank: int, ranks: int) -> Iterator[None]:
    """This process as one rank of torch's fake process group, which starts nothing and waits for nothing.

    Its uneven all-to-all would copy rows to itself, once for each rank; here it is called without rows.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    kind, name = dist.ProcessGroup, next(name for name in _COLLECTIVES if name in vars(dist.ProcessGroup))
    original, start, nothing = vars(kind)[name], getattr(kind, name), torch.empty(0)

    def without_rows(group: Any, output: Any, given: Any, received: Any, sent: Any, *options: Any) -> Any:
        if not received and not sent:
            return start(group, output, given, received, sent, *options)
        return start(group, nothing, nothing, [0] * len(received), [0] * len(sent), *options)

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    replace_name(kind, name, without_rows)
    try:
        yield
    finally:
        setattr(kind, name, original)
        dist.destroy_process_group()
