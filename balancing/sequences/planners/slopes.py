"""What the micro-batches of a step should cost so that a pipeline fills and drains quickly.

In 1F1B all stages wait while the first micro-batch passes through those before them, and while the last one passes
back. Both waits are as long as these micro-batches cost, so a step is shorter than that of equal micro-batches if the
first ones and the last ones cost less, and those between, which all stages work on at a time, cost more. How much less
depends on the schedule: here costs rise in a line from the first one, are level, and fall in a line to the last one,
and the four numbers of such a slope are searched by the seconds of the step.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np

__all__ = ["slope_targets"]

_PARTS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of the level, that the first or the last micro-batch costs
_RAMPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # micro-batches of a slope
_ROUNDS = 4
_FEW = 64  # micro-batches that are simulated in a search: more of them have a longer level, and hardly another slope


@lru_cache(maxsize=64)
def slope_targets(micro_batches: int, step: Callable[[np.ndarray], float], most: float) -> np.ndarray:
    """float64 [micro-batch], mean 1: what each should cost, relative to the others.

    micro_batches: of the step.
    step: float64 [micro-batch], costs -> seconds of the step; ValueError for a number of micro-batches that the
        schedule does not have.
    most: the largest target allowed, at least 1.

    Returns ones where no slope is quicker. What was found is remembered, since a search simulates hundreds of steps.
    """
    best, found = np.ones(micro_batches), step(np.ones(micro_batches))
    few = min(micro_batches, _FEW)
    try:
        step(np.ones(few))
    except ValueError:  # groups of an interleaved schedule want other numbers
        few = micro_batches
    ramps = [ramp for ramp in _RAMPS if ramp <= few]
    choices = (_PARTS, ramps, _PARTS, ramps)
    for start in ((0.6, 1, 0.6, 2), (0.4, 2, 0.6, 4), (0.3, 8, 0.5, 8)):
        slope = list(start)
        least = np.inf
        for _ in range(_ROUNDS):
            before = least
            for at, values in enumerate(choices):
                for value in values:
                    other = [*slope[:at], value, *slope[at + 1 :]]
                    allowed = _slope(micro_batches, *other).max() <= most
                    seconds = step(_slope(few, *other)) if allowed else np.inf
                    if seconds < least:
                        least, slope = seconds, other
            if least == before:
                break
        if least < np.inf and (seconds := step(_slope(micro_batches, *slope))) < found * (1 - 1e-9):
            best, found = _slope(micro_batches, *slope), seconds
    best.flags.writeable = False
    return best


def _slope(micro_batches: int, first: float, up: float, last: float, down: float) -> np.ndarray:
    """Costs with mean 1. first, last: parts of the level; up, down: micro-batches until and from the level."""
    at = np.arange(micro_batches)
    costs = np.minimum(first + (1 - first) * at / up, last + (1 - last) * at[::-1] / down).clip(max=1.0)
    return np.asarray(costs / costs.mean())
