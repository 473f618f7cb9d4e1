"""An emulated device: a queue of kernels, each a timed wait."""

import time
from dataclasses import dataclass, field

from balancing.clock import pace

__all__ = ["Device"]


@dataclass
class Device:
    """Timed waits one after another. What one of them overran, as timers do, is taken off the next.

    shortest: seconds; shorter waits are saved up until they are as long together.
    """

    shortest: float = 0.0
    late: float = field(default=0.0)

    def run(self, seconds: float) -> None:
        """Occupy the device. Negative seconds are what the host has taken too long, and taken off the next wait."""
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
