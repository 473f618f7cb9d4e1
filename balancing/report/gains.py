"""Gains of balancing: the imbalance without a balancer and with it.

Both are measured in the same iteration, as max / mean:

    layers     seconds of pipeline stages: the iteration's layers added up by the stages of the run's first layout, and
               by the stages of the current layout
    sequences  attention area of context-parallel ranks: a micro-batch as Megatron-LM would cut it, and as it was
               spread; mean over micro-batches, since ranks wait for one another in each
    experts    tokens of expert-parallel ranks: every expert on its home rank, and with replicas; mean over MoE layers,
               since ranks wait for one another in each

Step times before and after layers moved are measured in different iterations.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from balancing.report.events import imbalance
from balancing.report.history import STEPS, History

__all__ = [
    "Gain", "Move", "dealt_steps", "gains", "last_move", "ordered_attention", "over_the_run", "predicted_of_moves",
    "predicted_of_replicas", "tokens_served",
]  # fmt: skip

_WHAT = {
    "layers": "time of pipeline stages",
    "sequences": "attention of ranks, in a micro-batch",
    "experts": "tokens of EP ranks, mean of layers",
}
_WATCHED = 5  # iterations before a move that are compared with those after it

BeforeAfter = tuple[float, float]


@dataclass(frozen=True)
class Gain:
    """max / mean of `what` in the median iteration: without the balancer (before) and with it (after)."""

    balancer: str
    what: str
    before: float
    after: float


@dataclass(frozen=True)
class Move:
    """The last time that layers moved, before `iteration`. Seconds are medians.

    layout_before, layout_after: in the form of --pipeline-model-parallel-layout.
    stage_before, stage_after: [stage], busy seconds of a step.
    rank_before: [rank], busy seconds of a step, in the order of ranks.
    step_before, step_after: seconds of a step.
    """

    iteration: int
    action: str
    reason: str
    layout_before: str
    layout_after: str
    stage_before: np.ndarray
    stage_after: np.ndarray
    rank_before: np.ndarray
    step_before: float
    step_after: float

    @property
    def same_size(self) -> bool:
        """Whether the job had as many stages before as after, so that its steps can be compared."""
        return len(self.stage_before) == len(self.stage_after)


def over_the_run(history: History) -> dict[str, dict[int, BeforeAfter]]:
    """Balancer -> iteration -> max / mean (without it, with it), for balancers that were on."""
    found = {
        "layers": _of_stages(history),
        "sequences": _mean_of_lines(_actions(history, "sequences", "micro-batch")),
        "experts": _mean_of_lines(_actions(history, "experts", "layer")),
    }
    return {balancer: series for balancer, series in found.items() if series}


def gains(history: History, counted: Iterable[int]) -> list[Gain]:
    """The gain of each balancer that was on, over the iterations `counted`."""
    found = []
    for balancer, series in over_the_run(history).items():
        values = [series[iteration] for iteration in counted if iteration in series]
        if values:
            before, after = np.median(values, axis=0).tolist()
            found.append(Gain(balancer, _WHAT[balancer], before, after))
    return found


def _actions(history: History, balancer: str, unit: str) -> list[dict[str, Any]]:
    return [line for line in history.actions if (line["balancer"], line["unit"]) == (balancer, unit)]


def _spread(history: History, counted: Iterable[int]) -> list[dict[str, Any]]:
    """Lines of action "spread" of the iterations `counted`."""
    inside = set(counted)
    return [line for line in _actions(history, "sequences", "micro-batch") if line["iteration"] in inside]


def _mean_of_lines(lines: list[dict[str, Any]]) -> dict[int, BeforeAfter]:
    values: dict[int, list[BeforeAfter]] = {}
    for line in lines:
        values.setdefault(line["iteration"], []).append((line["imbalance_before"], line["imbalance_after"]))
    return {iteration: tuple(np.mean(pairs, axis=0).tolist()) for iteration, pairs in sorted(values.items())}


def _of_stages(history: History) -> dict[int, BeforeAfter]:
    if not history.layers or not _actions(history, "layers", "stage"):
        return {}
    first = history.layers[min(history.layers)]
    at_first = dict(zip(first["layers"], first["stage"].tolist(), strict=True))
    values = {}
    for iteration, line in sorted(history.layers.items()):
        if not at_first.keys() >= set(line["layers"]):
            continue  # the model is another one
        seconds = line["forward_s"] + line["backward_s"] + line["recompute_s"]
        layouts = np.array([at_first[layer] for layer in line["layers"]]), line["stage"]
        before, after = (imbalance(np.bincount(stage, seconds)) for stage in layouts)
        values[iteration] = before, after
    return values


def tokens_served(history: History) -> dict[int, dict[int, np.ndarray]]:
    """Iteration -> MoE layer -> tokens [expert-parallel rank] with replicas, as far as the run recorded them."""
    served: dict[int, dict[int, np.ndarray]] = {}
    for line in _actions(history, "experts", "layer"):
        if "tokens_per_rank" in line:
            served.setdefault(line["iteration"], {})[line["layer"]] = line["tokens_per_rank"]
    return served


def ordered_attention(history: History, counted: Iterable[int]) -> tuple[np.ndarray, np.ndarray] | None:
    """Two arrays [context-parallel rank]: attention area of a micro-batch over its mean, from the fullest rank to the
    emptiest, as Megatron-LM would cut the micro-batch and as it was spread.

    Medians over iterations. None if the run did not record them.
    """
    lines = _spread(history, counted)
    lines = [line for line in lines if "ordered_before" in line and "ordered_after" in line]
    lines = [line for line in lines if line["ordered_after"].shape == lines[-1]["ordered_after"].shape]
    if not lines:
        return None
    before, after = (np.median([line[f"ordered_{when}"] for line in lines], axis=0) for when in ("before", "after"))
    return before, after


def dealt_steps(history: History, counted: Iterable[int]) -> BeforeAfter | None:
    """Modelled seconds of a step over those of a step of equal micro-batches: (as drawn, as run).

    Medians over iterations. None without --sequence-micro-batches.
    """
    lines = [line for line in _spread(history, counted) if all(name in line for name in STEPS)]
    pairs = [tuple(float(line[name]) for name in STEPS) for line in lines]
    if not pairs:
        return None
    before, after = np.median(pairs, axis=0).tolist()
    return before, after


def _moves(history: History) -> list[dict[str, Any]]:
    """The decisions by which layers moved."""
    return [
        line for line in _actions(history, "layers", "stage") if line.get("layout_before") != line.get("layout_after")
    ]


def predicted_of_moves(history: History) -> float | None:
    """Predicted seconds of a step before all moves of layers over those after them; None without a prediction. A job
    that was started again begins with the first layout: its moves count, and those of an earlier start do not."""
    names, moves = ("predicted_step_before", "predicted_step_after"), _moves(history)
    starts = [at for at, (one, following) in enumerate(pairwise(moves), start=1)
              if one.get("layout_after") != following.get("layout_before")]  # fmt: skip
    pairs = [[line.get(name) for name in names] for line in moves[max(starts, default=0) :]]
    known = [(before, after) for before, after in pairs if isinstance(before, float) and isinstance(after, float)]
    return math.prod(before / after for before, after in known if after > 0) if known else None


def predicted_of_replicas(history: History, counted: Iterable[int]) -> float | None:
    """Seconds of a step in which the slowest rank of each MoE layer has its tokens without replicas, over those of a
    step as it was: by the measured seconds of a row in the experts, forward, and twice as much backward. Stages wait
    for the one that has more to compute.

    The median over the iterations `counted` that trials did not run without replicas. None if the run did not record
    what this takes.
    """
    if not history.row_seconds:
        return None
    second, lines = float(np.median(history.row_seconds)), dict[int, dict[Any, dict[str, Any]]]()
    for line in _actions(history, "experts", "layer"):  # of an iteration that ran twice, the last line counts
        lines.setdefault(line["iteration"], {})[line.get("layer")] = line
    found = []
    for iteration in {*counted} & lines.keys() & history.stages.keys():
        layers, saved = history.layers.get(iteration), defaultdict[int, float](float)
        stage = {} if layers is None else dict(zip(layers["layers"], layers["stage"].tolist(), strict=True))
        for line in lines[iteration].values():
            if "tokens_per_rank" in line:
                rows = line["tokens_per_rank"].mean() * (line["imbalance_before"] - line["imbalance_after"])
                saved[stage.get(line["layer"], 0)] += 3 * second * float(rows)
        step = history.stages[iteration]["step_s"]
        found.append((step + max(saved.values(), default=0.0)) / step)
    return float(np.median(found)) if found else None


def last_move(history: History, counted: Iterable[int]) -> Move | None:
    """The last move of layers; None if layers never moved. counted: the iterations after the move."""
    if not (moves := _moves(history)):
        return None
    line, since = moves[-1], moves[-2]["iteration"] if len(moves) > 1 else 0
    before = [history.stages[i] for i in sorted(history.stages) if since <= i < line["iteration"]][-_WATCHED:]
    after = [history.stages[i] for i in counted if i in history.stages and i >= line["iteration"]]
    before = [each for each in before if each["stage"].shape == before[-1]["stage"].shape]
    if not before or not after:
        return None
    return Move(
        line["iteration"], str(line["action"]), str(line["reason"]),
        str(line["layout_before"]), str(line["layout_after"]),
        np.median([each["busy_s"] for each in before], axis=0), np.median([each["busy_s"] for each in after], axis=0),
        np.median([each["rank_busy_s"] for each in before], axis=0),
        float(np.median([each["step_s"] for each in before])), float(np.median([each["step_s"] for each in after])),
    )  # fmt: skip
