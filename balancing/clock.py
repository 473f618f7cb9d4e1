"""Time that a device computes, without the time that it waits for other ranks.

On a GPU, CUDA events around a kernel give its time. On a CPU, the CPU time of the computing thread does: it stands
still while the thread waits for a message. The emulated cluster also has `pace`, a timed wait that stands for a
modelled kernel. It uses no CPU time, so paced seconds are counted separately and added to the CPU time.
"""

import threading
import time
from typing import Any, Protocol

import torch

__all__ = ["CpuClock", "CudaClock", "DeviceClock", "device_time", "pace"]

_paced = threading.local()


def device_time() -> float:
    """Seconds of work that this thread has done so far: its CPU time plus its paced seconds.

    Only the difference of two readings in one thread has a meaning.
    """
    return time.thread_time() + getattr(_paced, "seconds", 0.0)


def pace(seconds: float) -> None:
    """Occupy the device for `seconds` of wall-clock time, like a kernel of that duration.

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
    """Records points in a device's work and later gives the seconds between them. `mark` never waits for the device.

    tells_waiting: whether seconds of work exclude the time that the device waits for other ranks.
    """

    tells_waiting: bool

    def mark(self) -> Any:
        """A mark after all work launched so far."""

    def seconds(self, origin: Any, begin: Any, end: Any) -> tuple[float, float, float]:
        """Seconds from `origin` to `begin`, from `begin` to `end`, and of work between `begin` and `end`.

        Call it only after the device has passed all three marks.
        """


class CpuClock:
    """Clock of the calling thread. A mark is a pair of wall-clock and device time, in seconds."""

    tells_waiting = True

    def mark(self) -> tuple[float, float]:
        return time.perf_counter(), device_time()

    def seconds(
        self, origin: tuple[float, float], begin: tuple[float, float], end: tuple[float, float]
    ) -> tuple[float, float, float]:
        return begin[0] - origin[0], end[0] - begin[0], end[1] - begin[1]


class CudaClock:
    """CUDA events on the current stream. Kernels that wait for other ranks, such as NCCL's, count as work."""

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
