"""The report as one HTML file that opens anywhere: no script, no font, no image from elsewhere.

It is read from the top: the verdict, the names, what balance would give, then a figure for each question with one
sentence that says what to look at. A figure without data is replaced by one line that says why.
"""

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from balancing.report import figures
from balancing.report.findings import action_rows, basis, finding_rows, prospect_rows, rank_name, verdict
from balancing.report.history import History
from balancing.report.summary import Summary
from balancing.report.trace import TraceIteration
from balancing.report.units import byte_count, count, duration, ratio, share

__all__ = ["page", "write_page"]

_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1c2430; --muted: #6b7686; --grid: #dfe4ea;
  --idle: #e6eaef; --surface: #ffffff; --accent: #d1495b; }
@media (prefers-color-scheme: dark) { :root { --page: #14181e; --ink: #e4e8ee; --muted: #94a0b0; --grid: #2d3541;
  --idle: #2a323d; --surface: #14181e; --accent: #ef7d8c; } }
body { background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, "Segoe UI", "DejaVu Sans", sans-serif;
  max-width: 60rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2.6rem 0 .5rem; }
.basis { color: var(--muted); margin: 0 0 1.2rem; }
.verdict { font-size: 1.12rem; border-left: 4px solid var(--accent); padding: .1rem 0 .1rem 1rem; margin: 0 0 1.6rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .93rem; font-variant-numeric: tabular-nums; min-width: 60%; }
th { text-align: left; font-weight: 600; color: var(--muted); border-bottom: 1.5px solid var(--muted); }
th, td { padding: .3rem 1.4rem .3rem 0; vertical-align: top; }
td { border-bottom: 1px solid var(--grid); }
td:first-child { color: var(--muted); white-space: nowrap; }
figure { margin: 0; }
figure svg { display: block; width: 100%; height: auto; }
figcaption, .note { color: var(--muted); font-size: .93rem; margin: .3rem 0 0; }
footer { margin-top: 3rem; padding-top: 1rem; border-top: 1px solid var(--grid); color: var(--muted);
  font-size: .88rem; }
@media print { body { max-width: none; } figure { break-inside: avoid; } }
"""

_ALONE = "one rank has none to be compared with"

_FOOTER = """Busy is device time of work, waiting left out where the device can tell; idle is the rest of the step. The
bubble is the idle share of all rank time. Imbalance is max / mean; typical is that of the median step, whoever has most
in it. Estimates take the measured loads, level them and ask a model of the 1F1B pipeline (slowest stage plus fill and
drain) for the step time; whatever else a step holds is taken to stay. Gains overlap and must not be added."""


def write_page(path: str | os.PathLike[str], history: History, summary: Summary) -> None:
    """Write the page to `path`. Raises OSError if that cannot be done; the old file is then still there."""
    path = Path(path)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(page(history, summary), encoding="utf-8")
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def page(history: History, summary: Summary) -> str:
    """The whole HTML document."""
    name = history.directory.resolve().name
    body = [
        "<h1>Where the time went</h1>",
        f'<p class="basis">Run <b>{escape(name)}</b>: {escape(_size(summary))}{escape(basis(summary))}.</p>',
        f'<p class="verdict">{escape(verdict(summary))}</p>',
        _table(("who is slow", "which", "how much", "over the others", "typical"), finding_rows(summary)),
    ]
    if prospects := prospect_rows(summary):
        body += ["<h2>What perfect balance would give</h2>", _table(("levelled", "step", "saved"), prospects)]
    if actions := action_rows(summary):
        head = ("balancer", "actions", "max / mean", "planning", "applying", "moved")
        body += ["<h2>What the balancers did</h2>", _table(head, actions)]
    body += [
        _timeline(history, summary),
        _time(summary),
        _layers(summary),
        _experts(summary),
        _work(summary),
        _layout(history),
        _imbalance(history),
        _memory(summary),
        f"<footer>{escape(_FOOTER)}</footer>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Where the time went: {escape(name)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body>\n</html>\n"
    )


def _size(summary: Summary) -> str:
    if summary.ranks is None:
        return ""
    ranks, stages = summary.ranks.rank.size, summary.stage_count
    return f"{ranks} rank{'s' if ranks > 1 else ''}, {stages} pipeline stage{'s' if stages > 1 else ''}; "


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>'


def _figure(title: str, svg: str, caption: str) -> str:
    return f"<h2>{escape(title)}</h2>\n<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _left_out(title: str, why: str) -> str:
    return f'<h2>{escape(title)}</h2>\n<p class="note">Left out: {escape(why)}.</p>'


def _timeline(history: History, summary: Summary) -> str:
    title = "One iteration on the clock"
    if history.no_timeline:
        return _left_out(title, history.no_timeline)
    timed = [one for one in history.timelines if any(one.spans.values())]
    now = [one for one in timed if one.layers == timed[-1].layers]
    one = figures.choose(now, summary.step_seconds)
    look = "look for the row with the least idle time, the others wait for it"
    if len(one.spans) == 1:
        look = "grey is time without work on the device"
    drawn = _one_iteration(title, one, look, summary)
    before = [one for one in timed if one.layers != timed[-1].layers]
    if before:
        stages = ", ".join(
            _moved(stage, before[-1].layers.get(stage, ()), layers) for stage, layers in one.layers.items()
        )
        drawn += _one_iteration("The same before layers moved", before[-1], f"since then {stages}", summary)
    return drawn


def _moved(stage: int, before: tuple[int, ...], after: tuple[int, ...]) -> str:
    return f"stage {stage} went from {len(before)} to {len(after)} layers"


def _one_iteration(title: str, one: TraceIteration, look: str, summary: Summary) -> str:
    name = f"timeline-{one.iteration}"
    svg, shown, lower = figures.timeline(one, summary.rank.which if summary.rank else None, name)
    some = f" {shown} of {len(one.spans)} ranks are shown." if shown < len(one.spans) else ""
    waits = " A bar lower than its row waited inside the layer: its height is the share that was work." if lower else ""
    return _figure(
        title,
        svg,
        f"Iteration {one.iteration}, {duration(one.step_seconds)}: {look}. Numbers are micro-batches.{waits}{some}",
    )


def _time(summary: Summary) -> str:
    title = "Busy and idle time of ranks"
    if summary.ranks is None or summary.rank is None:
        return _left_out(title, "no step was timed")
    if summary.ranks.rank.size == 1:
        return _left_out(title, f"{_ALONE}; it was busy for {duration(summary.rank.value)} of a step")
    return _figure(
        title,
        figures.rank_time(summary.ranks),
        f"The typical step: bars above the dashed mean set the pace, and the slowest, "
        f"{rank_name(summary, summary.rank.which)}, is red; grey is idle time, {share(summary.bubble or 0.0)} of all.",
    )


def _layers(summary: Summary) -> str:
    title = "Cost of each layer"
    if summary.layers is None:
        return _left_out(title, "no layer was timed")
    cuts = " and for stages whose bars add up to more than others'" if summary.stage_count > 1 else ""
    return _figure(title, figures.layer_costs(summary.layers), f"Look for bars above the dashed median{cuts}.")


def _experts(summary: Summary) -> str:
    title = "Load of each expert"
    if not summary.share_experts or summary.expert is None:
        return _left_out(title, "no tokens were routed to experts, this is a dense model")
    caption = (
        f"Tokens of each expert over the mean of its layer: look for red, the hottest is expert "
        f"{summary.expert.which} of layer {summary.expert.layer}."
    )
    if max(ranks.size for ranks in summary.share_expert_ranks.values()) > 1:
        caption += (
            " On the right, how far the fullest expert-parallel rank, which the others wait for, is over the mean."
        )
    return _figure(title, figures.expert_heat(summary.share_experts, summary.share_expert_ranks), caption)


def _work(summary: Summary) -> str:
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
        f"l (l + 1) / 2 pairs. In a typical step the fullest rank, whichever it is, has "
        f"{ratio(summary.tokens.typical)} the mean tokens and {ratio(summary.area.typical)} the mean attention area.",
    )


def _layout(history: History) -> str:
    """One balanced batch; nothing where sequences are not balanced, for then there is no layout to look at."""
    if history.layout is None:
        return ""
    return _figure(
        "Where the tokens of a batch are",
        figures.sequence_layout(history.layout),
        f"The first micro-batch of iteration {history.layout['iteration']}: bars at the dashed line are equal "
        "attention; tokens of linear layers are equal whatever the rows are. Colours show which documents send keys "
        "and values, and how far.",
    )


def _imbalance(history: History) -> str:
    title = "Imbalance over the run"
    if not history.iterations:
        return _left_out(title, "no iteration was observed")
    if (svg := figures.imbalance_curves(history)) is None:
        return _left_out(title, "with one rank, one stage and no experts there is nothing to compare")
    return _figure(title, svg, "All curves at 1 is perfect balance: see which kind is worst, and whether it grows.")


def _memory(summary: Summary) -> str:
    title = "Memory of ranks"
    if summary.ranks is None or not summary.ranks.memory.size:
        return _left_out(title, "no memory was measured")
    if summary.ranks.rank.size == 1:
        return _left_out(title, f"{_ALONE}; it held {byte_count(float(summary.ranks.memory[0]))} at most")
    return _figure(
        title, figures.rank_memory(summary.ranks), "The most each rank held: the fullest, in red, runs out first."
    )
