"""What each balancer gains, and the pipeline before and after: the picture of `scripts/demo.sh`."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from balancing.report import read_history
from balancing.report.trace import TraceIteration
from balancing_tools.report.figures.style import BACKWARD, FORWARD
from benchmarks.figure import save_figure

__all__ = ["BEFORE", "draw"]

_COLORS = {"forward": FORWARD, "backward": BACKWARD}
BEFORE = 3  # the iteration, from 1, of a run that moves layers behind it


def draw(seconds: Mapping[str, float], before: Path, after: Path, path: Path) -> None:
    """Draw the picture into `path`.

    seconds: of a step, by name of the variant. "none" is what gains are over; "limit" becomes a line; the others are
        bars.
    before: folder of the report of a run that moves layers.
    after: the same with all balancers.

    Raises ValueError where a report has no timeline.
    """
    figure, (bars, *pipelines) = plt.subplots(3, 1, figsize=(9, 8.5), height_ratios=(1, 1, 1))
    names = [name for name in seconds if name not in ("none", "limit")]
    gains = [seconds["none"] / seconds[name] for name in names]
    labels = [f"{name} alone" if name != "all" else "all three" for name in names]
    drawn = bars.bar(labels, gains, 0.6, color=["#2f7d5b" if name == "all" else "#7fb59c" for name in names])
    bars.bar_label(drawn, [f"{gain:.2f}x" for gain in gains], label_type="center", fontsize=12)
    bars.axhline(1, color="#808080", linewidth=1)
    if "limit" in seconds:
        limit = seconds["none"] / seconds["limit"]
        bars.axhline(limit, color="#d1495b", linestyle="--", linewidth=1)
        bars.annotate(
            f"limit: even work, {limit:.2f}x", (-0.45, limit), (0, 3), textcoords="offset points", color="#d1495b"
        )
    bars.set_ylabel("times faster than without")
    bars.margins(y=0.2)
    bars.set_title("Emulated, 8 ranks: frozen layers, documents and routing uneven", fontsize=10, loc="left")
    steps = {"before": _step(before, BEFORE), "after": _step(after, None)}
    longest = max(step.step_seconds for step in steps.values())
    for axes, (when, step) in zip(pipelines, steps.items(), strict=True):
        _pipeline(axes, step)
        axes.set_xlim(0, longest)
        layers = " and ".join(str(len(each)) for each in step.layers.values())
        what = "no balancer" if when == "before" else "all three"
        title = f"Pipeline {when} ({what}): {step.step_seconds:.1f} s a step, layers of the stages {layers}"
        axes.set_title(f"{title}; white is waiting", fontsize=10, loc="left")
    pipelines[-1].set_xlabel("seconds")
    figure.legend(
        handles=[plt.Rectangle((0, 0), 1, 1, color=color, label=name) for name, color in _COLORS.items()],
        frameon=False, ncols=2, loc="lower right",
    )  # fmt: skip
    for axes in (bars, *pipelines):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    save_figure(figure, path, dpi=120, facecolor="white")
    plt.close(figure)


def _step(report: Path, iteration: int | None) -> TraceIteration:
    """The timeline of this iteration, or of the last."""
    timed = [one for one in read_history(report).timelines if any(one.spans.values())]
    found = [one for one in timed if iteration in (None, one.iteration)]
    if not found:
        raise ValueError(f"{report} has no timeline; record a run with --balance-report")
    return found[-1]


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
