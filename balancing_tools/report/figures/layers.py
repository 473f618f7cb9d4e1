"""Figures of the cost of each layer with stage boundaries, and of stages before and after layers moved."""

from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes

from balancing.report.summary import LayerCosts
from balancing_tools.report.figures.style import (
    BACKWARD,
    FORWARD,
    GRID,
    INK,
    LEVEL,
    RECOMPUTE,
    before_and_after,
    mark_every,
    name_stages,
    new_figure,
    outline,
    svg,
)

__all__ = ["layer_costs", "stage_time"]

_SHORT = {"embedding": "emb", "head": "head"}


def layer_costs(costs: LayerCosts) -> str:
    """SVG: forward, recompute and backward of each layer stacked, in ms per micro-batch, with the stage boundaries."""
    with new_figure(height=3.4) as figure:
        axes = figure.subplots()
        x = np.arange(len(costs.names))
        bottom = np.zeros(len(x))
        for name, seconds, colour in (
            ("forward", costs.forward, FORWARD),
            ("recompute", costs.recompute, RECOMPUTE),
            ("backward", costs.backward, BACKWARD),
        ):
            if seconds.any():
                axes.bar(x, seconds * 1e3, bottom=bottom, color=colour, width=0.8, label=name)
                bottom += seconds * 1e3
        if costs.numbered.sum() > 2:
            median = float(np.median(costs.total[costs.numbered])) * 1e3
            axes.axhline(median, color=INK, label="median layer", **LEVEL)
        axes.set_xlim(-0.6, len(x) - 0.4)
        axes.set_ylim(0, max(bottom.max(), 1e-9) * 1.04)
        axes.set_ylabel("ms per micro-batch")
        axes.set_xlabel("layer")
        axes.grid(axis="y")
        axes.tick_params(axis="x", length=0)
        _name_layers(axes, costs)
        _mark_stages(axes, costs)
        figure.legend(loc="outside upper right", ncols=4)
        return svg(figure, "layers")


def stage_time(before: np.ndarray, after: np.ndarray) -> str:
    """SVG: busy seconds of pipeline stages in a step, before and after layers moved. Stages that left have no bar."""
    with new_figure(height=2.5) as figure:
        axes = figure.subplots()
        most = float(max(before.max(), after.max()))
        scale, unit = (1e3, "ms") if most < 2 else (1.0, "s")
        stages = max(before.size, after.size)
        thick = 0.5 if stages <= 4 else 0.8
        axes.barh(range(after.size), after * scale, height=thick, color=FORWARD)
        outline(axes, before * scale, thick=thick, along="y")
        axes.axvline(float(after.mean()) * scale, color=INK, label="mean after", **LEVEL)
        mark_every(axes, [float(s) for s in range(stages)], [f"stage {s}" for s in range(stages)], room=20, along="y")
        axes.set_ylim(stages - 0.5, -0.5)
        axes.set_xlim(0, most * scale * 1.03)
        axes.set_xlabel(f"{unit} busy in a step")
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        handles = [*before_and_after(FORWARD), *axes.get_legend_handles_labels()[0]]
        figure.legend(handles=handles, loc="outside upper right", ncols=3)
        return svg(figure, "stages")


def _name_layers(axes: Axes, costs: LayerCosts) -> None:
    numbers = [i for i, name in enumerate(costs.names) if isinstance(name, int)]
    others = [i for i in range(len(costs.names)) if i not in set(numbers)]
    mark_every(axes, [float(i) for i in numbers], [str(costs.names[i]) for i in numbers], room=34)
    shown = list(zip(axes.get_xticks(), [label.get_text() for label in axes.get_xticklabels()], strict=True))
    width = len(costs.names) / 40  # of a word, in layers
    shown = [(at, text) for at, text in shown if all(abs(at - other) > width for other in others)]
    shown += [(float(i), _SHORT.get(str(costs.names[i]), str(costs.names[i]))) for i in others]
    axes.set_xticks([at for at, _ in shown], [text for _, text in shown])


def _mark_stages(axes: Axes, costs: LayerCosts) -> None:
    """Mark where the stage changes, and shade every other stage."""
    if costs.stage.max() == 0:
        return
    edges = [0, *(np.flatnonzero(np.diff(costs.stage)) + 1).tolist(), len(costs.names)]
    for begin, end in list(pairwise(edges))[1::2]:
        axes.axvspan(begin - 0.5, end - 0.5, color=GRID, alpha=0.35, linewidth=0, zorder=0)
    name_stages(axes, edges, costs.stage[edges[:-1]].tolist())
