"""Figure of the pairs of steps with and without each balancer."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter

from balancing.trials import ClockGain, Pair
from balancing_tools.report.figures.style import BACKWARD, FORWARD, INK, LEVEL, NEUTRAL, OTHER, new_figure, svg

__all__ = ["pairs_of_steps"]

_COLOURS = {"experts": BACKWARD, "sequences": OTHER, "layers": FORWARD}
_ROOM = 1.05  # between the outermost value and the edge


def pairs_of_steps(gains: Mapping[str, ClockGain], pairs: Mapping[str, Sequence[Pair]]) -> str:
    """SVG: the ratio of each pair in order, with the median and its interval, one panel a balancer.

    A pair with a very slow step is a cross at the edge.

    gains: of the balancers with pairs, at least one.
    pairs: by balancer.
    """
    names = [name for name in gains if pairs.get(name)]
    bottom, top = _range([gains[name] for name in names], [pairs[name] for name in names])
    with new_figure(height=2.6) as figure:
        panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
        for axes, name in zip(panels, names, strict=True):
            gain, colour = gains[name], _COLOURS.get(name, NEUTRAL)
            ratios = np.array([pair.ratio for pair in pairs[name]])
            number, inside = np.arange(1, len(ratios) + 1), (ratios >= bottom) & (ratios <= top)
            if gain.low > 0 and np.isfinite(gain.high):
                axes.axhspan(gain.low, gain.high, color=colour, alpha=0.25, linewidth=0)
            axes.axhline(gain.ratio, color=colour, linewidth=1.4)
            axes.axhline(1.0, color=INK, **LEVEL)
            for shown, marker in ((inside, "o"), (~inside, "x")):
                y = ratios[shown].clip(bottom * 1.01, top / 1.01)
                axes.plot(number[shown], y, linestyle="none", marker=marker, markersize=4, color=colour)
            axes.set_yscale("log")
            axes.set_ylim(bottom, top)
            axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
            axes.yaxis.set_major_formatter(ScalarFormatter())
            axes.yaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_locator(MaxNLocator(max(2, 8 // len(names)), integer=True))
            axes.margins(x=0.06)
            title = f"{name} {gain}"
            axes.set_title(title.replace(" (", "\n(") if len(names) > 2 else title, fontsize=8.5)
            axes.set_xlabel("pair")
            axes.grid(axis="y")
        panels[0].set_ylabel("without / with it")
        return svg(figure, "pairs")


def _range(gains: Sequence[ClockGain], pairs: Sequence[Sequence[Pair]]) -> tuple[float, float]:
    """The ratios that are shown: 1, all intervals, and nine of ten pairs."""
    known = [1.0, *(gain.ratio for gain in gains), *(gain.low for gain in gains if gain.low > 0)]
    known += [gain.high for gain in gains if np.isfinite(gain.high)]
    for of_balancer in pairs:
        known += np.quantile([pair.ratio for pair in of_balancer], [0.05, 0.95], method="nearest").tolist()
    return min(known) / _ROOM, max(known) * _ROOM
