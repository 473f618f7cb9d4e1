"""Figure of the imbalance over the run, before and after balancing."""

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from balancing.report.gains import over_the_run
from balancing.report.history import History
from balancing_tools.report.figures.style import (
    BACKWARD,
    BEFORE,
    FORWARD,
    GRID,
    INK,
    MUTED,
    NEUTRAL,
    OTHER,
    RECOMPUTE,
    WORST,
    new_figure,
    svg,
)

__all__ = ["imbalance_curves"]

_MOST_POINTS = 600

_CURVES = {
    "stages (time)": FORWARD,
    "layers (time)": NEUTRAL,
    "tokens of ranks": OTHER,
    "attention of ranks": RECOMPUTE,
    "tokens of EP ranks, mean of layers": BACKWARD,
}
_OF_BALANCER = {
    "layers": "stages (time)",
    "sequences": "attention of ranks",
    "experts": "tokens of EP ranks, mean of layers",
}
# Actions of every iteration: the curves show their effect.
_IN_CURVES = ("spread", "replicate", "keep")
_OF_MODEL = ("freeze", "unfreeze", "prune")

Curve = tuple[np.ndarray, np.ndarray]


def imbalance_curves(history: History) -> str | None:
    """SVG: max / mean of each measured kind over iterations; dashed without its balancer, if the balancer is on.

    Marks above the curves say when layers moved and when the model changed. None if nothing can be uneven: one stage,
    one rank, one layer.
    """
    curves = _curves(history)
    if not curves:
        return None
    without: dict[str, Curve] = {}
    for balancer, series in over_the_run(history).items():
        x, (before, after) = np.array(list(series)), np.array(list(series.values())).T
        without[_OF_BALANCER[balancer]], curves[_OF_BALANCER[balancer]] = (x, before), (x, after)
    with new_figure(height=3.7) as figure:
        axes = figure.subplots()
        for name, colour in _CURVES.items():
            if name in curves:
                x, y = _thin(*curves[name])
                axes.plot(x, y, color=colour, linewidth=1.7, label=name, marker="o" if x.size < 3 else "", markersize=4)
            if name in without:
                axes.plot(*_thin(*without[name]), color=colour, **BEFORE)
        if without:
            axes.plot([], [], color=INK, label="without the balancer", **BEFORE)
        axes.axhline(1.0, color=INK, linewidth=0.9, zorder=1)
        top = axes.get_ylim()[1]
        axes.set_ylim(1.0 - 0.03 * max(top - 1.0, 0.05), 1.0 + max(top - 1.0, 0.05))
        moved = [
            line["iteration"]
            for line in history.actions
            if line["action"] not in _IN_CURVES and line["imbalance_after"] != line["imbalance_before"]
        ]
        changed = [line["iteration"] for line in history.actions if line["action"] in _OF_MODEL]
        _mark(axes, changed, "D", MUTED, "the model changed")
        _mark(axes, moved, "v", WORST, "moved by a balancer")
        axes.set_ylabel("max / mean (1 is perfect)")
        axes.set_xlabel("iteration")
        axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
        axes.margins(x=0.01)
        axes.grid(axis="y")
        figure.legend(loc="outside upper left", ncols=3)
        return svg(figure, "imbalance")


def _mark(axes: Axes, iterations: list[int], marker: str, colour: str, label: str) -> None:
    """Draw marks above the upper edge, with faint lines behind the curves, for the last `_MOST_POINTS` iterations."""
    if at := sorted(set(iterations))[-_MOST_POINTS:]:
        edge = axes.get_xaxis_transform()
        axes.vlines(at, 0, 1, transform=edge, color=GRID, linewidth=1.0, zorder=0)
        axes.plot(
            at, [1.025] * len(at), transform=edge, clip_on=False, linestyle="none", marker=marker, markersize=5,
            color=colour, label=label,
        )  # fmt: skip


def _curves(history: History) -> dict[str, Curve]:
    found: dict[str, list[tuple[int, float]]] = {
        "stages (time)": _read(history.stages, "busy_s"),
        "layers (time)": _read(history.layers, "layers"),
        "tokens of ranks": _read(history.sequences, "rank", lambda line: float(line["token_imbalance"])),
        "attention of ranks": _read(history.sequences, "rank"),
        "tokens of EP ranks, mean of layers": [
            (i, float(np.mean([line["imbalance_before"] for line in layers.values()])))
            for i, layers in sorted(history.experts.items())
            if any(line["tokens_per_rank"].size > 1 for line in layers.values())
        ],
    }
    return {name: (np.array(p)[:, 0], np.array(p)[:, 1]) for name, p in found.items() if p}


def _before(line: dict[str, Any]) -> float:
    return float(line["imbalance_before"])


def _read(
    lines: dict[int, dict[str, Any]], units: str, value: Callable[[dict[str, Any]], float] = _before
) -> list[tuple[int, float]]:
    """(iteration, value) of each line with two or more entries of key `units`: one alone cannot be uneven."""
    return [(iteration, value(line)) for iteration, line in sorted(lines.items()) if len(line[units]) > 1]


def _thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most `_MOST_POINTS` points: medians of neighbours."""
    if x.size <= _MOST_POINTS:
        return x, y
    parts = np.array_split(np.arange(x.size), _MOST_POINTS)
    return np.array([x[part].mean() for part in parts]), np.array([np.median(y[part]) for part in parts])
