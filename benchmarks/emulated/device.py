"""An emulated device: a queue of kernels, each a timed wait, and the host that starts them."""

import time
from dataclasses import dataclass, field

from balancing.clock import pace

__all__ = ["Device"]


@dataclass
class Device:
    """Timed waits one after another. What one of them overran, as timers do, is taken off the next.

    As on a GPU, the host runs ahead of the device, and the device waits for a host that is behind. So a step takes the
    time of the device or that of the host, whichever is longer.

    shortest: seconds; shorter waits are saved up until they are as long together.
    """

    shortest: float = 0.0
    late: float = field(default=0.0)
    _began: float = field(default_factory=time.perf_counter)
    _issued: float = 0.0  # seconds of the host since then

    def begin(self) -> None:
        """A step begins, and neither the host nor the device has done anything of it."""
        self._began, self._issued = time.perf_counter() - self.late, 0.0

    def issue(self, seconds: float) -> None:
        """The host takes `seconds` to start what comes next."""
        self._issued += seconds
        behind = self._began + self._issued - (time.perf_counter() - self.late)
        if behind > 0:
            self.run(behind)

    def run(self, seconds: float) -> None:
        """Occupy the device. Negative seconds are what the process has taken too long, and taken off the next wait."""
        wait = seconds - self.late
        if wait <= self.shortest:
            self.late -= seconds
            return
        begin = time.perf_counter()
        pace(wait)
        self.late = time.perf_counter() - begin - wait

    def finish(self) -> None:
        """Wait for what has been saved up."""
        pace(max(0.0, -self.late))
        self.late = 0.0
