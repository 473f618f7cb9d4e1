"""A summary in words, for the terminal and the HTML page: short answers, and rows of tables."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from balancing.report.summary import Summary, Worst
from balancing.report.units import byte_count, count, duration, ratio, share

__all__ = [
    "ACTIONS", "FINDINGS", "GAINS", "PROSPECTS", "Answer", "Finding", "GainRow", "Prospect", "action_rows", "answers",
    "basis", "finding_rows", "gain_rows", "not_seen", "prospect_rows", "rank_name", "shown_columns", "verdict",
]  # fmt: skip

# Heads of the tables.
FINDINGS = ("who is slow", "which", "how much", "over the others", "before", "typical")
PROSPECTS = ("what perfect balance would give", "step", "saved")
ACTIONS = ("balancer", "actions", "planning", "waited for transfers", "moved", "memory of a rank")
_MEMORY = {"slot_bytes": "slots {}", "peak_bytes": "at most {} until a move ended"}
GAINS = ("what balancing gained", "of what", "before", "after")

# An imbalance that costs less than this share of a step is not named in the answers.
_WORTH_NAMING = 0.03

# Below this max / mean all count as alike.
_ALIKE = 1.005

_MOVED = {"rollback": "when layers moved back"}

# The balancer for each estimate.
_FLAGS = {"stages": "layers", "sequences": "sequences", "experts": "experts"}

# What forecasts are made of, and so what may be wrong with them.
_MADE_OF = {
    "layers": "it is of the measured seconds of layers, and none of the cluster's entries are in it; messages between "
    "stages, gradients and the optimizer are left out",
    "sequences": "it is of the cluster's compute (flops, and rates of the kernel of attention); transfers and the host "
    "are left out",
    "experts": "it is of the measured seconds of experts; transfers of replicas, exchanges of tokens and the host are "
    "left out",
}

_RIGHT = 1.1  # rates are right if calls take at most so many times as long as they say, or as much less

_BALANCED = {
    "stages": "pipeline stages balanced (layers)",
    "sequences": "ranks inside each stage balanced (sequences)",
    "experts": "expert-parallel ranks balanced (experts)",
    "all": "everything balanced",
    "no idle": "the limit: no idle time at all",
}


class Finding(NamedTuple):
    """A row of the findings.

    what: the quantity, such as "slowest stage".
    who: the stage, rank, layer or expert that has most.
    value: how much it has.
    over: its value over the mean or median of the others.
    before, typical: max / mean of a typical step, without the balancer that is on, and as it was.
    """

    what: str
    who: str
    value: str
    over: str
    before: str = ""
    typical: str = ""


class GainRow(NamedTuple):
    """The balancer, the quantity that it balances, and max / mean of it before and after; or times before and after."""

    balancer: str
    what: str
    before: str
    after: str


class Answer(NamedTuple):
    """The question in a word, and the answer in sentences."""

    about: str
    text: str


class Prospect(NamedTuple):
    """The work that is balanced, the step time with it balanced, and the share of the step saved."""

    balanced: str
    step: str
    saved: str


def shown_columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of a table without columns that are empty in every row."""
    shown = [column for column in range(len(head)) if any(row[column] for row in rows)]
    return [head[column] for column in shown], [[row[column] for column in shown] for row in rows]


def rank_name(summary: Summary, rank: int) -> str:
    """rank 3 (stage 1, node 0); the stage only with several stages, the node only with several nodes."""
    ranks = summary.ranks
    if ranks is None or rank not in ranks.rank:
        return f"rank {rank}"
    at = ranks.rank.tolist().index(rank)
    place = [f"stage {ranks.stage[at]}"] if summary.stage_count > 1 else []
    place += [f"node {ranks.node[at]}"] if ranks.node.max() > 0 else []
    return f"rank {rank} ({', '.join(place)})" if place else f"rank {rank}"


def basis(summary: Summary) -> str:
    """The iterations that the figures are of, the iterations left out, steps without a loss, and damaged lines."""
    if not summary.counted:
        return f"no iteration was observed{_damage(summary)}"
    first, last, n = summary.counted[0], summary.counted[-1], len(summary.counted)
    span = f"{n} iterations ({first} to {last})" if n > 1 else f"1 iteration ({first})"
    left_out = [f"first {summary.skipped} left out as warm-up"] if summary.skipped else []
    until = "last move or capture" if summary.graphs else "last move"
    left_out += [f"{summary.other_layout} up to the {until} left out"] if summary.other_layout else []
    left_out += [f"{byte_count(summary.left_out)} of the log between them not read"] if summary.left_out else []
    training = summary.actions.get("training")
    empty = training.counts.get("no loss", 0) if training else 0
    left_out += [f"no token counted for the loss in {empty} step{'s' * (empty > 1)}"] if empty else []
    if summary.graph_seconds is not None:
        left_out.append(f"times of stages, ranks and layers are {not_seen(summary)}")
    return f"figures are of {'; '.join([span, *left_out])}{_damage(summary)}"


def not_seen(summary: Summary, otherwise: str = "") -> str:
    """What is known of times inside one CUDA graph of all passes; `otherwise` without such a graph."""
    if summary.graph_seconds is None:
        return otherwise
    if not (timed := summary.timed):
        return "not seen in graphs"
    span = f"iteration {timed[0]}" if len(timed) == 1 else f"{len(timed)} iterations ({timed[0]} to {timed[-1]})"
    return f"not seen in graphs, but of {span} outside of them"


def _damage(summary: Summary) -> str:
    return f"; {summary.damage}" if summary.damage else ""


def finding_rows(summary: Summary) -> list[Finding]:
    """Rows for slowest stage, layer and rank, fullest ranks, hottest experts and most memory, as far as measured."""
    rows = []
    if summary.graph_seconds is not None and summary.stage is None:
        rows += [Finding(f"slowest {name}", not_seen(summary), "", "") for name in ("stage", "layer", "rank")]
    stages = summary.stage_count > 1
    many = summary.graph_seconds is not None if summary.ranks is None else summary.ranks.rank.size > 1
    if stages and (stage := summary.stage):
        rows.append(_worst("slowest stage", f"stage {stage.which}", stage, f"{duration(stage.value)} busy", "stage"))
    if layer := summary.slow_layer:
        at = f" (stage {layer.stage})" if stages else ""
        over = f"{ratio(layer.over)} median {layer.kind}"
        rows.append(Finding("slowest layer", f"layer {layer.layer}{at}", _per_call(layer.seconds), over))
    if (layers := summary.layers) and layers.hybrid:
        whole = float(np.median(layers.total[layers.numbered])) or 1.0
        for kind in layers.kinds_of_layers:
            members = layers.of_kind(kind)
            typical = float(np.median(layers.total[members]))
            what = f"{len(members)} layer{'s' * (len(members) > 1)}"
            rows.append(Finding(f"{kind} layers", what, _per_call(typical), f"{ratio(typical / whole)} median layer"))
    for name in ("embedding", "head"):
        if (layers := summary.layers) and (worth := layers.in_layers(name)) is not None:
            i = layers.names.index(name)
            at = f" (stage {layers.stage[i]})" if stages else ""
            cost, over = _per_call(layers.total[i]), f"{ratio(worth)} median layer"
            rows.append(Finding(f"{name} cost", f"{name}{at}", cost, over))
    if many:
        per_rank = (
            ("slowest rank", summary.rank, lambda value: f"{duration(value)} busy"),
            ("most tokens", summary.tokens, lambda value: f"{count(value)} tokens"),
            ("most attention", summary.area, lambda value: f"{count(value)} pairs"),
        )
        for what, worst, text in per_rank:
            if worst:
                rows.append(_worst(what, rank_name(summary, worst.which), worst, text(worst.value), "rank"))
    if longest := summary.longest:
        who = rank_name(summary, longest.which)
        rows.append(Finding("longest sequence", who, f"{count(longest.value)} tokens", ""))
    if expert := summary.expert:
        who = f"layer {expert.layer}, expert {expert.which}"
        rows.append(_worst("hottest expert", who, expert, f"{count(expert.value)} tokens", "expert"))
    if (hot := summary.expert_rank) and hot.layer is not None and summary.share_expert_ranks[hot.layer].size > 1:
        who = f"layer {hot.layer}, EP rank {hot.which}"
        rows.append(_worst("hottest EP rank", who, hot, f"{count(hot.value)} tokens", "EP rank"))
    if memory := summary.memory:
        who, value = rank_name(summary, memory.which), byte_count(memory.value)
        row = _worst("most memory", who, memory, value, "rank") if many else Finding("most memory", who, value, "")
        rows.append(row._replace(typical=""))
    return rows


def gain_rows(summary: Summary) -> list[GainRow]:
    """Rows for the imbalance without and with each balancer that was on, and for the step before and after layers
    moved."""
    rows = [
        GainRow(gain.balancer, f"max / mean {gain.what}", ratio(gain.before), ratio(gain.after))
        for gain in summary.gains
    ]
    if summary.dealt is not None:
        rows.append(GainRow("sequences", "modelled step, of one with equal micro-batches", *map(ratio, summary.dealt)))
    if (move := summary.move) and move.same_size:
        moved = f"step {_MOVED.get(move.action, 'when layers moved')} (iteration {move.iteration})"
        rows.append(GainRow("", moved, duration(move.step_before), duration(move.step_after)))
    return rows


def _worst(what: str, who: str, worst: Worst, value: str, of: str) -> Finding:
    alike = worst.over < _ALIKE and worst.typical < _ALIKE
    before = "" if worst.before is None else ratio(worst.before)
    return Finding(
        what, "all alike" if alike else who, value, f"{ratio(worst.over)} mean {of}", before, ratio(worst.typical)
    )


def _per_call(seconds: float) -> str:
    return f"{duration(seconds)}/micro-batch"


def prospect_rows(summary: Summary) -> list[Prospect]:
    """Rows for the step time with each kind of work balanced. "at best" marks an upper bound of the gain."""
    return [
        Prospect(
            _BALANCED[estimate.balanced],
            f"{'at best ' if estimate.at_best else 'about '}{duration(estimate.step_seconds)}",
            f"{share(estimate.saved)} less" if estimate.saved >= 5e-4 else "nothing",
        )
        for estimate in summary.estimates
    ]


def _spent(seconds: float, actions: int) -> str:
    """Time of all actions, and of each action if there are several."""
    each = f" ({duration(seconds / actions)} each)" if actions > 1 and seconds else ""
    return duration(seconds) + each


def action_rows(summary: Summary) -> list[tuple[str, ...]]:
    """Rows of: balancer; actions and how often; time of planning; time that the slowest rank waited for transfers and
    for their senders; bytes sent; memory of a rank. Times are of all actions and of each."""
    return [
        (
            name,
            ", ".join(f"{action} {n}" for action, n in sorted(done.counts.items())),
            _spent(done.plan_ms / 1e3, sum(done.counts.values())),
            _spent(done.apply_ms / 1e3, sum(done.counts.values())),
            byte_count(done.moved_bytes),
            ", ".join(_MEMORY[of].format(byte_count(size)) for of, size in done.memory.items()),
        )
        for name, done in sorted(summary.actions.items())
    ]


def answers(summary: Summary) -> list[Answer]:
    """How long a step is, who is slow, what balancing gained, what it would still gain, and which flag to switch on."""
    if summary.step_seconds is None or summary.ranks is None:
        text = "No step was timed, so there is no verdict; what was measured stands below."
        if summary.graph_seconds is not None:
            text = f"A step takes {duration(summary.graph_seconds)}. Times of stages, ranks and layers are not seen in "
            text += "graphs, and no iteration ran outside of them, so there is no verdict; other figures stand below."
        return [Answer("step", text)]
    text = f"A step takes {duration(summary.step_seconds)}"
    if summary.graph_seconds is not None:
        text = f"A step takes {duration(summary.graph_seconds)} in a CUDA graph. Times of stages, ranks and layers are "
        text += f"{not_seen(summary)}, as is what follows: a step takes {duration(summary.step_seconds)} there"
    saved = {estimate.balanced: estimate for estimate in summary.estimates}
    if (everything := saved.get("all")) is None:
        return [Answer("step", f"{text}. With one rank there is nothing to balance.")]
    found = [Answer("step", f"{text}, and the average rank is idle for {share(summary.bubble or 0.0)} of it.")]
    if summary.by_the_clock:
        gained = ", ".join(f"{name} {gain}" for name, gain in summary.by_the_clock.items() if name != "together")
        if (together := summary.by_the_clock.get("together")) is not None:
            gained += f"; together {together}"
        if forecast := ", ".join(f"{name} {ratio(gain)}" for name, gain in summary.forecast.items()):
            gained += f". Forecast: {forecast}"
        off = f" Trials have switched off {' and '.join(sorted(summary.switched_off))}." * bool(summary.switched_off)
        found.insert(0, Answer("by the clock", f"Balancing gained: {gained}.{_wrong_forecasts(summary)}{off}"))
    if wrong := _wrong_rates(summary):
        found.append(Answer("rates", wrong))
    slow = [
        culprit(summary)
        for balanced, culprit in (
            ("stages", _stage_culprit),
            ("sequences", _rank_culprit),
            ("experts", _expert_culprit),
        )
        if balanced in saved and saved[balanced].saved >= _WORTH_NAMING
    ]
    found.append(Answer("slow", " ".join(f"{each}." for each in slow if each) or "Nobody by much."))
    if evened := [
        f"{gain.balancer} from {ratio(gain.before)} to {ratio(gain.after)}"
        for gain in summary.gains
        if gain.before - gain.after >= _ALIKE - 1
    ]:
        found.append(Answer("gained", f"Balancing took the fullest over the mean down: {', '.join(evened)}."))
    if everything.saved < _WORTH_NAMING:
        would = f"The ranks are balanced: perfect balance would save {share(everything.saved)} of a step."
    else:
        most = "at best bring" if everything.at_best else "bring"
        would = f"Perfect balance would {most} the step to about {duration(everything.step_seconds)}, "
        would += f"{share(everything.saved)} less."
    return [*found, Answer("to gain", would), Answer("flag", _flags(summary))]


def _wrong_forecasts(summary: Summary) -> str:
    """A sentence for each forecast that is outside of the interval by the clock: what it was made of."""
    return "".join(
        f" The forecast of {name} was too {'high' if forecast > gain.high else 'low'}: {_MADE_OF[name]}."
        for name, forecast in summary.forecast.items()
        if (gain := summary.by_the_clock[name]) and not gain.low <= forecast <= gain.high
    )


def _wrong_rates(summary: Summary) -> str:
    """The rates of the cluster that planners had and calls do not reach, or exceed; "" if there are none."""
    wrong = ", ".join(
        f"{'experts' if kind == 'experts' else f'attention by {kind}'} {way} {ratio(times)}"
        for (kind, way), times in sorted(summary.times.items())
        if not 1 / _RIGHT <= times <= _RIGHT
    )
    if not wrong:
        return ""
    return f"Calls took another time than planners' rates say: {wrong}. --cluster DIR plans with those of this report."


def _flags(summary: Summary) -> str:
    """The flags of balancers that are off and would save time, the largest saving first."""
    on = {gain.balancer for gain in summary.gains} | set(summary.actions) | summary.switched_off
    worth = sorted(
        (each for each in summary.estimates if each.balanced in _FLAGS and each.saved >= _WORTH_NAMING),
        key=lambda each: -each.saved,
    )
    off = [each for each in worth if _FLAGS[each.balanced] not in on]
    if off:
        named = ", ".join(
            f"--balance-{_FLAGS[each.balanced]} ({'at best' if each.at_best else 'about'} {share(each.saved)} less)"
            for each in off
        )
        return f"Switch on {named}."
    if worth:
        parts: dict[str, list[str]] = {}
        for name in [_FLAGS[each.balanced] for each in worth]:
            are = "have been on, and did not pay" if name in summary.switched_off else "are on"
            parts.setdefault(are, []).append(name)
        left = ", and ".join(f"{' and '.join(names)}, which {are}" for are, names in parts.items())
        return f"None: what is left is beside {left}."
    return "None is needed."


def verdict(summary: Summary) -> str:
    """The answers in one paragraph."""
    return " ".join(each.text for each in answers(summary))


def _stage_culprit(summary: Summary) -> str:
    stage, layer, layers = summary.stage, summary.slow_layer, summary.layers
    if stage is None:
        return ""
    text = f"Stage {stage.which} sets the pace: it is busy {share(stage.over - 1)} longer than the mean stage"
    why = []
    if layer and layer.stage == stage.which and layer.over >= 1.1:
        why.append(f"layer {layer.layer} costs {ratio(layer.over)} the median {layer.kind} layer")
    for name in ("embedding", "head"):
        worth = layers.in_layers(name) if layers else None
        if layers and worth and worth >= 0.5 and layers.stage[layers.names.index(name)] == stage.which:
            why.append(f"its {name} costs as much as {worth:.1f} layers")
    return f"{text}; {' and '.join(why)}" if why else text


def _rank_culprit(summary: Summary) -> str:
    ranks = summary.ranks
    assert ranks is not None
    in_stage = np.bincount(ranks.stage, ranks.busy) / np.bincount(ranks.stage)
    worst = int((ranks.busy - in_stage[ranks.stage]).argmax())
    over = ranks.busy[worst] / max(in_stage[ranks.stage[worst]], 1e-12)
    text = f"{rank_name(summary, int(ranks.rank[worst]))} is busy {share(over - 1)} longer than the mean rank"
    text = text[0].upper() + text[1:] + (" of its stage" if summary.stage_count > 1 else "")
    named = (("attention area", summary.area), ("tokens", summary.tokens))
    uneven = [f"{ratio(of.typical)} the mean {name}" for name, of in named if of and of.typical >= 1.1]
    return f"{text}; in a typical step the fullest rank has {' and '.join(uneven)}" if uneven else text


def _expert_culprit(summary: Summary) -> str:
    expert, hot = summary.expert, summary.expert_rank
    if expert is None or hot is None:
        return ""
    return (
        f"Expert {expert.which} of layer {expert.layer} gets {ratio(expert.over)} the mean tokens, and "
        f"layer {hot.layer} waits for expert-parallel (EP) rank {hot.which}, which has {ratio(hot.over)} the mean"
    )
