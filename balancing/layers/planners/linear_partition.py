"""The best way to cut a row of layers into consecutive stages, exactly.

DynMo probes for it with a binary search whose precision is absolute: costs far below it end on one stage, and more
stages than layers never end. Here it is dynamic programming over (stage, end of the stage), where a stage may bring its
own fixed load (the embedding, the head, other chunks of its rank) and may refuse what does not fit its memory:

    best[s][j] = min over i of max(best[s - 1][i], load of stage s with layers i to j - 1)

Stages longer than a guess at the optimum allows need not be looked at: arrays are [end, length], and if the optimum
turns out to be above the guess, the guess is doubled. A second pass over the partitions that reach the optimum picks
the one that moves fewest bytes, and among these the most even.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Room", "least_over", "linear_partition"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Room:
    """What fits where. A stage with layers i to j - 1 needs

        static[i:j].sum() + max over k of (base[stage, k] + count[stage, k] * activation[i:j].sum())

    bytes, one k for each moment that may be the fullest, and has limit[stage]. static, activation: [layer].
    """

    static: FloatArray
    activation: FloatArray
    base: FloatArray
    count: FloatArray
    limit: FloatArray

    def over(self, first: IntArray, last: IntArray) -> FloatArray:
        """Bytes over the limit, [stage, ...], of layers first to last - 1 on every stage."""
        static, activation = (_prefix(each)[last] - _prefix(each)[first] for each in (self.static, self.activation))
        new = (...,) + (None,) * first.ndim
        peak = (self.base[new] + self.count[new] * activation).max(axis=1)
        return static + peak - self.limit[new]


def _prefix(values: FloatArray) -> FloatArray:
    return np.concatenate([[0.0], np.cumsum(values)])


def _band(layers: int, longest: int, least: int) -> tuple[IntArray, IntArray, NDArray[np.bool_]]:
    """Begin and end of every stage up to a length, as [end, length], and which of them are stages at all."""
    last = np.arange(layers + 1)[:, None]
    first = last - np.arange(longest + 1)[None, :]
    real = (first >= 0) & (last - first >= least)
    return np.maximum(first, 0), np.broadcast_to(last, first.shape), real


def _bottleneck(load: FloatArray, first: IntArray) -> float:
    """The least possible maximum; load: [stage, end, length]."""
    best = np.full(len(first), np.inf)
    best[0] = -np.inf
    for own in load:
        best = np.maximum(best[first], own).min(axis=1)
    return float(best[-1])


def _cheapest(price: FloatArray, first: IntArray) -> list[int]:
    """The borders of the cut with the least sum of prices; price: [stage, end, length]."""
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
    """The borders [stages + 1] of the cut whose slowest stage is fastest; [] if no cut fits.

    cost: [layer], seconds. fixed: [stage], seconds that a stage has besides. home: [layer], the stage that holds each
    layer now, -1 for none; weight: [layer], its bytes. least: fewest layers a stage. room: memory, None for no limit.
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
    even = (np.where(within, load, 0.0) / (bottleneck or 1.0)) ** 2  # at most 1 a stage, so less than a byte in all
    even += 1e-3 * ((last - first) / max(layers, 1)) ** 2  # where layers cost nothing, their number counts
    price = np.where(within, arriving[:, last] - arriving[:, first] + 0.5 * even / stages, np.inf)
    return _cheapest(price, first)


def least_over(room: Room, least: int = 1) -> float:
    """The fewest bytes that the fullest stage is over its limit in any cut; not above 0 if one fits."""
    layers = len(room.static)
    first, last, real = _band(layers, layers, least)
    return _bottleneck(np.where(real, room.over(first, last), np.inf), first)
