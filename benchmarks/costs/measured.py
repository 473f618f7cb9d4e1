"""Measured rows of one H100 (benchmarks/log/h100.md) beside the rates that planners read.

Curves are fitted again on half of the points and shown on the other half; `balancing.cluster.presets` has those of all
whole documents. A packed call of documents of several lengths is in no fit.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from balancing.cluster.presets import H100
from balancing.cluster.rates import (
    AttentionCurve,
    AttentionPoint,
    attention_curve,
    causal_pairs,
    product_curve,
    product_rate,
    tile_pairs,
)

__all__ = ["Derived", "Point", "host_points", "host_today", "points"]

_MIX = (32768, *[8192] * 2, *[4096] * 2, *[1024] * 8)
# TFLOP/s, forward and backward, 32 heads of 128 and 8 key heads, but with one document of 16k: 32 key heads.
_ATTENTION: dict[str, dict[tuple[int, ...], tuple[float, float]]] = {
    "fa2": {
        (128,) * 512: (53.5, 37.5), (1024,) * 64: (192.2, 177.3), (8192,) * 8: (337.2, 297.4),
        (16384,): (326.6, 311.7), (32768,): (352.9, 314.4), _MIX: (351.8, 314.2),
    },
    "cudnn": {
        (128,) * 512: (53.5, 38.5), (1024,) * 64: (340.0, 237.6), (8192,) * 8: (520.4, 467.1),
        (16384,): (520.5, 473.9), (32768,): (543.4, 507.6), _MIX: (470.5, 528.4),
    },
}  # fmt: skip
_FITTED = (128, 1024, 32768)  # tokens of the documents of the points that are fitted
_FITTED_ROWS = (1820, 2731, 8192)
# Milliseconds of the host for one layer on the first of 8 ranks, forward and backward, messages stubbed, and the
# operations that `balancing.sequences.rounds` counted for it. Both are of commit 7c0c1ac, whose engine started each
# message by itself; the host of a later one was not measured on a GPU.
_HOST = {"zones": (8.6, 84), "ring": (8.5, 84), "chunks": (14.3, 132), "gather": (18.9, 132)}
_FITTED_HOST = ("zones", "ring")
# What `benchmarks.host` counts for these plans, in additions of 8 x 8 and launches: commit 92b80fa, of the same engine,
# with the turns of 7c0c1ac.
_COUNTED = {"zones": (1553, 77), "ring": (1491, 75), "chunks": (4580, 125), "gather": (5859, 190)}
# The same of commit 054cc51, after 955d528, on the busiest of 8 and of 16 ranks with its own number of turns, and the
# operations that `rounds` counts now.
_TODAY = {
    ("chunks", 8): (299, 25, 23), ("zones", 8): (1267, 71, 68), ("ring", 8): (1341, 67, 68),
    ("gather", 8): (447, 48, 49), ("chunks", 16): (728, 77, 75), ("zones", 16): (2430, 134, 148),
    ("ring", 16): (2174, 123, 132), ("gather", 16): (954, 123, 127),
}  # fmt: skip
_ADDITION = (0.0, 1.3e-6)  # seconds: none, and those of the machine that counted; an H100's host lies between


class Point(NamedTuple):
    """A measured figure and that of the table.

    what: is measured. fitted: whether the half that is fitted has it.
    measured, half, table: in one unit, as measured, by the curve of half of the points, and by the table of presets.
    """

    what: str
    fitted: bool
    measured: float
    half: float
    table: float


def points() -> Iterator[Point]:
    """Attention and grouped products, in TFLOP/s."""
    for kernel, rows in _ATTENTION.items():
        for at, way in enumerate(("forward", "backward")):
            half = attention_curve(tuple(
                AttentionPoint(lengths[0], lengths[0], rates[at] * 1e12)
                for lengths, rates in rows.items() if len(set(lengths)) == 1 and lengths[0] in _FITTED
            ))  # fmt: skip
            table = attention_curve(getattr(dict(H100.attention)[kernel], way))
            for lengths, rates in rows.items():
                mixed = len(set(lengths)) > 1
                name = "packed, 72k" if mixed else f"{len(lengths)} x {lengths[0]}"
                fitted = not mixed and lengths[0] in _FITTED
                figures = rates[at], _rate(half, lengths), _rate(table, lengths)
                yield Point(f"{kernel}, {way}, {name}", fitted, *figures)
    measured = dict(H100.products)["torch"].rows
    half_rows, table = (
        product_curve(rows) for rows in (tuple(point for point in measured if point[0] in _FITTED_ROWS), measured)
    )
    for count, flops in measured:
        figures = flops / 1e12, product_rate(half_rows, count) / 1e12, product_rate(table, count) / 1e12
        yield Point(f"grouped products, {count} rows a group", count in _FITTED_ROWS, *figures)


def host_points() -> Iterator[Point]:
    """The host, in milliseconds."""
    each = sum(_HOST[name][0] / _HOST[name][1] for name in _FITTED_HOST) / len(_FITTED_HOST)
    for method, (milliseconds, operations) in _HOST.items():
        found = milliseconds, each * operations, 1e3 * H100.operation_seconds * operations
        yield Point(f"host, {method}, {operations} operations", method in _FITTED_HOST, *found)


class Derived(NamedTuple):
    """Milliseconds of today's host for one layer, derived, not measured on a GPU.

    what: is derived. low, high: by the two prices of an addition. table: by `presets`, without messages.
    """

    what: str
    low: float
    high: float
    table: float


def host_today() -> Iterator[Derived]:
    """The host of today's engine: an addition costs nothing, or what it does here, and a launch what is then left of
    the four measured plans, by least squares of relative errors."""
    for (method, ranks), (additions, launches, operations) in _TODAY.items():
        found = [1e3 * (additions * of + launches * _launch_seconds(of)) for of in _ADDITION]
        table = 1e3 * H100.operation_seconds * operations
        yield Derived(f"host today, {method}, {ranks} ranks, {operations} operations", min(found), max(found), table)


def _launch_seconds(addition: float) -> float:
    parts = [(1e-3 * _HOST[name][0], *counted) for name, counted in _COUNTED.items()]
    shares = [launches / seconds for seconds, _, launches in parts]
    left = [1 - addition * additions / seconds for seconds, additions, _ in parts]
    return sum(map(math.prod, zip(shares, left, strict=True))) / sum(share**2 for share in shares)


def _rate(curve: AttentionCurve, lengths: Sequence[int]) -> float:
    """TFLOP/s of a call with documents of these lengths."""
    pairs = sum(causal_pairs(length, length) for length in lengths)
    seconds = sum(curve.seconds(tile_pairs(length, length), length, 1, 1.0) for length in lengths)
    return float(pairs / seconds / 1e12)
