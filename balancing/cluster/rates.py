"""Measured rates of one device: attention by kernel and length, products of experts by kernel and rows, the host.

A data sheet has one rate. A GPU computes attention of short documents at a tenth of it, grouped products of few rows at
half of it, and its host needs 75 us for an operation that the device does in 10. `Rates` holds measured points, and
curves of two or three constants through them that planners read:

- Attention of a piece takes as long as its query-key pairs in whole tiles of 128 x 128, plus `row` keys for each query
  (in whole rows of 128), plus `piece` pairs. A row of tiles has to load its queries and to write its output however
  few keys it sees. Times of pieces add up.
- Products of experts take as long as their rows, plus `group` rows for each expert, or as long as the host needs to
  start those of each expert, where they are started apart.

Points of another machine may be scaled by the ratio of data-sheet rates (`Rates.times`); `measured` is then False.
"""

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, pairwise
from typing import Any, NamedTuple, Self

import numpy as np

__all__ = [
    "ACCURACY",
    "ONE_RATE",
    "TILE",
    "AttentionCurve",
    "AttentionPoint",
    "KernelPoints",
    "ProductCurve",
    "ProductPoints",
    "Rates",
    "attention_curve",
    "causal_pairs",
    "product_curve",
]

# FLOP/s of flash attention over those of large matrix products, where nothing was measured: 0.57 on H200, 0.72 on A800.
ONE_RATE = 0.6
TILE = 128  # queries, and keys, of a tile of flash attention
ACCURACY = 0.1  # largest error of a curve at a measured point that the tables of presets have
_LENGTHS, _ROWS = (128, 512, 2048, 8192, 32768), (128, 1024, 8192)  # of points that are made from curves
_WIDEST = 16  # most times that a length may be longer than the measured one before it


class AttentionPoint(NamedTuple):
    """A measured rate of causal attention.

    queries: tokens of a piece at the end of a document; all of the document if there are as many keys.
    keys: tokens of the document.
    flops: FLOP/s of many such pieces in one call, with the pairs under the causal mask counted.
    """

    queries: int
    keys: int
    flops: float


class AttentionCurve(NamedTuple):
    """Seconds of attention of one kernel in one direction.

    flops: FLOP/s on long documents.
    row: keys that take as long as what a query costs beside its keys.
    piece: query-key pairs that take as long as what a piece costs beside its queries and keys.
    """

    flops: float
    row: float
    piece: float

    def seconds(self, pairs: Any, queries: Any, pieces: Any, flops_of_pair: float) -> Any:
        """Seconds of pieces; numbers, or arrays of one shape.

        pairs: query-key pairs in whole tiles.
        queries: in whole tiles.
        pieces: number of pieces.
        flops_of_pair: of all heads, forward; of the backward pass if the curve is.
        """
        return (pairs + self.row * queries + self.piece * pieces) * (flops_of_pair / self.flops)


class ProductCurve(NamedTuple):
    """Seconds of grouped products. flops: FLOP/s with many rows a group. group: rows that take as long as a group."""

    flops: float
    group: float

    def seconds(self, rows: Any, groups: Any, flops_of_row: float) -> Any:
        """Seconds of `rows` rows in `groups` groups together."""
        return (rows + self.group * groups) * (flops_of_row / self.flops)


@dataclass(frozen=True)
class KernelPoints:
    """Measured points of one attention kernel, each by queries and keys: forward, and backward with 2.5 times as many
    FLOPs."""

    forward: tuple[AttentionPoint, ...]
    backward: tuple[AttentionPoint, ...]


@dataclass(frozen=True)
class ProductPoints:
    """Measured products of experts in one way.

    rows: (rows of an expert, FLOP/s), by rows.
    group_seconds: of the host for each expert of a product, where products are started one by one; 0 for one kernel.
    """

    rows: tuple[tuple[int, float], ...]
    group_seconds: float = 0.0


@dataclass(frozen=True)
class Rates:
    """What a device and its host reach.

    kernel: the name in `attention` that planners plan with.
    attention: (name, points) of each measured kernel.
    gemm: the name in `products` that planners plan with.
    products: (name, points) of each measured way to multiply experts, as in `balancing.kernels.expert_choice.TITLES`.
    operation_seconds: seconds of the host for one operation of `balancing.sequences.engine`, from Python.
    post_seconds: seconds of the host to start one message.
    copy_bandwidth: bytes/s that the device copies in its memory.
    source: where and when this was measured.
    measured: whether all of this was measured on such a device; False for points that are scaled from another one.

    Raises ValueError, with the entry's name, for kernels without points, points that are not positive and finite, fewer
    than three lengths, lengths more than 16 times apart, and rates that fall by more than a tenth with more keys or
    rows.
    """

    kernel: str
    attention: tuple[tuple[str, KernelPoints], ...]
    gemm: str
    products: tuple[tuple[str, ProductPoints], ...]
    operation_seconds: float
    post_seconds: float
    copy_bandwidth: float
    source: str
    measured: bool = True

    def __post_init__(self) -> None:
        for name, points in self.attention:
            for direction in ("forward", "backward"):
                _check_attention(f"rates.attention.{name}.{direction}", getattr(points, direction))
        if self.kernel not in dict(self.attention):
            raise ValueError(f"rates.kernel={self.kernel!r} has no entry in rates.attention")
        for name, ways in self.products:
            _check_products(f"rates.products.{name}", ways.rows)
            _check_number(f"rates.products.{name}.group_seconds", ways.group_seconds, least=0.0)
        if self.gemm not in dict(self.products):
            raise ValueError(f"rates.gemm={self.gemm!r} has no entry in rates.products")
        for name in ("operation_seconds", "post_seconds"):
            _check_number(f"rates.{name}", getattr(self, name), least=0.0)
        _check_number("rates.copy_bandwidth", self.copy_bandwidth)

    def __hash__(self) -> int:
        return hash(
            (self.kernel, self.gemm, self.source, self.operation_seconds)
        )  # a cluster is a key of caches: this is quick

    @property
    def forward(self) -> AttentionCurve:
        """The curve of the planned kernel's forward pass."""
        return attention_curve(dict(self.attention)[self.kernel].forward)

    @property
    def backward(self) -> AttentionCurve:
        """The curve of the planned kernel's backward pass, of FLOPs of the backward pass."""
        return attention_curve(dict(self.attention)[self.kernel].backward)

    @property
    def grouped(self) -> ProductCurve:
        """The curve of the planned products of experts."""
        return product_curve(dict(self.products)[self.gemm].rows)

    @property
    def group_seconds(self) -> float:
        """`ProductPoints.group_seconds` of the planned products."""
        return dict(self.products)[self.gemm].group_seconds

    def with_products(self, rows: tuple[tuple[int, float], ...]) -> Self:
        """These rates with other points of products, however experts are multiplied."""
        return replace(self, products=tuple((name, replace(ways, rows=rows)) for name, ways in self.products))

    def times(self, factor: float, source: str, *, attention: float | None = None, memory: float = 1.0) -> Self:
        """The rates of a device that is `factor` times as fast, with the host as it is.

        source: why this factor.
        attention: how many times as fast attention is; `factor` by default.
        memory: copies over those of this device.
        """

        def faster(points: tuple[AttentionPoint, ...]) -> tuple[AttentionPoint, ...]:
            ratio = factor if attention is None else attention
            return tuple(point._replace(flops=point.flops * ratio) for point in points)

        return replace(
            self,
            attention=tuple((name, KernelPoints(faster(each.forward), faster(each.backward)))
                            for name, each in self.attention),
            products=tuple((name, replace(each, rows=tuple((rows, flops * factor) for rows, flops in each.rows)))
                           for name, each in self.products),
            copy_bandwidth=self.copy_bandwidth * memory,
            source=source,
            measured=False,
        )  # fmt: skip

    @classmethod
    def of_one_rate(
        cls, flops: float, *, operation_seconds: float, post_seconds: float, copy_bandwidth: float, source: str
    ) -> Self:
        """Rates that do not depend on lengths and rows, of a device with `flops` in large products."""
        curve = AttentionCurve(flops * ONE_RATE, 0.0, 0.0)
        points = KernelPoints(attention_points(curve), attention_points(curve))
        products = ProductPoints(product_points(ProductCurve(flops, 0.0)))
        curves = ("one rate", (("one rate", points),), "one rate", (("one rate", products),))
        return cls(*curves, operation_seconds, post_seconds, copy_bandwidth, source, measured=False)

    def to_json(self) -> dict[str, Any]:
        """An object for `from_json`."""
        return {
            "kernel": self.kernel,
            "attention": {
                name: {"forward": [list(point) for point in each.forward],
                       "backward": [list(point) for point in each.backward]}
                for name, each in self.attention
            },
            "gemm": self.gemm,
            "products": {
                name: {"rows": [list(point) for point in each.rows], "group_seconds": float(each.group_seconds)}
                for name, each in self.products
            },
            "operation_seconds": float(self.operation_seconds),
            "post_seconds": float(self.post_seconds),
            "copy_bandwidth": float(self.copy_bandwidth),
            "source": self.source,
            "measured": self.measured,
        }  # fmt: skip

    @classmethod
    def from_json(cls, raw: object) -> Self:
        """From a JSON object of `to_json`. Raises ValueError with the entry's name for a missing or wrong one."""
        entries = _with_ways(_object("rates", raw))
        kernels = []
        for name, each in _object("rates.attention", _entry("rates", entries, "attention")).items():
            where = f"rates.attention.{name}"
            both = {
                direction: _rows(f"{where}.{direction}", _entry(where, _object(where, each), direction), 3)
                for direction in ("forward", "backward")
            }
            points = (tuple(AttentionPoint(*row) for row in rows) for rows in both.values())
            kernels.append((name, KernelPoints(*points)))
        products = []
        for name, each in _object("rates.products", _entry("rates", entries, "products")).items():
            where = f"rates.products.{name}"
            rows = _rows(f"{where}.rows", _entry(where, _object(where, each), "rows"), 2)
            seconds = _entry(where, each, "group_seconds")
            products.append((name, ProductPoints(tuple((count, flops) for count, flops in rows), seconds)))
        rest = {name: _entry("rates", entries, name) for name in cls.__dataclass_fields__
                if name not in ("attention", "products")}  # fmt: skip
        for key in entries:
            if key not in cls.__dataclass_fields__:
                raise ValueError(f"unknown entry rates.{key}")
        return cls(attention=tuple(kernels), products=tuple(products), **rest)


def _with_ways(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Entries of a file from before products had names, with one list for all: as they are now."""
    if not isinstance(rows := raw.get("products"), list):
        return raw
    seconds = _entry("rates", raw, "group_seconds")
    started = {"rows": rows, "group_seconds": seconds}
    ways = {"sequential": started, "te": started, "torch": {"rows": rows, "group_seconds": 0.0}}
    return {name: value for name, value in raw.items() if name != "group_seconds"} | {"gemm": "te", "products": ways}


@cache
def attention_curve(points: tuple[AttentionPoint, ...]) -> AttentionCurve:
    """The curve through measured points."""
    queries, keys, flops = np.array(points, dtype=np.float64).T
    pairs, rows, seconds = tile_pairs(queries, keys), -(-queries // TILE) * TILE, causal_pairs(queries, keys) / flops
    return fit_attention(np.stack([pairs, rows, np.ones(len(points))], 1), seconds)


def fit_attention(work: np.ndarray, seconds: np.ndarray) -> AttentionCurve:
    """The curve through measured calls, by least squares of relative errors.

    work: float64 [call, 3]: pairs and queries, in whole tiles, and pieces. seconds: of each call and FLOP of a pair.
    """
    of_pair, of_query, of_piece = _least_errors(work / seconds[:, None])
    return AttentionCurve(1 / of_pair, of_query / of_pair, of_piece / of_pair)


@cache
def product_curve(points: tuple[tuple[int, float], ...]) -> ProductCurve:
    """The curve through measured points."""
    rows, flops = np.array(points, dtype=np.float64).T
    return fit_products(np.stack([rows, np.ones(len(points))], 1), rows / flops)


def fit_products(work: np.ndarray, seconds: np.ndarray) -> ProductCurve:
    """The curve through measured calls, by least squares of relative errors.

    work: float64 [call, 2]: rows and groups. seconds: of each call and FLOP of a row.
    """
    of_row, of_group = _least_errors(work / seconds[:, None])
    return ProductCurve(1 / of_row, of_group / of_row)


def attention_rate(curve: AttentionCurve, queries: Any, keys: Any) -> Any:
    """FLOP/s of the curve for pieces as in `AttentionPoint`, with the pairs under the causal mask counted."""
    rows = -(-np.asarray(queries) // TILE) * TILE
    return causal_pairs(queries, keys) / curve.seconds(tile_pairs(queries, keys), rows, 1, 1.0)


def attention_points(curve: AttentionCurve) -> tuple[AttentionPoint, ...]:
    """Points of whole documents through which the curve goes."""
    return tuple(AttentionPoint(tokens, tokens, float(attention_rate(curve, tokens, tokens))) for tokens in _LENGTHS)


def product_points(curve: ProductCurve) -> tuple[tuple[int, float], ...]:
    """Points through which the curve goes."""
    return tuple((rows, float(product_rate(curve, rows))) for rows in _ROWS)


def product_rate(curve: ProductCurve, rows: Any) -> Any:
    """FLOP/s of the curve with `rows` rows a group."""
    return rows / curve.seconds(rows, 1, 1.0)


def causal_pairs(queries: Any, keys: Any) -> Any:
    """Pairs of the last `queries` tokens of a document of `keys` tokens."""
    return queries * (2 * keys - queries + 1) / 2


def tile_pairs(queries: Any, keys: Any) -> Any:
    """As `causal_pairs`, in whole tiles. The first row of tiles has the first 128 queries."""
    queries, keys = np.asarray(queries), np.asarray(keys)
    rows, start = -(-queries // TILE), keys - queries
    return ((rows - 1) * -(-start // TILE) + rows * (rows - 1) // 2 + -(-keys // TILE)) * TILE**2


def _least_errors(terms: np.ndarray) -> np.ndarray:
    """Constants of at least 0, the first above 0, whose sums of terms [point, constant] are nearest to 1."""
    number = terms.shape[1]
    found: list[tuple[float, np.ndarray]] = []
    for size in range(number):
        for others in combinations(range(1, number), size):
            used = [0, *others]
            solved, *_ = np.linalg.lstsq(terms[:, used], np.ones(len(terms)), rcond=None)
            if solved[0] > 0 and (solved[1:] >= 0).all():
                constants = np.zeros(number)
                constants[used] = solved
                found.append((float(((terms @ constants - 1) ** 2).sum()), constants))
    return min(found, key=lambda each: each[0])[1]  # terms are positive, so with the first constant alone it is above 0


def _check_attention(name: str, points: Sequence[AttentionPoint]) -> None:
    for at, point in enumerate(points):
        for field, value in zip(AttentionPoint._fields[:2], point[:2], strict=True):
            _check_number(f"{name}[{at}], {field}", value, whole=True)
        _check_number(f"{name}[{at}], FLOP/s", point.flops)
        if point.queries > point.keys:
            raise ValueError(f"{name}[{at}]: {point.queries} queries are more than the {point.keys} keys of a document")
    _check_rising(name, [(point.keys, point.flops) for point in points if point.queries == point.keys], "tokens")
    for queries in {point.queries for point in points}:
        _check_no_fall(name, [point[1:] for point in points if point.queries == queries], "keys")


def _check_products(name: str, points: Sequence[tuple[int, float]]) -> None:
    for at, (rows, flops) in enumerate(points):
        _check_number(f"{name}[{at}], rows", rows, whole=True)
        _check_number(f"{name}[{at}], FLOP/s", flops)
    _check_rising(name, points, "rows")


def _check_rising(name: str, points: Sequence[tuple[int, float]], what: str) -> None:
    """Raise ValueError unless there are three lengths, none far from the next, and rates do not fall."""
    lengths = sorted({length for length, _ in points})
    if len(lengths) < 3:
        raise ValueError(f"{name} has rates of {len(lengths)} numbers of {what}; measure at least 3")
    for shorter, longer in pairwise(lengths):
        if longer > _WIDEST * shorter:
            raise ValueError(f"{name} has no rate between {shorter} and {longer} {what}; measure one in between")
    _check_no_fall(name, points, what)


def _check_no_fall(name: str, points: Sequence[tuple[int, float]], what: str) -> None:
    best = 0.0
    for length, flops in sorted(points):
        if flops < (1 - ACCURACY) * best:
            raise ValueError(
                f"{name}: {flops:.3g} FLOP/s at {length} {what} is less than {best:.3g} at fewer; measure again on a "
                "quiet machine"
            )
        best = max(best, flops)


def _check_number(name: str, value: object, *, least: float | None = None, whole: bool = False) -> None:
    """Raise ValueError unless `value` is a finite number above 0, or of at least `least`."""
    number = math.nan
    if type(value) is not bool and isinstance(value, numbers.Integral if whole else numbers.Real):
        number = float(value)
    if not math.isfinite(number) or not (number > 0 if least is None else number >= least):
        bound = "above 0" if least is None else f"of at least {least:g}"
        raise ValueError(f"{name}: {value!r} must be a {'whole ' if whole else ''}number {bound}")


def _object(name: str, raw: object) -> Mapping[str, Any]:
    if not isinstance(raw, dict):
        raise ValueError(f"{name} must be a JSON object, not {raw!r:.40}")
    return raw


def _entry(name: str, raw: Mapping[str, Any], key: str) -> Any:
    if raw.get(key) is None:
        raise ValueError(f"{name}.{key} is missing; measure with python -m balancing.cluster --measure --json FILE")
    return raw[key]


def _rows(name: str, raw: object, columns: int) -> list[list[Any]]:
    if not isinstance(raw, list):
        raise ValueError(f"{name} must be a list, not {raw!r:.40}")
    for at, row in enumerate(raw):
        if not isinstance(row, list) or len(row) != columns:
            raise ValueError(f"{name}[{at}]: {row!r:.40} must be a list of {columns} numbers")
    return raw
