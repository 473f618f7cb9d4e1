"""Timeline of one iteration with a row for each rank; gaps between operations are waiting."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch

from balancing.report.record import Span
from balancing.report.trace import TraceIteration
from balancing_tools.report.figures.style import (
    BACKWARD,
    FORWARD,
    IDLE,
    OTHER,
    RECOMPUTE,
    SURFACE,
    mark_every,
    new_figure,
    svg,
)

__all__ = ["MOST_ROWS", "choose", "ranks_shown", "timeline"]

MOST_ROWS = 32
_MOST_VECTORS = 6000  # more rectangles than this make a page slow to open: draw them as pixels
_MOST_NUMBERS = 400
_FULL = 0.93  # a bar that worked for this share of its time is drawn full: clocks are not more exact

_COLOUR = {"forward": FORWARD, "backward": BACKWARD, "recompute": RECOMPUTE}
_STEP_COLOUR = {"forward-step": FORWARD, "backward-step": BACKWARD}


def choose(timelines: list[TraceIteration], step_seconds: float | None) -> TraceIteration:
    """The iteration whose length is nearest to `step_seconds`; the last one if `step_seconds` is None."""
    if step_seconds is None:
        return timelines[-1]
    typical = step_seconds
    return min(reversed(timelines), key=lambda one: abs(one.step_seconds - typical))


def ranks_shown(one: TraceIteration, slowest_rank: int | None) -> list[int]:
    """At most `MOST_ROWS` ranks in the order of stages. If there are more, the same replicas of each stage, among them
    `slowest_rank`."""
    by_stage: dict[int, list[int]] = {}
    for rank in sorted(one.spans):
        by_stage.setdefault(one.stage[rank], []).append(rank)
    stages = [by_stage[stage] for stage in sorted(by_stage)]
    if len(one.spans) <= MOST_ROWS:
        return [rank for members in stages for rank in members]
    slowest = next((members for members in stages if slowest_rank in members), stages[0])
    at = slowest.index(slowest_rank) if slowest_rank in slowest else 0
    replicas = max(1, MOST_ROWS // len(stages))
    shown = []
    for members in stages:
        first = max(0, min(at - replicas // 2, len(members) - replicas))
        shown += members[first : first + replicas]
    if len(stages) <= MOST_ROWS:
        return shown
    first = max(0, min(stages.index(slowest) - MOST_ROWS // 2, len(stages) - MOST_ROWS))
    return shown[first : first + MOST_ROWS]


def timeline(
    one: TraceIteration, slowest_rank: int | None, name: str = "timeline", seconds: float = 0.0
) -> tuple[str, int, bool]:
    """SVG of one iteration, the number of ranks shown, and whether any bar is lower than its row because work waited.

    slowest_rank: is among the ranks shown (`ranks_shown`).
    name: name of the figure, unique in the page.
    seconds: least length of the axis, so that several steps can be compared.
    """
    ranks = ranks_shown(one, slowest_rank)
    with new_figure(height=1.15 + max(len(ranks), 2) * (0.3 if len(ranks) <= 16 else 0.2)) as figure:
        axes = figure.subplots()
        rows = [[span for span in one.spans[rank] if not span.kind.endswith("-exposed")] for rank in ranks]  # idle
        end = max([one.step_seconds, *(span.start + span.seconds for spans in rows for span in spans)])
        scale, unit = (1e3, "ms") if max(end, seconds) < 2 else (1.0, "s")
        lower = _draw(axes, rows, end, scale, inch=max(end, seconds) / (figure.get_figwidth() - 1.3))
        several = len({one.stage[rank] for rank in ranks}) > 1
        labels = [f"stage {one.stage[rank]}, rank {rank}" if several else f"rank {rank}" for rank in ranks]
        mark_every(axes, list(range(len(ranks))), labels, room=MOST_ROWS, along="y")
        axes.set_ylim(len(ranks) - 0.4, -0.6)
        axes.set_xlim(0, max(end, seconds) * scale)
        axes.set_xlabel(f"time in the step [{unit}]")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        kinds = {span.kind.removesuffix("-step") for spans in rows for span in spans}
        known = {"forward": FORWARD, "recompute": RECOMPUTE, "backward": BACKWARD}
        patches = [Patch(color=colour, label=name) for name, colour in known.items() if name in kinds]
        patches += [Patch(color=OTHER, label=", ".join(sorted(kinds - set(known))[:4]))] if kinds - set(known) else []
        patches.append(Patch(color=IDLE, label="idle"))
        figure.legend(handles=patches, loc="outside upper right", ncols=len(patches))
        return svg(figure, name), len(ranks), lower


def _draw(axes: Axes, rows: list[list[Span]], end: float, scale: float, inch: float) -> bool:
    """Draw the bars of all rows. inch: seconds in an inch. Returns whether any bar is lower because work waited."""
    layered = any(span.kind in _COLOUR for spans in rows for span in spans)
    colour_of = _COLOUR if layered else _STEP_COLOUR
    bars: dict[str, list[tuple[int, Span]]] = {}
    calls = [(row, span) for row, spans in enumerate(rows) for span in spans if span.kind in _STEP_COLOUR]
    for row, spans in enumerate(rows):
        for span in spans:
            if span.kind in colour_of:
                bars.setdefault(colour_of[span.kind], []).append((row, span))
            elif span.kind not in _COLOUR and span.kind not in _STEP_COLOUR:
                bars.setdefault(OTHER, []).append((row, span))
    many = sum(map(len, bars.values())) > _MOST_VECTORS
    width = float(np.median([span.seconds for part in bars.values() for _, span in part])) if bars else 0.0
    edge = 0.4 if width > 0.05 * inch and not many else 0.0
    backdrop = [(row, Span("", "", 0, 0, 0.0, end, end)) for row in range(len(rows))]
    axes.add_collection(PolyCollection([_box(*bar, scale) for bar in backdrop], facecolor=IDLE, linewidth=0))
    for order, colour in enumerate((FORWARD, BACKWARD, RECOMPUTE, OTHER)):  # a recompute is drawn over its backward
        boxes = [_box(*bar, scale) for bar in bars.get(colour, [])]
        axes.add_collection(
            PolyCollection(
                boxes,
                facecolor=colour,
                edgecolor=SURFACE if edge else "none",
                linewidth=edge,
                antialiased=edge > 0,
                zorder=2 + order,
                rasterized=many,
            )
        )
    if layered and not many:  # a thin frame keeps one micro-batch apart from the next
        frames = [_box(row, span._replace(busy=span.seconds), scale) for row, span in calls]
        axes.add_collection(PolyCollection(frames, facecolor="none", edgecolor=SURFACE, linewidth=0.9, zorder=8))
    numbers = [(row, span) for row, span in calls if span.seconds >= (0.05 + 0.07 * len(str(span.micro_batch))) * inch]
    if not many and len(numbers) <= _MOST_NUMBERS:
        for row, span in numbers:
            axes.text((span.start + span.seconds / 2) * scale, row, str(span.micro_batch), ha="center",
                      va="center_baseline", fontsize=7, color="#ffffff", zorder=9)  # fmt: skip
    return any(_height(span) < 1 for colour in (FORWARD, BACKWARD, RECOMPUTE) for _, span in bars.get(colour, []))


def _height(span: Span) -> float:
    """Share of the row's height that a bar fills: for a layer the share of its time that was work (1 from `_FULL`)."""
    worked = span.busy / span.seconds if span.seconds > 0 and span.kind in _COLOUR else 1.0
    return worked if worked < _FULL else 1.0


def _box(row: int, span: Span, scale: float) -> np.ndarray:
    a, b = span.start * scale, (span.start + span.seconds) * scale
    top = row + 0.38 - 0.76 * _height(span)
    return np.array([(a, top), (b, top), (b, row + 0.38), (a, row + 0.38)])
