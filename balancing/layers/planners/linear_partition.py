"""Exact linear partition: consecutive layers on stages, with the least load of the slowest stage.

DynMo uses a binary search of absolute precision. Layers with costs far below the precision end on one stage, and with
more stages than layers the search does not terminate. Here dynamic programming over (stage, end of the stage) finds the
optimum. A stage can have a fixed load (the embedding, the head, other chunks of its rank) and a memory limit:

    best[s][j] = min over i of max(best[s - 1][i], load of stage s with layers i to j - 1)

Only stages with a load up to a guess of the optimum are considered, so arrays are [end, length]. The guess is doubled
if the optimum is above it. Among the partitions that reach the optimum, a second pass selects the one that moves the
fewest bytes, and among these the most even one.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Room", "least_over", "linear_partition"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Room:
    """The memory limits of stages. A stage with layers i to j - 1 needs

        static[i:j].sum() + max over k of (base[stage, k] + count[stage, k] * activation[i:j].sum())

    bytes and may use limit[stage]. k runs over the moments of `balancing.layers.memory.in_flight`.

    static, activation: [layer], bytes.
    base: [stage, k], bytes of the stage's other parts.
    count: [stage, k], micro-batches in flight.
    limit: [stage], bytes.
    """

    static: FloatArray
    activation: FloatArray
    base: FloatArray
    count: FloatArray
    limit: FloatArray

    def first_stages(self, stages: int) -> "Room":
        """The limits of the first `stages` stages alone."""
        return Room(self.static, self.activation, self.base[:stages], self.count[:stages], self.limit[:stages])

    def over(self, first: IntArray, last: IntArray) -> FloatArray:
        """Bytes above the limit, [stage, ...], of layers first to last - 1 on every stage."""
        static, activation = (_prefix(sizes)[last] - _prefix(sizes)[first] for sizes in (self.static, self.activation))
        new = (...,) + (None,) * first.ndim
        peak = (self.base[new] + self.count[new] * activation).max(axis=1)
        return static + peak - self.limit[new]


def _prefix(values: FloatArray) -> FloatArray:
    return np.concatenate([[0.0], np.cumsum(values)])


def _band(layers: int, longest: int, least: int) -> tuple[IntArray, IntArray, NDArray[np.bool_]]:
    """Begin and end of all stages of up to `longest` layers, as [end, length], and a mask of the valid ones."""
    last = np.arange(layers + 1)[:, None]
    first = last - np.arange(longest + 1)[None, :]
    real = (first >= 0) & (last - first >= least)
    return np.maximum(first, 0), np.broadcast_to(last, first.shape), real


def _bottleneck(load: FloatArray, first: IntArray) -> float:
    """The load of the slowest stage in the best partition. load: [stage, end, length]."""
    best = np.full(len(first), np.inf)
    best[0] = -np.inf
    for own in load:
        best = np.maximum(best[first], own).min(axis=1)
    return float(best[-1])


def _cheapest(price: FloatArray, first: IntArray) -> list[int]:
    """The boundaries of the partition with the least sum of prices. price: [stage, end, length]."""
    best = np.full(len(first), np.inf)
    best[0] = 0.0
    ends, begins = np.arange(len(first)), []
    for own in price:
        total = best[first] + own
        choice = total.argmin(axis=1)
        begins.append(first[ends, choice])
        best = total[ends, choice]
    assert np.isfinite(best[-1]), "the optimum was not found again"
    bounds = [len(first) - 1]
    for begin in reversed(begins):
        bounds.append(int(begin[bounds[-1]]))
    return bounds[::-1]


def linear_partition(
    cost: FloatArray, fixed: FloatArray, *, home: IntArray, weight: FloatArray, least: int = 1, room: Room | None = None
) -> list[int]:
    """Boundaries [stages + 1] of the partition with the least load of the slowest stage; [] if none fits.

    cost: [layer], seconds.
    fixed: [stage], seconds of a stage besides its layers.
    home: [layer], the stage that holds each layer now, -1 for none.
    weight: [layer], bytes that a move of the layer sends.
    least: fewest layers of a stage.
    room: memory limits, None for no limit.
    """
    layers, stages = len(cost), len(fixed)
    prefix = _prefix(cost)
    guess = 1.25 * max(float(prefix[-1] + fixed.sum()) / stages, float(fixed.max()), float(cost.max(initial=0.0)))
    while True:
        longest = int((np.searchsorted(prefix, prefix + guess, side="right") - 1 - np.arange(layers + 1)).max())
        longest = min(max(longest, least), layers)
        first, last, real = _band(layers, longest, least)
        load = np.where(real, np.maximum(prefix[last] - prefix[first], 0.0), np.inf) + fixed[:, None, None]
        if room is not None:
            load = np.where(room.over(first, last) <= 0, load, np.inf)
        bottleneck = _bottleneck(load, first)
        if bottleneck <= guess or longest == layers:
            break
        guess *= 2
    if not np.isfinite(bottleneck):
        return []
    elsewhere = (home != np.arange(stages)[:, None]) & (home >= 0)
    arriving = np.zeros((stages, layers + 1))
    np.cumsum(np.where(elsewhere, weight, 0.0), axis=1, out=arriving[:, 1:])
    within = load <= bottleneck
    # At most about 1 a stage. Half of its mean over the stages is less than one byte, so fewest bytes come first.
    even = (np.where(within, load, 0.0) / (bottleneck or 1.0)) ** 2
    even += 1e-3 * ((last - first) / max(layers, 1)) ** 2  # decides between stages with layers of zero cost
    price = np.where(within, arriving[:, last] - arriving[:, first] + 0.5 * even / stages, np.inf)
    return _cheapest(price, first)


def least_over(room: Room, least: int = 1) -> float:
    """The least excess of bytes of the fullest stage over its limit, over all partitions; at most 0 if one fits."""
    layers = len(room.static)
    first, last, real = _band(layers, layers, least)
    return _bottleneck(np.where(real, room.over(first, last), np.inf), first)
