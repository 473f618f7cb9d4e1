"""Step time as balancers switch on, and the pipeline before and after: the picture of `scripts/demo.sh`."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from balancing.report import read_history
from balancing.report.figures.style import BACKWARD, FORWARD
from balancing.report.trace import TraceIteration

__all__ = ["draw"]

_COLORS = {"forward": FORWARD, "backward": BACKWARD}


def draw(seconds: Mapping[str, float], reports: Mapping[str, Path], path: Path) -> None:
    """Draw the picture into `path`.

    seconds: of a step, by name of the variant, in the order of the bars.
    reports: folders of two reports by name, before and after.

    Raises ValueError where a report has no timeline.
    """
    figure, (bars, *pipelines) = plt.subplots(3, 1, figsize=(9, 9), height_ratios=(1, 1.25, 1.25))
    names = list(seconds)
    colors = ["#b0b0b0" if name in ("none", "limit") else "#2f7d5b" for name in names]
    drawn = bars.bar(range(len(names)), [seconds[name] for name in names], 0.6, color=colors)
    bars.bar_label(drawn, [f"{seconds[name]:.1f} s" for name in names])
    bars.set_xticks(range(len(names)), names)
    bars.set_ylabel("seconds of a step")
    bars.margins(y=0.15)
    bars.set_title("Emulated: 16 ranks, layers, documents and routing uneven", fontsize=10, loc="left")
    steps = {name: _last_step(report) for name, report in reports.items()}
    longest = max(step.step_seconds for step in steps.values())
    for axes, (name, step) in zip(pipelines, steps.items(), strict=True):
        _pipeline(axes, step)
        axes.set_xlim(0, longest)
        layers = " and ".join(str(len(each)) for each in step.layers.values())
        axes.set_title(f"Pipeline, balancers on: {name}; layers of the stages: {layers}", fontsize=10, loc="left")
    pipelines[-1].set_xlabel("seconds")
    pipelines[0].legend(
        handles=[plt.Rectangle((0, 0), 1, 1, color=color, label=name) for name, color in _COLORS.items()],
        frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1),
    )  # fmt: skip
    for axes in (bars, *pipelines):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120, facecolor="white")
    plt.close(figure)


def _last_step(report: Path) -> TraceIteration:
    timed = [one for one in read_history(report).timelines if any(one.spans.values())]
    if not timed:
        raise ValueError(f"{report} has no timeline; record a run with --balance-report")
    return timed[-1]


def _pipeline(axes: plt.Axes, step: TraceIteration) -> None:
    """Layers' passes on the clock, a row for each rank; within a pass only the share of time that was work."""
    ranks = sorted(step.spans)
    for row, rank in enumerate(ranks):
        for kind, color in _COLORS.items():
            passes = [span for span in step.spans[rank] if span.kind == kind]
            axes.broken_barh([(each.start, each.busy) for each in passes], (row - 0.4, 0.8), color=color, linewidth=0)
    axes.set_yticks(range(len(ranks)), [f"{rank}" for rank in ranks], fontsize=7)
    axes.set_ylabel("rank")
    axes.invert_yaxis()
