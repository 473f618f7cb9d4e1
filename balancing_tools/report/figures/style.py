"""Common style of all figures, and their conversion to inline SVG.

A page may be white or black. Colours of data can be told apart on both and by colour-blind readers. Text, grid and idle
time take the page's own colours, through placeholders that become CSS variables.
"""

import io
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

__all__ = [
    "BACKWARD",
    "BEFORE",
    "FORWARD",
    "GRID",
    "IDLE",
    "INK",
    "LEVEL",
    "MUTED",
    "NEUTRAL",
    "OTHER",
    "RECOMPUTE",
    "SURFACE",
    "WORST",
    "before_and_after",
    "mark_every",
    "new_figure",
    "outline",
    "svg",
]  # fmt: skip

FORWARD, BACKWARD, RECOMPUTE, OTHER = "#3d7cc9", "#e58a36", "#8f6bbd", "#4aa38a"
NEUTRAL, WORST = "#7d95ad", "#d1495b"

_WIDTH = 10.0  # inches

# Placeholders: colours that no figure uses for data, replaced by the page's variables.
INK, MUTED, GRID, IDLE, SURFACE = "#010203", "#010204", "#010205", "#010206", "#010207"
_VARIABLE = {INK: "ink", MUTED: "muted", GRID: "grid", IDLE: "idle", SURFACE: "surface"}

# Values without balancing are thin dashed lines; values with balancing are solid.
BEFORE: Any = {"linewidth": 1.1, "linestyle": (0, (3, 1.5))}
LEVEL: Any = {"linewidth": 1.0, "linestyle": (0, (1, 1.3))}  # a mean or a median
_MOST_OUTLINES = 128

_SETTINGS: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.labelsize": 8.5,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 1.2,
    "legend.handleheight": 0.9,
    "legend.columnspacing": 1.4,
    "svg.fonttype": "path",
    "svg.hashsalt": "balancing.report",
    "savefig.facecolor": "none",
}


@contextmanager
def new_figure(height: float) -> Iterator[Figure]:
    """A figure of the page's width and `height` inches, with this package's settings inside the block."""
    with matplotlib.rc_context(_SETTINGS):
        yield Figure(figsize=(_WIDTH, height), layout="constrained")


def svg(figure: Figure, name: str) -> str:
    """`figure` as an SVG element for an HTML page. Its ids begin with `name`, so they are unique in the page."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", metadata=nothing, dpi=150)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>{name}-", text)
    for colour, variable in _VARIABLE.items():
        text = text.replace(colour, f"var(--{variable})")
    head, rest = text.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)  # the page scales it; its shape is in viewBox
    return f'{head} role="img">{rest}'


def mark_every(axes: Axes, positions: list[float], labels: list[str], *, room: int, along: str = "x") -> None:
    """Label the ticks at `positions`: every tick, or every 2nd, 4th, 5th, ... so that at most `room` are shown."""
    step = next(s for s in (1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128, 10**9) if len(positions) <= s * room)
    set_ticks = axes.set_xticks if along == "x" else axes.set_yticks
    set_ticks(positions[::step], labels[::step])


def outline(axes: Axes, values: np.ndarray, *, thick: float = 0.8, along: str = "x", base: float = 0.0) -> None:
    """Draw a dashed box from `base` to each of `values`, around the bars. Very many values are drawn as one line."""
    n = len(values)
    style: Any = {"fill": False, "edgecolor": INK, "zorder": 4} | BEFORE
    if n > _MOST_OUTLINES:
        orientation: Any = "vertical" if along == "x" else "horizontal"
        axes.stairs(values, np.arange(n + 1) - 0.5, baseline=base, orientation=orientation, **style)
    elif along == "x":
        axes.bar(range(n), values - base, bottom=base, width=thick, **style)
    else:
        axes.barh(range(n), values - base, left=base, height=thick, **style)


def before_and_after(colour: str) -> list[Any]:
    """Legend handles for bars of this colour with outlines."""
    return [Patch(fill=False, edgecolor=INK, label="before", **BEFORE), Patch(color=colour, label="after")]


def name_stages(axes: Axes, edges: list[int], stages: list[int], *, named: bool = True) -> None:
    """Draw dotted lines at `edges`, and write the stage above columns `edges[i]` to `edges[i + 1]` if `named` and it
    fits."""
    width = _WIDTH * 0.92 / edges[-1]  # inches of a column, about
    narrowest = width * min(b - a for a, b in pairwise(edges))
    word = "stage " if narrowest > 0.6 else ""
    every = max(1, math.ceil(0.2 / narrowest))
    style: Any = {"transform": axes.get_xaxis_transform(), "fontsize": 8, "va": "bottom"}
    for part, (begin, end) in enumerate(pairwise(edges)):
        if begin:
            axes.axvline(begin - 0.5, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
        if named and part % every == 0:
            axes.text((begin + end - 1) / 2, 1.02, f"{word}{stages[part]}", ha="center", **style)
    if named and not word:
        axes.annotate(
            "stage",
            (0, 1.02),
            xytext=(-4, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=8,
        )
