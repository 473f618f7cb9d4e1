"""The figure of a forecast, as inline SVG that follows the colours of its page, and the page around it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from balancing.report.figures.style import (
    BACKWARD,
    FORWARD,
    INK,
    LEVEL,
    NEUTRAL,
    OTHER,
    RECOMPUTE,
    new_figure,
    svg,
)
from balancing.report.units import duration
from balancing.whatif.forecast import SCENARIOS, Forecast

__all__ = ["page", "step_figure"]

_COLOURS = dict(zip(SCENARIOS, (NEUTRAL, FORWARD, RECOMPUTE, BACKWARD, OTHER), strict=True))


def step_figure(groups: Sequence[Sequence[Forecast]], capacity: float | None) -> str:
    """SVG: the step of each scenario over that of none by number of GPUs, and the fullest rank's memory.

    groups: the scenarios of each number of GPUs.
    capacity: bytes of a device; None if not known.
    """
    memory = all(each.memory is not None for group in groups for each in group)
    with new_figure(height=3.4) as figure:
        axes, *more = np.atleast_1d(figure.subplots(1, 1 + memory, width_ratios=(2, 1)[: 1 + memory]))
        positions, labels = np.arange(len(groups)), []
        width = 0.8 / len(SCENARIOS)
        for at, name in enumerate(SCENARIOS):
            shares = [_of(group, name).step_seconds / group[0].step_seconds for group in groups]
            bars = axes.bar(positions + (at - 2) * width, shares, 0.92 * width, color=_COLOURS[name], label=name)
            if len(groups) <= 4:
                axes.bar_label(bars, [f"{share:.2f}" for share in shares], padding=2, fontsize=7.5, color=INK)
        for group in groups:
            labels.append(f"{group[0].gpus:,} GPUs\n{duration(group[0].step_seconds)} without")
        axes.axhline(1.0, color=INK, zorder=1, **LEVEL)
        axes.set_xticks(positions, labels)
        axes.set_ylim(0, 1.15)
        axes.set_title("step time over that without balancing")
        axes.grid(axis="y")
        figure.legend(loc="outside upper left", ncols=len(SCENARIOS))
        for right in more:
            for side, name in ((-0.5, "none"), (0.5, "all")):
                used = [(_of(group, name).memory or 0.0) / 1e9 for group in groups]
                right.bar(positions + side * 0.4, used, 0.37, color=_COLOURS[name])
            if capacity is not None:
                right.axhline(capacity / 1e9, color=INK, **LEVEL)
                right.set_ylim(0, 1.12 * max(capacity / 1e9, right.get_ylim()[1]))
            right.set_xticks(positions, [f"{group[0].gpus:,}" for group in groups])
            right.set_title("GB of the fullest rank" + ("; dotted: a device" if capacity else ""))
            right.grid(axis="y")
        return svg(figure, "whatif")


def _of(group: Sequence[Forecast], balancer: str) -> Forecast:
    return next((each for each in group if each.balancer == balancer), group[0])


def page(
    title: str,
    verdicts: Sequence[str],
    figure: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str],
) -> str:
    """The whole HTML document."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("page.html.jinja").render(
        title=title, verdicts=verdicts, figure=Markup(figure), head=head, rows=rows, notes=notes
    )
