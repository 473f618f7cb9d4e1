"""Figures that compare ranks: busy time, tokens and attention, memory."""

import re
from collections.abc import Callable
from dataclasses import fields

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from balancing.report.summary import RankLoad
from balancing.report.units import byte_count, count
from balancing_tools.report.figures.style import (
    FORWARD,
    IDLE,
    INK,
    LEVEL,
    NEUTRAL,
    WORST,
    before_and_after,
    mark_every,
    name_stages,
    new_figure,
    outline,
    svg,
)

__all__ = ["rank_attention", "rank_memory", "rank_time", "rank_work"]

_UNEVEN = 1.005  # below this max / mean no rank is marked as the worst
_MOST_COLUMNS = 128


def rank_time(ranks: RankLoad, before: np.ndarray | None = None) -> str:
    """SVG: busy and idle seconds of each rank in the typical step, ranks in the order of stages.

    before: busy seconds [rank] before layers moved, in the order of `ranks`.
    """
    order = np.lexsort((ranks.rank, ranks.stage))
    ranks = _by_stage(ranks)
    with new_figure(height=2.7) as figure:
        axes = figure.subplots()
        busy, idle = ranks.busy, ranks.idle
        scale, unit = (1e3, "ms") if (busy + idle).max() < 2 else (1.0, "s")
        _columns(axes, (busy + idle) * scale, IDLE, None)
        _columns(axes, busy * scale, FORWARD, WORST)
        _mean(axes, busy.mean() * scale)
        axes.set_ylabel(f"{unit} in a step")
        top = float((busy + idle).max())
        if before is not None and before.size == busy.size:
            outline(axes, before[order] * scale, thick=_width(busy.size))
            figure.legend(handles=before_and_after(FORWARD), loc="outside upper right", ncols=2)
            top = max(top, float(before.max()))
        axes.set_ylim(0, max(top * scale, 1e-9) * 1.02)
        _name_ranks(axes, ranks)
        return svg(figure, "time")


def rank_work(ranks: RankLoad) -> str:
    """SVG: tokens and causal attention area of each rank in the typical step."""
    ranks = _by_stage(ranks)
    with new_figure(height=4.2) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True)
        _bars(upper, ranks.tokens, count)
        _bars(lower, ranks.area, count)
        upper.set_ylabel("tokens")
        lower.set_ylabel("attention area\n[query-key pairs]")
        _name_ranks(lower, ranks, stages=False)
        _mark_stages(upper, ranks)
        upper.tick_params(axis="x", length=0)
        upper.grid(axis="y")
        return svg(figure, "work")


def rank_attention(before: np.ndarray, after: np.ndarray) -> str:
    """SVG: attention area of context-parallel ranks over the mean of their micro-batch, fullest rank first.

    before, after: [rank], without and with balancing.
    """
    with new_figure(height=2.5) as figure:
        axes = figure.subplots()
        n = after.size
        _columns(axes, after, NEUTRAL, None)
        outline(axes, before, thick=_width(n))
        _mean(axes, 1.0)
        names = ["fullest", *(str(place + 1) for place in range(1, n - 1)), "emptiest"]
        mark_every(axes, [float(place) for place in range(n)], names[:n], room=40)
        axes.set_xlim(-0.6, n - 0.4)
        axes.set_ylim(0, 1.06 * max(float(before.max()), float(after.max())))
        axes.set_xlabel("context-parallel rank of a micro-batch, by its attention")
        axes.set_ylabel("attention area / mean")
        axes.tick_params(axis="x", length=0)
        axes.grid(axis="y")
        figure.legend(handles=before_and_after(NEUTRAL), loc="outside upper right", ncols=2)
        return svg(figure, "attention")


def rank_memory(ranks: RankLoad) -> str:
    """SVG: the peak memory of each rank."""
    ranks = _by_stage(ranks)
    with new_figure(height=2.5) as figure:
        axes = figure.subplots()
        _bars(axes, ranks.memory, byte_count, step=1024)
        axes.set_ylabel("peak memory")
        _name_ranks(axes, ranks)
        return svg(figure, "memory")


def _bars(axes: Axes, values: np.ndarray, text: Callable[[float], str], step: int = 1000) -> None:
    """Draw one bar for each rank, the highest in red.

    text: formats a value with its unit; ticks are round numbers in that unit.
    step: ratio of one unit of `text` to the next smaller one.
    """
    _columns(axes, values, NEUTRAL, WORST)
    _mean(axes, values.mean())
    top = max(float(values.max()), 1.0) * 1.06
    unit = float(step ** int(np.log(top) / np.log(step)))
    ticks = np.asarray(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]).tick_values(0, top / unit)) * unit
    ticks = ticks[(ticks >= 0) & (ticks <= top)]
    axes.set_yticks(ticks, [_short(text(tick)) for tick in ticks])
    axes.set_ylim(0, top)


def _columns(axes: Axes, values: np.ndarray, colour: str, worst: str | None) -> None:
    """Draw columns, the highest in the colour `worst` if it stands out. Very many ranks are drawn as one area."""
    n, most = values.size, int(values.argmax())
    if n <= _MOST_COLUMNS:
        columns = axes.bar(range(n), values, color=colour, width=_width(n))
        highest = columns[most]
    else:
        axes.stairs(values, np.arange(n + 1) - 0.5, fill=True, color=colour, linewidth=0)
        highest = axes.bar([most], values[most], color=colour, width=n / 300)[0]
    if worst and values.max() > _UNEVEN * values.mean():
        highest.set_color(worst)


def _width(columns: int) -> float:
    return 0.5 if columns <= 4 else 0.8


def _short(text: str) -> str:
    """15.0 M is 15 M on an axis, and 2.50 G is 2.5 G."""
    return re.sub(r"\.(\d*?)0+(?= |$)", lambda digits: f".{digits[1]}" if digits[1] else "", text)


def _mean(axes: Axes, mean: float) -> None:
    axes.axhline(mean, color=INK, **LEVEL)
    axes.annotate("mean", (1.0, mean), xytext=(3, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                  va="center", fontsize=8, color=INK, annotation_clip=False)  # fmt: skip


def _by_stage(ranks: RankLoad) -> RankLoad:
    """The same ranks in the order of stages."""
    order = np.lexsort((ranks.rank, ranks.stage))
    values = {field.name: getattr(ranks, field.name) for field in fields(ranks)}
    return RankLoad(**{name: value[order] if value.size else value for name, value in values.items()})


def _name_ranks(axes: Axes, ranks: RankLoad, *, stages: bool = True) -> None:
    n = ranks.rank.size
    mark_every(axes, [float(i) for i in range(n)], [str(rank) for rank in ranks.rank], room=40)
    axes.set_xlim(-0.6, n - 0.4)
    axes.set_xlabel("rank")
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y")
    _mark_stages(axes, ranks, named=stages)


def _mark_stages(axes: Axes, ranks: RankLoad, *, named: bool = True) -> None:
    edges = [0, *(np.flatnonzero(np.diff(ranks.stage)) + 1).tolist(), ranks.rank.size]
    if len(edges) > 2:
        name_stages(axes, edges, ranks.stage[edges[:-1]].tolist(), named=named)
