"""Stand-ins for parts of `torch.cuda` and for data loaders and compilation, while the CPU is the device.

Streams and events of a device that runs in order, the memory figures of this process, and the CPU's random generator.
`megatron.balanced.cpu.device` has the table of what each one replaces.
"""

import contextlib
import functools
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.data

__all__ = [
    "Event",
    "Properties",
    "Stream",
    "do_not_compile",
    "generator_state",
    "loader_iter",
    "memory_free_and_total",
    "memory_peak",
    "memory_resident",
    "memory_stats",
    "memory_total",
    "memory_used_on_host",
    "nothing",
    "reset_memory_peak",
    "seed",
    "set_generator_state",
]


class Stream:
    """A stream of a device that runs in order: everything launched before has already completed."""

    device = torch.device("cpu")
    device_index = 0
    device_type = 1  # CUDA's number, which is what torch.cuda.Stream reports
    stream_id = 0
    cuda_stream = 0
    priority = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record()
        return event

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exc: object) -> None:
        pass


class Event:
    """A point in time of the device; `elapsed_time` is in milliseconds, as CUDA's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._seconds: float | None = None

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        if self._seconds is None or end._seconds is None:
            raise RuntimeError("both events must be recorded before elapsed_time()")
        return (end._seconds - self._seconds) * 1e3

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def _page_bytes() -> int:
    return resource.getpagesize()


def memory_resident(*args: Any, **kwargs: Any) -> int:
    """Bytes of this process in memory now."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * _page_bytes()
    except OSError:  # not Linux
        return memory_peak()


def memory_peak(*args: Any, **kwargs: Any) -> int:
    """The most bytes of this process in memory since it started, or since `reset_memory_peak`."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    kilobyte = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobyte


def reset_memory_peak(*args: Any, **kwargs: Any) -> None:
    """Start `memory_peak` again from the current resident size."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as clear_refs:
        clear_refs.write("5")  # see proc(5)


def memory_total() -> int:
    """Bytes of memory of this host."""
    return os.sysconf("SC_PHYS_PAGES") * _page_bytes()


def memory_free_and_total(*args: Any, **kwargs: Any) -> tuple[int, int]:
    """`torch.cuda.mem_get_info` of this host, in bytes."""
    return memory_total() - memory_used_on_host(), memory_total()


def memory_used_on_host(*args: Any, **kwargs: Any) -> int:
    """Bytes of memory in use on this host, by all processes."""
    import psutil

    return int(psutil.virtual_memory().used)


def memory_stats(*args: Any, **kwargs: Any) -> dict[str, int]:
    """`torch.cuda.memory_stats` for a process: the allocator's figures are the resident set."""
    now, peak = memory_resident(), memory_peak()
    stats = {"num_alloc_retries": 0, "num_ooms": 0, "num_device_alloc": 0, "num_device_free": 0}
    for kind in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        stats |= {f"{kind}.all.current": now, f"{kind}.all.peak": peak, f"{kind}.all.allocated": peak}
    return stats | {"allocation.all.current": 0, "allocation.all.allocated": 0, "inactive_split_bytes.all.current": 0}


class Properties:
    """The result of `torch.cuda.get_device_properties`."""

    name = "CPU"
    major, minor = 8, 0  # the oldest for which Megatron allows grouped GEMM, so that it enables nothing newer
    multi_processor_count = os.cpu_count() or 1
    total_memory = memory_total()


def generator_state(device: Any = "cuda") -> torch.Tensor:
    return torch.default_generator.get_state()


def set_generator_state(state: torch.Tensor, device: Any = "cuda") -> None:
    torch.default_generator.set_state(state)


def seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def nothing(*args: Any, **kwargs: Any) -> None:
    return None


def do_not_compile(model: Callable | None = None, **options: Any) -> Callable:
    """`torch.compile` that returns the function itself: the back ends for accelerators need real streams."""
    return (lambda function: function) if model is None else model


def loader_iter(original: Callable) -> Callable:
    """`DataLoader.__iter__` that leaves the random state as it was.

    A data loader draws the seed of its workers from the CPU's generator. On a GPU that does not change the device's
    generator, which dropout draws from. Here both are the same generator, and only the first rank of a tensor-parallel
    group has a loader.
    """

    @functools.wraps(original)
    def __iter__(self: torch.utils.data.DataLoader) -> Iterator:
        state = torch.default_generator.get_state()
        try:
            return original(self)
        finally:
            torch.default_generator.set_state(state)

    return __iter__
