"""Rates of a machine from what a training job has shown: seconds of its calls of attention, and of its experts.

With `--balance-report` a job writes lines of action "measured" into its log (`Calls.line`), a few calls a step. Each
tells the work of a call, in the terms of `balancing.cluster.rates`, and its seconds on the device. The table that
planners had is corrected by them: a curve is fitted to calls that differ enough to tell its constants, as on calls that
the fit has not seen; otherwise the curve that planners had is scaled. What calls do not tell stays as it was.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from balancing.cluster.cluster import Cluster
from balancing.cluster.rates import (
    ONE_RATE,
    AttentionCurve,
    KernelPoints,
    ProductCurve,
    Rates,
    attention_curve,
    attention_points,
    fit_attention,
    fit_products,
    product_points,
)

__all__ = ["ENOUGH", "Calls", "Work", "measured_cluster"]

ENOUGH = 16  # calls of one kind, from which on they are believed
_FITTED = 32  # calls of one kind, from which on a curve may be fitted
_KEPT = 8  # calls of one kind in a line
_BACKWARD = 2.5  # FLOPs of attention's backward pass over those of forward
_WAYS = ("forward", "backward")

Work = tuple[float, ...]


@dataclass(frozen=True)
class Calls:
    """Measured calls of one kind.

    kind: the kernel of attention, or "experts".
    way: "forward" or "backward".
    flops: FLOPs of a query-key pair, or of a row, forward, on one rank.
    work: [call], pairs and queries in whole tiles and pieces; or rows and groups.
    seconds: [call].
    """

    kind: str
    way: str
    flops: float
    work: Sequence[Work]
    seconds: Sequence[float]

    def line(self, machine: Cluster | None = None) -> dict[str, Any]:
        """One log entry: up to eight calls sorted by work, ties merged by their median, and the measured over the
        predicted time of all calls.

        machine: rates that predict; None, or a machine without rates, leaves the comparison out.
        """
        by_work: dict[Work, list[float]] = {}
        for work, seconds in zip(self.work, self.seconds, strict=True):
            by_work.setdefault(work, []).append(seconds)
        chosen = sorted(by_work)
        if len(chosen) > _KEPT:
            chosen = [chosen[at] for at in np.linspace(0, len(chosen) - 1, _KEPT).round().astype(int)]
        calls = [[*work, float(np.median(by_work[work])), len(by_work[work])] for work in chosen]
        line = {"kind": self.kind, "way": self.way, "flops": self.flops, "calls": calls}
        if self.seconds and machine is not None and machine.rates is not None:
            line["times"] = sum(self.seconds) / self._planned_seconds(machine, machine.rates)
        return line

    def _planned_seconds(self, machine: Cluster, rates: Rates) -> float:
        """Seconds of all calls by the rates that planners had."""
        is_products = self.kind == "experts"
        curve = rates.grouped if is_products else _attention_before(machine, self.kind, self.way)
        flops = self.flops * (_BACKWARD if self.way == "backward" and not is_products else 1.0)
        return float(np.sum(_seconds(curve, np.array(self.work))) * flops)


def measured_cluster(base: Cluster, lines: Iterable[Mapping[str, Any]]) -> tuple[Cluster, str] | None:
    """The cluster with rates that a job has measured, and one sentence on them; None while there are too few calls.

    base: what planners had.
    lines: of action "measured", of `Calls.line`.

    Raises ValueError, with the entry's name, for lines that were not written by `Calls.line`.
    """
    calls: dict[tuple[str, str], list[list[float]]] = {}
    for line in lines:
        key = str(line.get("kind")), str(line.get("way"))
        calls.setdefault(key, []).extend(_checked(key, line))
    found = {key: np.array(rows) for key, rows in calls.items() if sum(row[-1] for row in rows) >= ENOUGH}
    kernels = {kind for kind, _ in found if all((kind, way) in found for way in _WAYS) and kind != "experts"}
    attention = {
        kernel: [
            _of_job(found[kernel, way], _attention_before(base, kernel, way), fit_attention) for way in _WAYS
        ]
        for kernel in sorted(kernels)
    }  # fmt: skip
    products = None
    if ("experts", "forward") in found:
        before = ProductCurve(base.flops, 0.0) if base.rates is None else base.rates.grouped
        products = _of_job(found["experts", "forward"], before, fit_products)
    if not attention and products is None:
        return None
    number = int(sum(rows[:, -1].sum() for rows in found.values()))
    told = [
        f"attention by {kernel} {forward.flops / 1e12:.3g} / {backward.flops / 1e12:.3g} TFLOP/s forward / backward"
        for kernel, (forward, backward) in attention.items()
    ]
    told += [] if products is None else [f"experts {products.flops / 1e12:.3g} TFLOP/s"]
    said = f"measured {', '.join(told)} on much work, in {number:,} calls"
    most = max(attention, key=lambda kernel: found[kernel, "forward"][:, -1].sum(), default=None)
    return _with(base, attention, products, most, said), said


def _checked(key: tuple[str, str], line: Mapping[str, Any]) -> list[list[float]]:
    """Rows of work, seconds of a FLOP and number of calls. Raises ValueError for a wrong line."""
    name, of_experts = "/".join(key), key[0] == "experts"
    flops, calls = line.get("flops"), line.get("calls")
    if key[1] not in _WAYS or not _is_positive(flops) or not isinstance(calls, list):
        raise ValueError(f"measured calls of {name}: way, flops or calls are missing or wrong")
    assert flops is not None
    rows = []
    wanted = 4 if of_experts else 5
    for at, call in enumerate(calls):
        if not isinstance(call, list) or len(call) != wanted or not all(map(_is_positive, call)):
            raise ValueError(f"measured calls of {name}[{at}]: {call!r:.60} must be {wanted} numbers above 0")
        scale = _BACKWARD if key[1] == "backward" and not of_experts else 1.0
        rows.append([*map(float, call[:-2]), call[-2] / (flops * scale), float(call[-1])])
    return rows


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _attention_before(base: Cluster, kernel: str, way: str) -> AttentionCurve:
    if base.rates is None:
        return AttentionCurve(base.flops * ONE_RATE, 0.0, 0.0)
    known = dict(base.rates.attention)
    return attention_curve(getattr(known.get(kernel, known[base.rates.kernel]), way))


def _of_job[Curve: (AttentionCurve, ProductCurve)](
    rows: np.ndarray, before: Curve, fit: Callable[[np.ndarray, np.ndarray], Curve]
) -> Curve:
    """A curve of calls [call, work and seconds of a FLOP and number]: fitted, or `before` scaled."""
    rows = rows[np.lexsort(rows[:, ::-1].T)]
    work, seconds = rows[:, :-2], rows[:, -2]
    scaled = before._replace(flops=before.flops / float(np.median(seconds / _seconds(before, work))))
    if len(np.unique(work, axis=0)) < work.shape[1] + 1 or rows[:, -1].sum() < _FITTED:
        return scaled
    half = fit(work[::2], seconds[::2])
    errors = [np.median(np.abs(_seconds(curve, work[1::2]) / seconds[1::2] - 1)) for curve in (half, scaled)]
    return fit(work, seconds) if errors[0] < errors[1] else scaled


def _seconds(curve: AttentionCurve | ProductCurve, work: np.ndarray) -> Any:
    columns: Any = (*work.T, 1.0)
    return curve.seconds(*columns)


def _with(
    base: Cluster,
    attention: Mapping[str, Sequence[AttentionCurve]],
    products: ProductCurve | None,
    kernel: str | None,
    said: str,
) -> Cluster:
    """The cluster with points of these curves. kernel: that planners shall plan with."""
    rates, flops = base.rates, base.flops
    if rates is None:  # one rate for all: products follow attention, or attention products
        ratio = products.flops / flops if products is not None else 1.0
        if kernel is not None:
            ratio = attention[kernel][0].flops / (flops * ONE_RATE)
        flops *= ratio
        rates = Rates.of_one_rate(
            flops,
            operation_seconds=base.host_seconds,
            post_seconds=base.host_seconds,
            copy_bandwidth=base.intra_node_bandwidth if base.intra_node_bandwidth < math.inf else flops,
            source="one rate of a data sheet",
        )
    known = dict(rates.attention) | {
        name: KernelPoints(attention_points(forward), attention_points(backward))
        for name, (forward, backward) in attention.items()
    }
    measured = replace(
        rates,
        kernel=rates.kernel if kernel is None else kernel,
        attention=tuple(known.items()),
        source=f"{said}; the rest: {rates.source}",
        measured=False,
    )
    if products is not None:  # those that the job has, whichever these are
        measured = measured.with_products(product_points(products))
    return replace(base, flops=flops, rates=measured)
