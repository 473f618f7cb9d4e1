"""What each layer costs, and where the pipeline is cut: unevenness between stages begins here."""

from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes

from balancing.report.figures.style import (
    BACKWARD,
    FORWARD,
    GRID,
    INK,
    RECOMPUTE,
    mark_every,
    name_stages,
    new_figure,
    svg,
)
from balancing.report.summary import LayerCosts

__all__ = ["layer_costs"]

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
            axes.axhline(median, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), label="median layer")
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
    """Where the stage changes, with every other part shaded."""
    if costs.stage.max() == 0:
        return
    edges = [0, *(np.flatnonzero(np.diff(costs.stage)) + 1).tolist(), len(costs.names)]
    for begin, end in list(pairwise(edges))[1::2]:
        axes.axvspan(begin - 0.5, end - 0.5, color=GRID, alpha=0.35, linewidth=0, zorder=0)
    name_stages(axes, edges, costs.stage[edges[:-1]].tolist())
