"""Figures of the load of experts by layer, and of expert-parallel ranks without and with replicas."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap

from balancing_tools.report.figures.style import (
    INK,
    MUTED,
    NEUTRAL,
    SURFACE,
    WORST,
    before_and_after,
    mark_every,
    new_figure,
    outline,
    svg,
)

__all__ = ["expert_heat"]

_CLIP = 2.0  # colours end at a quarter of the mean and at four times the mean

_MOST_NUMBERS = 4  # with more ranks, shares are not written into the figure
_MOST_LAYERS = 26  # with more layers, too

_MAP = LinearSegmentedColormap.from_list("share", ["#2f66a8", "#8fb3d9", "#eceae6", "#e79a8d", "#b3263f"])


Shares = dict[int, np.ndarray]


def expert_heat(share: Shares, rank_share: Shares, home_share: Shares) -> str:
    """SVG with panels of layers by experts, and of layers by expert-parallel ranks without and with replicas.

    Colours are tokens over the layer's mean. The last panel has a bar for the fullest rank of each layer.

    share       layer -> float array [expert], 1.0 is the mean
    rank_share  layer -> float array [expert-parallel rank], with replicas; with one rank only experts are shown
    home_share  layer -> float array [expert-parallel rank], without replicas; empty if experts are not balanced
    """
    layers = sorted(share)
    size = max(ranks.size for ranks in rank_share.values())
    tall = min(max(0.2 * len(layers), 0.5), 5.2)
    panels = [("tokens of experts", share, 5.0)]
    if size > 1 and home_share:
        panels += [("EP ranks before", rank_share | home_share, 1.1), ("EP ranks after", rank_share, 1.1)]
    widths = [width for _, _, width in panels] + ([1.4 if home_share else 1.0] if size > 1 else [])
    homes = [home_share.get(layer, rank_share[layer]) for layer in layers] if home_share else []
    fullest = max((ranks.max() for ranks in homes), default=1.0)
    clip = min(max(float(np.log2(fullest)), 0.1), _CLIP)  # for ranks: they differ less than experts
    with new_figure(height=(1.25 if home_share else 1.0) + tall) as figure:
        grid = figure.add_gridspec(2, len(widths), width_ratios=widths, height_ratios=[0.13, tall])
        left = figure.add_subplot(grid[1, 0])
        images = []
        for column, (title, shares, _) in enumerate(panels):
            axes = figure.add_subplot(grid[1, column], sharey=left) if column else left
            images.append(_heat(axes, [shares[layer] for layer in layers], clip if column else _CLIP))
            if home_share:
                axes.set_title(title)
            if column:
                axes.tick_params(axis="y", labelleft=False)
                ranks = [float(rank) for rank in range(size)]
                mark_every(axes, ranks, [str(rank) for rank in range(size)], room=8)
                if size <= _MOST_NUMBERS and len(layers) <= _MOST_LAYERS:
                    _number(axes, [shares[layer] for layer in layers])
                axes.set_xlabel("EP rank")
        most = max(tokens.size for tokens in share.values())
        for rank in range(1, size):
            if size <= 64:
                left.axvline(rank * most / size - 0.5, color=SURFACE, linewidth=1.6 if size <= 16 else 0.7)
        mark_every(left, [float(e) for e in range(most)], [str(e) for e in range(most)], room=26)
        mark_every(left, [float(r) for r in range(len(layers))], [str(layer) for layer in layers], room=26, along="y")
        left.set_xlabel("expert" + (f"; lines part the {size} expert-parallel ranks" if 1 < size <= 64 else ""))
        left.set_ylabel("layer")
        bar = figure.colorbar(
            images[0], cax=figure.add_subplot(grid[0, 0]), orientation="horizontal", ticklocation="top"
        )
        bar.set_ticks([-2, -1, 0, 1, 2], labels=["1/4 or less", "1/2", "mean", "2x", "4x or more"])
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0)
        ends = bar.ax.get_xticklabels()
        ends[0].set_horizontalalignment("left")
        ends[-1].set_horizontalalignment("right")
        if size > 1:
            right = figure.add_subplot(grid[1, -1], sharey=left)
            _fullest(right, [rank_share[layer] for layer in layers], homes)
            if home_share:
                figure.legend(handles=before_and_after(NEUTRAL), loc="outside upper right", ncols=2)
        return svg(figure, "experts")


def _heat(axes: Axes, rows: list[np.ndarray], clip: float) -> Any:
    """Draw rows of shares as colours that end at 2^clip and its inverse; returns the image."""
    most = max(row.size for row in rows)
    heat = np.full((len(rows), most), np.nan)
    for number, row in enumerate(rows):
        heat[number, : row.size] = np.log2(np.maximum(row, 2.0**-10))
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return axes.imshow(
        heat, aspect="auto", cmap=_MAP, vmin=-clip, vmax=clip, interpolation="nearest",
        extent=(-0.5, most - 0.5, len(rows) - 0.5, -0.5),
    )  # fmt: skip


def _number(axes: Axes, rows: list[np.ndarray]) -> None:
    for row, shares in enumerate(rows):
        for column, value in enumerate(shares):
            axes.text(column, row, f"{value:.2f}", ha="center", va="center_baseline", fontsize=6.5, color="#1c2430")


def _fullest(axes: Axes, after: list[np.ndarray], before: list[np.ndarray]) -> None:
    """Draw a bar for each layer: its fullest rank over the mean, with an outline for `before` balancing if known."""
    worst = np.array([ranks.max() for ranks in after])
    top = worst.max()
    colour = [
        WORST if row == worst.argmax() and len(worst) > 1 and not before else NEUTRAL for row in range(len(worst))
    ]
    axes.barh(range(len(worst)), worst - 1.0, left=1.0, color=colour, height=0.75)
    if before:
        at_home = np.array([ranks.max() for ranks in before])
        outline(axes, at_home, thick=0.75, along="y", base=1.0)
        top = max(top, at_home.max())
    axes.axvline(1.0, color=INK, linewidth=0.9)
    axes.set_xlim(1.0, max(1.02, 1.0 + (top - 1.0) * 1.1))
    axes.set_xlabel("fullest rank / mean")
    axes.grid(axis="x")
    axes.locator_params(axis="x", nbins=3)
    axes.tick_params(axis="y", length=0, labelleft=False)
    axes.spines["left"].set_color(MUTED)
