"""Imbalance over the run: is it there from the start, does it grow, and did moving things help."""

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from balancing.report.figures.style import BACKWARD, FORWARD, INK, NEUTRAL, OTHER, RECOMPUTE, WORST, new_figure, svg
from balancing.report.history import History

__all__ = ["imbalance_curves"]

_MOST_POINTS = 600

_CURVES = {
    "stages (busy time)": FORWARD,
    "layers (time)": NEUTRAL,
    "tokens of ranks": OTHER,
    "attention of ranks": RECOMPUTE,
    "experts' ranks, worst layer": BACKWARD,
}


def imbalance_curves(history: History) -> str | None:
    """SVG: max / mean of each measured kind over iterations, with a mark where a balancer changed something.

    None if nothing can be uneven: one stage, one rank, one layer.
    """
    curves = _curves(history)
    if not curves:
        return None
    with new_figure(height=3.3) as figure:
        axes = figure.subplots()
        for name, colour in _CURVES.items():
            if name in curves:
                x, y = _thin(*curves[name])
                axes.plot(x, y, color=colour, linewidth=1.4, label=name, marker="o" if x.size < 3 else "", markersize=4)
        moved = [line for line in history.actions if line["imbalance_after"] != line["imbalance_before"]]
        moved = moved[-_MOST_POINTS:]
        if moved:
            at, before, after = zip(
                *((line["iteration"], line["imbalance_before"], line["imbalance_after"]) for line in moved), strict=True
            )
            axes.vlines(at, before, after, color=WORST, linewidth=1.0)
            axes.plot(at, after, marker="v", markersize=5, color=WORST, linestyle="none", label="moved by a balancer")
        axes.axhline(1.0, color=INK, linewidth=0.9, zorder=1)
        top = axes.get_ylim()[1]
        axes.set_ylim(1.0 - 0.03 * max(top - 1.0, 0.05), 1.0 + max(top - 1.0, 0.05))
        axes.set_ylabel("max / mean (1 is perfect)")
        axes.set_xlabel("iteration")
        axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
        axes.margins(x=0.01)
        axes.grid(axis="y")
        figure.legend(loc="outside upper left", ncols=3)
        return svg(figure, "imbalance")


def _curves(history: History) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    found: dict[str, list[tuple[int, float]]] = {
        "stages (busy time)": _read(history.stages, "busy_s"),
        "layers (time)": _read(history.layers, "layers"),
        "tokens of ranks": _read(history.sequences, "rank", lambda line: float(line["token_imbalance"])),
        "attention of ranks": _read(history.sequences, "rank"),
        "experts' ranks, worst layer": [
            (i, max(line["imbalance_before"] for line in layers.values()))
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
    """(iteration, value) of each line with two or more of its `units`: one alone cannot be uneven."""
    return [(iteration, value(line)) for iteration, line in sorted(lines.items()) if len(line[units]) > 1]


def _thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most `_MOST_POINTS` points: medians of runs of neighbours."""
    if x.size <= _MOST_POINTS:
        return x, y
    parts = np.array_split(np.arange(x.size), _MOST_POINTS)
    return np.array([x[part].mean() for part in parts]), np.array([np.median(y[part]) for part in parts])
