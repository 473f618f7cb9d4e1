"""Time on a device, waiting left out.

A rank that waits for its neighbour is not busy. On a GPU, CUDA events placed around a kernel tell the two apart.
On a CPU the same holds for the CPU time of the thread that computes: it stands still while the thread waits for a
message. The emulated cluster adds one more kind of work, `pace`: a timed wait that stands for a modelled kernel. It
uses no CPU time, so it is counted apart, and the device clock of a CPU is the sum of both.
"""

import threading
import time
from typing import Any, Protocol

import torch

__all__ = ["CpuClock", "CudaClock", "DeviceClock", "device_time", "pace"]

_paced = threading.local()


def device_time() -> float:
    """Seconds of work this thread's CPU device has done so far: CPU time of the thread plus paced seconds.

    Only differences of two readings in one thread mean anything.
    """
    return time.thread_time() + getattr(_paced, "seconds", 0.0)


def pace(seconds: float) -> None:
    """Occupy the device for `seconds` (>= 0) of wall-clock time, as a kernel that runs that long would.

    Raises ValueError for a negative duration.
    """
    if seconds < 0:
        raise ValueError(f"pace() takes a duration of at least 0 seconds, not {seconds}")
    begin_wall, begin_cpu = time.perf_counter(), time.thread_time()
    end = begin_wall + seconds
    while (left := end - time.perf_counter()) > 0:
        time.sleep(left)
    used = time.thread_time() - begin_cpu  # the sleep's own CPU time is part of the paced interval, not more work
    _paced.seconds = getattr(_paced, "seconds", 0.0) + (time.perf_counter() - begin_wall) - used


class DeviceClock(Protocol):
    """Marks moments of a device's work, and tells later how far apart they were. Marking never waits for the device.

    tells_waiting: whether seconds of work leave out what the device waits for other ranks.
    """

    tells_waiting: bool

    def mark(self) -> Any:
        """This moment, in the order of the work launched so far."""

    def seconds(self, origin: Any, begin: Any, end: Any) -> tuple[float, float, float]:
        """Seconds from `origin` to `begin`, from `begin` to `end`, and of work between these two.

        Only to be asked when the device has passed all three marks.
        """


class CpuClock:
    """Wall-clock and device time of the calling thread; a mark is both."""

    tells_waiting = True

    def mark(self) -> tuple[float, float]:
        return time.perf_counter(), device_time()

    def seconds(
        self, origin: tuple[float, float], begin: tuple[float, float], end: tuple[float, float]
    ) -> tuple[float, float, float]:
        return begin[0] - origin[0], end[0] - begin[0], end[1] - begin[1]


class CudaClock:
    """CUDA events on the current stream. A kernel that waits for other ranks, as NCCL's do, counts as work."""

    tells_waiting = False

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(
        self, origin: torch.cuda.Event, begin: torch.cuda.Event, end: torch.cuda.Event
    ) -> tuple[float, float, float]:
        wall = begin.elapsed_time(end) / 1e3
        return origin.elapsed_time(begin) / 1e3, wall, wall
