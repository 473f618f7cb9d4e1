"""Which experts are hot, in which layer, and what that does to the ranks that hold them."""

import numpy as np
from matplotlib.colors import LinearSegmentedColormap

from balancing.report.figures.style import (
    INK,
    MUTED,
    NEUTRAL,
    SURFACE,
    WORST,
    mark_every,
    new_figure,
    svg,
)

__all__ = ["expert_heat"]

_CLIP = 2.0  # colours end at a quarter of the mean and at four times the mean

_MAP = LinearSegmentedColormap.from_list("share", ["#2f66a8", "#8fb3d9", "#eceae6", "#e79a8d", "#b3263f"])


def expert_heat(share: dict[int, np.ndarray], rank_share: dict[int, np.ndarray]) -> str:
    """SVG: layers by experts coloured by tokens over the layer's mean, and beside it the fullest expert-parallel rank.

    share       layer -> float array [expert], 1.0 is the mean
    rank_share  layer -> float array [expert-parallel rank]; the right panel is left out where there is one rank
    """
    layers = sorted(share)
    most = max(tokens.size for tokens in share.values())
    heat = np.full((len(layers), most), np.nan)
    for row, layer in enumerate(layers):
        heat[row, : share[layer].size] = np.log2(np.maximum(share[layer], 2.0**-10))
    size = max(ranks.size for ranks in rank_share.values())
    tall = min(max(0.2 * len(layers), 0.5), 5.2)
    with new_figure(height=1.0 + tall) as figure:
        grid = figure.add_gridspec(
            2, 2 if size > 1 else 1, width_ratios=[5, 1][: min(size, 2)], height_ratios=[0.13, tall]
        )
        left = figure.add_subplot(grid[1, 0])
        image = left.imshow(
            heat, aspect="auto", cmap=_MAP, vmin=-_CLIP, vmax=_CLIP, interpolation="nearest",
            extent=(-0.5, most - 0.5, len(layers) - 0.5, -0.5),
        )  # fmt: skip
        for rank in range(1, size):
            if size <= 64:
                left.axvline(rank * most / size - 0.5, color=SURFACE, linewidth=1.6 if size <= 16 else 0.7)
        mark_every(left, [float(e) for e in range(most)], [str(e) for e in range(most)], room=26)
        mark_every(left, [float(r) for r in range(len(layers))], [str(layer) for layer in layers], room=26, along="y")
        left.set_xlabel("expert" + (f"; lines part the {size} expert-parallel ranks" if 1 < size <= 64 else ""))
        left.set_ylabel("layer")
        left.tick_params(length=0)
        for spine in left.spines.values():
            spine.set_visible(False)
        bar = figure.colorbar(image, cax=figure.add_subplot(grid[0, 0]), orientation="horizontal", ticklocation="top")
        bar.set_ticks([-2, -1, 0, 1, 2], labels=["1/4 of the mean or less", "1/2", "mean", "2x", "4x the mean or more"])
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0)
        ends = bar.ax.get_xticklabels()
        ends[0].set_horizontalalignment("left")
        ends[-1].set_horizontalalignment("right")
        if size > 1:
            right = figure.add_subplot(grid[1, 1], sharey=left)
            worst = np.array([rank_share[layer].max() for layer in layers])
            colour = [WORST if row == worst.argmax() and len(layers) > 1 else NEUTRAL for row in range(len(layers))]
            right.barh(range(len(layers)), worst - 1.0, left=1.0, color=colour, height=0.75)
            right.axvline(1.0, color=INK, linewidth=0.9)
            right.set_xlim(1.0, max(1.02, 1.0 + (worst.max() - 1.0) * 1.1))
            right.set_xlabel("fullest rank / mean")
            right.grid(axis="x")
            right.locator_params(axis="x", nbins=3)
            right.tick_params(axis="y", length=0, labelleft=False)
            right.spines["left"].set_color(MUTED)
        return svg(figure, "experts")
