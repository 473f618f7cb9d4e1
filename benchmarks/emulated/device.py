"""A device that computes one thing after the other, each for as long as it is told."""

import time
from dataclasses import dataclass, field

from balancing.clock import pace

__all__ = ["Device"]


@dataclass
class Device:
    """Timed waits one after another. What one of them overran, as timers do, is taken off the next."""

    late: float = field(default=0.0)

    def run(self, seconds: float) -> None:
        """Occupy the device. Negative seconds are what the host has taken too long, and taken off the next wait."""
        wait = seconds - self.late
        if wait <= 0:
            self.late -= seconds
            return
        begin = time.perf_counter()
        pace(wait)
        self.late = time.perf_counter() - begin - wait
