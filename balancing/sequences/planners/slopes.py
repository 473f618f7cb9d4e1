"""Target costs of the micro-batches of a step that make a pipeline's warm-up and cool-down short.

In 1F1B a stage waits in warm-up for the first micro-batch to pass through the stages before it, and in cool-down for
the last micro-batch to pass back. The waits are shorter if the first and the last micro-batches cost less and those
between, when all stages work, cost more. How much less depends on the schedule. Here costs rise linearly from the first
micro-batch, stay constant, and fall linearly to the last one. A slope has four numbers (the first and the last cost,
and the length of the rise and of the fall). They are searched for the shortest simulated step.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np

__all__ = ["slope_targets"]

_PARTS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # cost of the first or the last micro-batch over the constant cost between
_RAMPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # micro-batches of a rise or a fall
_ROUNDS = 4
_FEW = 64  # most micro-batches simulated in a search: with more, the constant part is longer and slopes hardly change


@lru_cache(maxsize=64)
def slope_targets(micro_batches: int, step: Callable[[np.ndarray], float], most: float) -> np.ndarray:
    """float64 [micro-batch], target costs with mean 1; all 1 if no slope is quicker.

    micro_batches: number of micro-batches of the step.
    step: a function from costs, float64 [micro-batch], to seconds of the step. It raises ValueError for a number of
        micro-batches that the schedule does not allow.
    most: the largest target allowed, at least 1.

    Results are cached, since a search simulates hundreds of steps.
    """
    best, quickest = np.ones(micro_batches), step(np.ones(micro_batches))
    few = min(micro_batches, _FEW)
    try:
        step(np.ones(few))
    except ValueError:  # an interleaved schedule needs a multiple of its group of micro-batches
        few = micro_batches
    ramps = [ramp for ramp in _RAMPS if ramp <= few]
    choices = (_PARTS, ramps, _PARTS, ramps)
    for start in ((0.6, 1, 0.6, 2), (0.4, 2, 0.6, 4), (0.3, 8, 0.5, 8)):
        slope = list(start)
        least = np.inf
        for _ in range(_ROUNDS):
            before = least
            for index, values in enumerate(choices):
                for value in values:
                    other = [*slope[:index], value, *slope[index + 1 :]]
                    allowed = _slope(micro_batches, *other).max() <= most
                    seconds = step(_slope(few, *other)) if allowed else np.inf
                    if seconds < least:
                        least, slope = seconds, other
            if least == before:
                break
        if least < np.inf and (seconds := step(_slope(micro_batches, *slope))) < quickest * (1 - 1e-9):
            best, quickest = _slope(micro_batches, *slope), seconds
    best.flags.writeable = False
    return best


def _slope(micro_batches: int, first: float, up: float, last: float, down: float) -> np.ndarray:
    """Costs with mean 1. first, last: cost over the constant cost between; up, down: micro-batches of rise and fall."""
    number = np.arange(micro_batches)
    costs = np.minimum(first + (1 - first) * number / up, last + (1 - last) * number[::-1] / down).clip(max=1.0)
    return np.asarray(costs / costs.mean())
