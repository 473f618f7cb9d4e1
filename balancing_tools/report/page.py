"""The report as one HTML file without scripts and without fonts or images from elsewhere.

In order: short answers, what balancing gained, the slow stages, ranks and experts, what perfect balance would still
give, what the balancers did, then figures, each with a caption that says what to look for. A figure without data is
replaced by one line that says why. The template is `page.html.jinja`.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from balancing.files import write_text
from balancing.report.findings import (
    ACTIONS,
    FINDINGS,
    PROSPECTS,
    action_rows,
    answers,
    basis,
    finding_rows,
    not_seen,
    prospect_rows,
    rank_name,
    shown_columns,
)
from balancing.report.history import History, report_files
from balancing.report.summary import Summary
from balancing.report.trace import TraceIteration
from balancing.report.units import byte_count, count, duration, ratio, share
from balancing_tools.report import figures

__all__ = ["page", "write_page"]

_IMBALANCE = """1 is perfect balance. Look for the highest curve, and for curves that rise. A balancer's gain is the
distance from its dashed curve (the same iteration without the balancer) to its solid curve."""

_ALONE = "one rank has none to be compared with"


class _Table(NamedTuple):
    title: str
    head: list[str]
    rows: list[list[str]]


class _Figure(NamedTuple):
    """A figure and its caption; with an empty `svg` the text says why the figure is left out."""

    title: str
    svg: Markup
    text: str


def write_page(path: str | os.PathLike[str], history: History, summary: Summary) -> None:
    """Write the page to `path`. Raises ValueError if the file cannot be written; the old file is then kept."""
    write_text(path, page(history, summary), report_files(history.directory))


def page(history: History, summary: Summary) -> str:
    """The whole HTML document."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("page.html.jinja").render(
        name=history.directory.resolve().name,
        basis=_size(summary) + basis(summary),
        answers=answers(summary),
        gains=_gains(summary),
        steps=list(_steps(summary)),
        tables=[
            _Table("", *shown_columns(FINDINGS, finding_rows(summary))),
            _Table(PROSPECTS[0].capitalize(), *shown_columns(("balanced", *PROSPECTS[1:]), prospect_rows(summary))),
            _Table("What the balancers did", *shown_columns(ACTIONS, action_rows(summary))),
        ],
        figures=list(_figures(history, summary)),
    )


def _gains(summary: Summary) -> list[dict[str, str]]:
    """One tile for each balancer. A bar is max / mean - 1, in percent of the longest bar."""
    longest = max([gain.before - 1 for gain in summary.gains] + [gain.after - 1 for gain in summary.gains] + [1e-9])
    return [
        {
            "balancer": gain.balancer,
            "what": gain.what,
            "before": ratio(gain.before),
            "after": ratio(gain.after),
            "width_before": f"{100 * (gain.before - 1) / longest:.1f}",
            "width_after": f"{100 * (gain.after - 1) / longest:.1f}",
        }
        for gain in summary.gains
    ]


def _steps(summary: Summary) -> Iterator[dict[str, str]]:
    """Tiles of the step: before and after micro-batches were balanced, and before and after the last move."""
    if summary.dealt is not None:
        before, after = map(ratio, summary.dealt)
        yield {"what": "modelled, of one with equal micro-batches", "before": before, "after": after}
    if (move := summary.move) is not None and move.same_size:
        what = "layers moved back" if move.action == "rollback" else "layers moved"
        times = {"before": duration(move.step_before), "after": duration(move.step_after)}
        yield {"what": f"when {what}, iteration {move.iteration}"} | times


def _size(summary: Summary) -> str:
    if summary.ranks is None:
        return ""
    ranks, stages = summary.ranks.rank.size, summary.stage_count
    return f"{ranks} rank{'s' if ranks > 1 else ''}, {stages} pipeline stage{'s' if stages > 1 else ''}; "


def _figures(history: History, summary: Summary) -> Iterator[_Figure]:
    yield from _pairs(history)
    yield _imbalance(history)
    yield from _timeline(history, summary)
    yield from _stages(summary)
    yield _time(summary)
    yield _layers(summary)
    yield _experts(summary)
    yield from _attention(summary)
    yield _work(summary)
    yield _memory(summary)


def _figure(title: str, svg: str, text: str) -> _Figure:
    return _Figure(title, Markup(svg), text)


def _left_out(title: str, why: str) -> _Figure:
    return _Figure(title, Markup(""), why)


def _pairs(history: History) -> Iterator[_Figure]:
    if not any(history.pairs.values()):
        return
    yield _figure(
        "Steps without and with each balancer",
        figures.pairs_of_steps(history.by_the_clock, history.pairs),
        "A dot is a pair of steps: the seconds of the one without the balancer over those of the one with it. Above 1 "
        "the balancer makes steps shorter. The line is the median, the band its 95 % interval: look whether it is "
        "clear of 1. A cross at the edge lies beyond it: one of its steps was slow for another reason. For layers, "
        "steps before they moved are compared with steps after it.",
    )


def _timeline(history: History, summary: Summary) -> Iterator[_Figure]:
    """Timeline of an iteration from before layers moved, if there is one, and of a typical one, on equal axes."""
    title = "One iteration on the clock"
    if history.no_timeline:
        yield _left_out(title, history.no_timeline)
        return
    timed = [one for one in history.timelines if any(one.spans.values()) and one.iteration not in history.in_graphs]
    if not timed:
        yield _left_out(title, not_seen(summary))
        return
    now = [one for one in timed if one.layers == timed[-1].layers]
    one = figures.choose(now, summary.step_seconds)
    look = "look for the row with the least idle time, the others wait for it"
    if len(one.spans) == 1:
        look = "grey is time without work on the device"
    before = [one for one in timed if one.layers != timed[-1].layers][-1:]
    longest = max(each.step_seconds for each in [one, *before])
    for each in before:
        yield _one_iteration(f"{title}, before layers moved", each, look, summary, longest)
        stages = ", ".join(_moved(stage, each.layers.get(stage, ()), layers) for stage, layers in one.layers.items())
        title, look = f"{title}, after layers moved", f"since then {stages}"
    yield _one_iteration(title, one, look, summary, longest)


def _moved(stage: int, before: tuple[int, ...], after: tuple[int, ...]) -> str:
    return f"stage {stage} went from {len(before)} to {len(after)} layers"


def _one_iteration(title: str, one: TraceIteration, look: str, summary: Summary, seconds: float) -> _Figure:
    name = f"timeline-{one.iteration}"
    svg, shown, lower = figures.timeline(one, summary.rank.which if summary.rank else None, name, seconds)
    some = f" {shown} of {len(one.spans)} ranks are shown." if shown < len(one.spans) else ""
    waits = " A bar lower than its row waited inside the layer: its height is the share that was work." if lower else ""
    return _figure(
        title,
        svg,
        f"Iteration {one.iteration}, {duration(one.step_seconds)}: {look}. Numbers are micro-batches.{waits}{some}",
    )


def _stages(summary: Summary) -> Iterator[_Figure]:
    if (move := summary.move) is None:
        return
    moved = "moved back" if move.action == "rollback" else "moved"
    yield _figure(
        f"Stages before and after layers {moved}",
        figures.stage_time(move.stage_before, move.stage_after),
        f"Before iteration {move.iteration} layers {moved} from {move.layout_before} to {move.layout_after}: "
        f"{move.reason}. The slowest stage was busy for {duration(float(move.stage_before.max()))} of a step and then "
        f"for {duration(float(move.stage_after.max()))}; a step took {duration(move.step_before)} and then "
        f"{duration(move.step_after)}.",
    )


def _time(summary: Summary) -> _Figure:
    title = "Busy and idle time of ranks"
    if summary.ranks is None or summary.rank is None:
        return _left_out(title, not_seen(summary, "no step was timed"))
    if summary.ranks.rank.size == 1:
        return _left_out(title, f"{_ALONE}; it was busy for {duration(summary.rank.value)} of a step")
    before = "" if summary.move is None else " Dashed boxes are busy times before layers moved."
    of = f" They are {not_seen(summary)}." if summary.graph_seconds is not None else ""
    return _figure(
        title,
        figures.rank_time(summary.ranks, summary.move.rank_before if summary.move else None),
        f"The typical step. Bars above the dotted mean set the pace; the slowest, "
        f"{rank_name(summary, summary.rank.which)}, is red. Grey is idle time, {share(summary.bubble or 0.0)} of all "
        f"rank time.{before}{of}",
    )


def _layers(summary: Summary) -> _Figure:
    title = "Cost of each layer"
    if summary.layers is None:
        return _left_out(title, not_seen(summary, "no layer was timed"))
    cuts = " and for stages whose bars add up to more than others'" if summary.stage_count > 1 else ""
    of = f" They are {not_seen(summary)}." if summary.graph_seconds is not None else ""
    return _figure(title, figures.layer_costs(summary.layers), f"Look for bars above the dotted median{cuts}.{of}")


def _experts(summary: Summary) -> _Figure:
    title = "Load of each expert"
    if not summary.share_experts or summary.expert is None:
        return _left_out(title, "no tokens were routed to experts, this is a dense model")
    caption = (
        f"Tokens of each expert over the mean of its layer: look for red, the hottest is expert "
        f"{summary.expert.which} of layer {summary.expert.layer}."
    )
    ranks, homes = summary.share_expert_ranks, summary.share_expert_homes
    if max(each.size for each in ranks.values()) > 1:
        if homes:
            caption += (
                " Replicas change which expert-parallel (EP) rank computes a token, not which expert. Before: every "
                "expert on its home rank. After: with replicas. Their colours end at the fullest rank."
            )
            if frozen := [layer for layer in sorted(homes) if np.array_equal(homes[layer], ranks[layer])]:
                names = f"Layer{'s' if len(frozen) > 1 else ''} {', '.join(map(str, frozen))}"
                caption += f" {names} had no replicas: frozen, or nothing to gain."
        caption += " On the right: the fullest EP rank over the mean. The other ranks wait for it."
    return _figure(title, figures.expert_heat(summary.share_experts, ranks, homes), caption)


def _attention(summary: Summary) -> Iterator[_Figure]:
    before, after = summary.attention_before, summary.attention_after
    if before is None or after is None:
        return
    yield _figure(
        "Attention of ranks in a micro-batch",
        figures.rank_attention(before, after),
        "Context-parallel ranks wait for one another in every layer of every micro-batch, so all bars should reach "
        f"the dotted mean and none exceed it. The fullest rank had {ratio(after.max())} the mean; as Megatron-LM cuts "
        f"a batch, it would have {ratio(before.max())}.",
    )


def _work(summary: Summary) -> _Figure:
    title = "Tokens and attention of ranks"
    if summary.ranks is None or summary.tokens is None or summary.area is None or not summary.ranks.tokens.any():
        return _left_out(title, "no tokens were counted")
    if summary.ranks.rank.size == 1:
        tokens, pairs = count(summary.tokens.value), count(summary.area.value)
        return _left_out(title, f"{_ALONE}; it had {tokens} tokens and {pairs} query-key pairs a step")
    return _figure(
        title,
        figures.rank_work(summary.ranks),
        "Medians over steps. Ranks with equal tokens can differ in attention, since a document of l tokens has "
        f"l (l + 1) / 2 pairs. In a typical step the fullest rank has {ratio(summary.tokens.typical)} the mean tokens "
        f"and {ratio(summary.area.typical)} the mean attention area.",
    )


def _imbalance(history: History) -> _Figure:
    title = "Imbalance over the run"
    if not history.iterations:
        return _left_out(title, "no iteration was observed")
    if (svg := figures.imbalance_curves(history)) is None:
        return _left_out(title, "with one rank, one stage and no experts there is nothing to compare")
    return _figure(title, svg, _IMBALANCE)


def _memory(summary: Summary) -> _Figure:
    title = "Memory of ranks"
    if summary.ranks is None or not summary.ranks.memory.size:
        return _left_out(title, "no memory was measured")
    if summary.ranks.rank.size == 1:
        return _left_out(title, f"{_ALONE}; it held {byte_count(float(summary.ranks.memory[0]))} at most")
    return _figure(
        title, figures.rank_memory(summary.ranks), "The most each rank held: the fullest, in red, runs out first."
    )
