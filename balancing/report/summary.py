"""Summary of a run: the slow ranks, the cause, and its size.

Every figure leaves out the first iterations, which pay for compilation, caches and memory pools. It also leaves out
iterations under another layout than the last one (layers moved, ranks left), since a median over two layouts describes
neither. Where one CUDA graph ran the passes of later iterations, time inside it is not seen: times of stages, ranks and
layers are then of the iterations outside of graphs, loads of those in graphs. "Typical" is the median over the counted
iterations. If a balancer was on, figures are those with the balancer, and the imbalance without it is given beside them
(`balancing.report.gains`).
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from balancing.report.estimate import Estimate, ExpertLoad, StepLoad, estimate
from balancing.report.events import IN_GRAPH, imbalance
from balancing.report.gains import (
    Gain,
    Move,
    dealt_steps,
    gains,
    last_move,
    ordered_attention,
    predicted_of_moves,
    predicted_of_replicas,
    tokens_served,
)
from balancing.report.history import MEMORY, Damage, History
from balancing.trials import ClockGain

__all__ = ["BalancerActions", "LayerCosts", "RankLoad", "SlowLayer", "Summary", "Worst", "summarize", "warm_up"]


def warm_up(iterations: int) -> int:
    """Number of the first `iterations` that are left out: a tenth, at least 2, but never all of them."""
    return min(max(2, math.ceil(iterations / 10)), max(iterations - 1, 0))


@dataclass(frozen=True)
class Worst:
    """The stage, rank or expert-parallel rank that has most of something.

    which: its number.
    value: its value.
    mean: mean value of all.
    typical: median over iterations of max / mean; the largest may be another one in each iteration.
    layer: the layer, if the values are those of one layer.
    before: `typical` without the balancer that is on; None if no balancer is on.
    """

    which: int
    value: float
    mean: float
    typical: float
    layer: int | None = None
    before: float | None = None

    @property
    def over(self) -> float:
        """Value over mean, 1.0 if there is no load."""
        return self.value / self.mean if self.mean > 0 else 1.0


@dataclass(frozen=True)
class SlowLayer:
    """The layer with the most seconds per micro-batch over the median of its kind ("MoE" or "dense")."""

    layer: int
    stage: int
    kind: str
    seconds: float
    median: float

    @property
    def over(self) -> float:
        """Seconds over the median of its kind."""
        return self.seconds / self.median if self.median > 0 else 1.0


@dataclass(frozen=True)
class LayerCosts:
    """Typical seconds per micro-batch of every layer, and the stage and chunk it is on. Arrays are [layer].

    names: in the order of the model; numbers, or names such as "embedding".
    kinds: the kind of each layer: "MoE" or "dense", in a hybrid model its own names of kinds.
    hybrid: whether the model is hybrid.
    """

    names: list[int | str]
    forward: np.ndarray
    backward: np.ndarray
    recompute: np.ndarray
    stage: np.ndarray
    chunk: np.ndarray
    kinds: list[str]
    hybrid: bool

    @property
    def total(self) -> np.ndarray:
        """Forward, backward and recompute together."""
        return self.forward + self.backward + self.recompute

    @property
    def numbered(self) -> np.ndarray:
        """bool [layer], whether the entry is a layer of the model's body, not its embedding or head."""
        return np.array([isinstance(name, int) for name in self.names])

    @property
    def kinds_of_layers(self) -> list[str]:
        """The kinds of layers in the model's body."""
        return sorted({kind for kind, numbered in zip(self.kinds, self.numbered, strict=True) if numbered})

    def of_kind(self, kind: str) -> list[int]:
        """Indices of the entries that are layers of this kind."""
        return [i for i, name in enumerate(self.names) if isinstance(name, int) and self.kinds[i] == kind]

    def in_layers(self, name: str) -> float | None:
        """Cost of "embedding" or "head" over that of the median layer; None if it was not measured."""
        median = np.median(self.total[self.numbered]) if self.numbered.any() else 0.0
        return float(self.total[self.names.index(name)] / median) if name in self.names and median > 0 else None


@dataclass(frozen=True)
class RankLoad:
    """Figures of each rank, over the counted iterations; arrays are [rank] in the order of `rank`.

    busy, idle: seconds of a step, medians.
    tokens, area: tokens and query-key pairs of a step, medians.
    memory: peak bytes.
    longest: tokens of the longest document.

    The array of a quantity that was not measured is empty.
    """

    rank: np.ndarray
    stage: np.ndarray
    node: np.ndarray
    busy: np.ndarray
    idle: np.ndarray
    memory: np.ndarray
    tokens: np.ndarray
    area: np.ndarray
    longest: np.ndarray


@dataclass
class BalancerActions:
    """A balancer's actions and their cost over the whole run.

    counts: action -> how often.
    plan_ms, apply_ms: milliseconds of planning, and of waiting for transfers.
    moved_bytes: bytes sent.
    memory: key in events -> largest bytes.
    """

    counts: dict[str, int] = field(default_factory=dict)
    plan_ms: float = 0.0
    apply_ms: float = 0.0
    moved_bytes: int = 0
    memory: dict[str, int] = field(default_factory=dict)


@dataclass
class Summary:
    """The findings of `summarize`. A finding is None if nothing of its kind was measured.

    counted         iterations that the figures are of
    timed           those that times of stages, ranks and layers are of; the same without graphs of whole iterations
    graphs          which CUDA graphs ran the counted iterations, as `RankRecord.graphs`
    graph_seconds   of a step whose passes one CUDA graph ran; `step_seconds` is of the timed iterations
    left_out        bytes of the log, in its middle, of iterations that were not read
    skipped, other_layout    number of iterations left out as warm-up, and before or right after layers moved
    share_experts   layer -> [expert], tokens over the mean, over the counted iterations
    share_expert_ranks    layer -> [expert-parallel rank], tokens over the mean, as they were
    share_expert_homes    layer -> [expert-parallel rank], tokens over the mean with every expert on its home rank; only
                    layers with balanced experts
    gains           one for each balancer that was on
    move            the last time that layers moved; None if they never did
    dealt           modelled seconds of a step over those of a step of equal micro-batches: (as drawn, as run); None if
                    documents were not distributed over micro-batches
    by_the_clock    balancer, or "together" -> what it gained in trials
    switched_off    balancers that trials have switched off
    forecast        balancer -> the same by a model: of layers, for all moves together; of documents that were
                    distributed over micro-batches; of replicas, by the measured seconds of experts
    times           (what was measured, "forward" or "backward") -> how many times as long its calls took as by
                    the rates that planners had, the median
    attention_before, attention_after    [context-parallel rank], attention area of a micro-batch over its mean, from
                    the fullest rank to the emptiest, without and with balancing; None if sequences were not balanced
    """

    counted: list[int]
    skipped: int
    other_layout: int
    damage: Damage
    timed: list[int] = field(default_factory=list)
    left_out: int = 0
    graphs: str = ""
    graph_seconds: float | None = None
    step_seconds: float | None = None
    bubble: float | None = None
    stage_count: int = 0
    stage: Worst | None = None
    rank: Worst | None = None
    memory: Worst | None = None
    slow_layer: SlowLayer | None = None
    tokens: Worst | None = None
    area: Worst | None = None
    longest: Worst | None = None
    expert: Worst | None = None
    expert_rank: Worst | None = None
    estimates: list[Estimate] = field(default_factory=list)
    layers: LayerCosts | None = None
    ranks: RankLoad | None = None
    share_experts: dict[int, np.ndarray] = field(default_factory=dict)
    share_expert_ranks: dict[int, np.ndarray] = field(default_factory=dict)
    share_expert_homes: dict[int, np.ndarray] = field(default_factory=dict)
    gains: list[Gain] = field(default_factory=list)
    move: Move | None = None
    dealt: tuple[float, float] | None = None
    attention_before: np.ndarray | None = None
    attention_after: np.ndarray | None = None
    actions: dict[str, BalancerActions] = field(default_factory=dict)
    by_the_clock: dict[str, ClockGain] = field(default_factory=dict)
    switched_off: set[str] = field(default_factory=set)
    forecast: dict[str, float] = field(default_factory=dict)
    times: dict[tuple[str, str], float] = field(default_factory=dict)


def summarize(history: History) -> Summary:
    """Compute the findings of a run from its history."""
    everything = [i for i in history.iterations if i not in history.in_graphs]
    skipped = warm_up(len(everything))
    counted = timed = _same_layout(history, everything[skipped:])
    if 1 < len(timed) < len(everything) - skipped:
        counted = timed = timed[1:]  # layers that have just moved have no replicas yet, and their buffers are new
    other_layout = len(everything) - skipped - len(timed)
    if in_graphs := sorted(history.in_graphs):
        skipped, other_layout = warm_up(len(in_graphs)), 0
        counted = in_graphs[skipped:]
    summary = Summary(counted, skipped, other_layout, history.damage, timed)
    stages = [history.stages[i] for i in timed if i in history.stages]
    layers = [history.layers[i] for i in timed if i in history.layers]
    sequences = [history.sequences[i] for i in counted if i in history.sequences]
    served = tokens_served(history)
    experts, timed_experts = (
        [_with_replicas(history.experts[i], served.get(i, {})) for i in of if i in history.experts]
        for of in (counted, timed)
    )
    if stages:
        summary.graphs = str(stages[-1].get("graphs", ""))
    if in_graphs:
        summary.graphs = IN_GRAPH
        summary.graph_seconds = float(np.median([history.in_graphs[i]["step_s"] for i in counted]))
    if layers:
        _layers(summary, layers, experts)
    if sequences:
        _sequences(summary, sequences)
    if experts:
        _experts(summary, experts)
    if stages:
        _stages(summary, stages, sequences, [history.in_graphs[i] for i in counted if i in history.in_graphs])
        summary.estimates = estimate(_step_load(summary, stages, timed_experts))
    summary.gains, summary.move = gains(history, counted), last_move(history, counted)
    summary.dealt = dealt_steps(history, counted)
    if (attention := ordered_attention(history, counted)) is not None:
        summary.attention_before, summary.attention_after = attention
    _compare(summary)
    summary.left_out = history.left_out
    summary.by_the_clock, summary.switched_off = history.by_the_clock, history.switched_off
    if "sequences" in history.by_the_clock and summary.dealt is not None:
        summary.forecast["sequences"] = summary.dealt[0] / summary.dealt[1]
    if "layers" in history.by_the_clock and (moves := predicted_of_moves(history)) is not None:
        summary.forecast["layers"] = moves
    if "experts" in history.by_the_clock and (replicas := predicted_of_replicas(history, counted)) is not None:
        summary.forecast["experts"] = replicas
    summary.times = {kind: float(np.median(times)) for kind, times in history.times.items()}
    for line in history.actions:
        _act(summary.actions.setdefault(str(line["balancer"]), BalancerActions()), line)
    return summary


def _with_replicas(layers: dict[int, dict[str, Any]], served: dict[int, np.ndarray]) -> dict[int, dict[str, Any]]:
    """The lines of an iteration with tokens_per_rank as ranks `served` them with replicas.

    The tokens without replicas become "at_home". `served` covers only the first of several expert-parallel groups, so
    it is scaled to the tokens of all.
    """
    found = {}
    for layer, line in layers.items():
        home, tokens = line["tokens_per_rank"], served.get(layer, np.zeros(0))
        if tokens.size == home.size and tokens.any():
            line = line | {"tokens_per_rank": tokens * (home.sum() / tokens.sum()), "at_home": home}
        found[layer] = line
    return found


def _compare(summary: Summary) -> None:
    """Set `before` and `typical` of the findings that a balancer changes."""
    for gain in summary.gains:
        name = {"layers": "stage", "sequences": "area"}.get(gain.balancer)
        if name and (finding := getattr(summary, name)) is not None:
            setattr(summary, name, replace(finding, before=gain.before, typical=gain.after))


def _same_layout(history: History, iterations: list[int]) -> list[int]:
    """The consecutive iterations at the end of `iterations` that have the layout of the last one."""

    def layout(iteration: int) -> Any:
        stage, layer = history.stages.get(iteration), history.layers.get(iteration)
        ranks = None
        if stage:  # the same layers take another time in graphs
            ranks = (stage["rank"].tolist(), stage["stage"].tolist(), len(stage["busy_s"]), stage.get("graphs"))
        return ranks, (layer["layers"], layer["stage"].tolist(), layer["chunk"].tolist()) if layer else None

    start = len(iterations)
    while start and layout(iterations[start - 1]) == layout(iterations[-1]):
        start -= 1
    return iterations[start:]


def _median(lines: list[dict[str, Any]], key: str) -> np.ndarray:
    return np.median([line[key] for line in lines], axis=0)


def _worst(number: np.ndarray, load: np.ndarray, typical: float, layer: int | None = None) -> Worst:
    most = int(load.argmax())
    return Worst(int(number[most]), float(load[most]), float(load.mean()), typical, layer)


def _typical(loads: list[np.ndarray]) -> float:
    return float(np.median([imbalance(load) for load in loads]))


def _stages(
    summary: Summary, stages: list[dict[str, Any]], sequences: list[dict[str, Any]], in_graphs: list[dict[str, Any]]
) -> None:
    last = stages[-1]
    summary.step_seconds = float(np.median([line["step_s"] for line in stages]))
    summary.bubble = float(np.median([line["bubble_fraction"] for line in stages]))
    busy = _median(stages, "busy_s")
    summary.stage_count = busy.size
    summary.stage = _worst(np.arange(busy.size), busy, _typical([line["busy_s"] for line in stages]))
    rank_busy = _median(stages, "rank_busy_s")
    summary.rank = _worst(last["rank"], rank_busy, _typical([line["rank_busy_s"] for line in stages]))
    whole = [line for line in in_graphs if np.array_equal(line["rank"], last["rank"])]
    memory = np.max([line["memory_bytes"] for line in (*stages, *whole)], axis=0)
    if memory.any():
        summary.memory = _worst(last["rank"], memory, imbalance(memory))
    same = [line for line in sequences if np.array_equal(line["rank"], last["rank"])]
    none = np.zeros(0)
    summary.ranks = RankLoad(
        last["rank"],
        last["stage"],
        last["node"],
        rank_busy,
        np.maximum(summary.step_seconds - rank_busy, 0.0),
        memory if memory.any() else none,
        _median(same, "tokens") if same else none,
        _median(same, "attention_area") if same else none,
        np.max([line["longest_sequence"] for line in same], axis=0) if same else none,
    )


def _layers(summary: Summary, lines: list[dict[str, Any]], experts: list[dict[int, dict[str, Any]]]) -> None:
    last = lines[-1]
    forward, backward, recompute = (_median(lines, key) for key in ("forward_s", "backward_s", "recompute_s"))
    moe = {layer for line in experts for layer in line}
    kinds = [str(each) for each in last.get("kinds", ["MoE" if name in moe else "dense" for name in last["layers"]])]
    costs = LayerCosts(
        last["layers"], forward, backward, recompute, last["stage"], last["chunk"], kinds, "kinds" in last
    )
    summary.layers = costs
    for kind in costs.kinds_of_layers:
        members = costs.of_kind(kind)
        seconds = costs.total[members]
        most, median = int(seconds.argmax()), float(np.median(seconds))
        layer = members[most]
        slow = SlowLayer(int(costs.names[layer]), int(costs.stage[layer]), kind, float(seconds[most]), median)
        known = summary.slow_layer
        if known is None or slow.seconds - slow.median > known.seconds - known.median:
            summary.slow_layer = slow


def _sequences(summary: Summary, lines: list[dict[str, Any]]) -> None:
    lines = [line for line in lines if np.array_equal(line["rank"], lines[-1]["rank"])]
    rank = lines[-1]["rank"]
    for name, key in (("tokens", "tokens"), ("area", "attention_area")):
        loads = [line[key] for line in lines]
        mean = np.mean(loads, axis=0)
        if mean.any():
            setattr(summary, name, _worst(rank, mean, _typical(loads)))
    longest = np.max([line["longest_sequence"] for line in lines], axis=0)
    if longest.any():
        summary.longest = _worst(rank, longest, _typical([line["longest_sequence"] for line in lines]))


def _experts(summary: Summary, lines: list[dict[int, dict[str, Any]]]) -> None:
    for layer in sorted(lines[-1]):
        own = [line[layer] for line in lines if layer in line]
        at_home = [line["at_home"] for line in own if "at_home" in line]
        for finding, share, key in (
            ("expert", summary.share_experts, "tokens_per_expert"),
            ("expert_rank", summary.share_expert_ranks, "tokens_per_rank"),
        ):
            loads = [line[key] for line in own if line[key].size == own[-1][key].size]
            share[layer], tokens = _share(loads)
            worst = _worst(np.arange(tokens.size), tokens, _typical(loads), layer)
            if finding == "expert_rank" and at_home:
                summary.share_expert_homes[layer], _ = _share(at_home)
                worst = replace(worst, before=_typical(at_home))
            known = getattr(summary, finding)
            if known is None or worst.over > known.over:
                setattr(summary, finding, worst)


def _share(loads: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Mean tokens over iterations: over the mean of all, and as they are."""
    tokens = np.mean(loads, axis=0)
    return tokens / tokens.mean() if tokens.any() else np.ones_like(tokens), tokens


def _step_load(summary: Summary, stages: list[dict[str, Any]], experts: list[dict[int, dict[str, Any]]]) -> StepLoad:
    last, ranks = stages[-1], summary.ranks
    assert ranks is not None and summary.step_seconds is not None
    order = np.lexsort((last["rank"], last["tensor"], last["context"], last["data"]))
    by_stage = [order[last["stage"][order] == stage] for stage in range(len(last["busy_s"]))]
    width = max(len(members) for members in by_stage)
    grid = np.array([np.resize(members, width) for members in by_stage])  # stages of unequal width repeat their ranks
    loads = {}
    if summary.layers is not None and experts:
        names = summary.layers.names
        for layer in sorted(experts[-1].keys() & set(names)):
            own = [line[layer] for line in experts if layer in line]
            own = [line for line in own if len(line["busy_s"]) > last["expert"].max()]
            if own:
                stage = int(summary.layers.stage[names.index(layer)])
                loads[layer] = ExpertLoad(stage, _median(own, "busy_s"), _median(own, "tokens_per_rank"))
    return StepLoad(
        summary.step_seconds,
        ranks.busy[grid],
        last["expert"][grid],
        last["micro_batches"] or math.inf,
        max(last["chunks"], 1),
        _forward_share(summary.layers),
        loads,
    )


def _forward_share(layers: LayerCosts | None) -> float:
    """Share of forward passes in the time of all layers. If unknown, a third: backward takes twice as long."""
    total = float(layers.total.sum()) if layers else 0.0
    return float(layers.forward.sum()) / total if layers and total > 0 else 1 / 3


def _act(actions: BalancerActions, line: dict[str, Any]) -> None:
    action = str(line["action"])
    actions.counts[action] = actions.counts.get(action, 0) + 1
    actions.plan_ms += line["plan_ms"]
    actions.apply_ms += line["apply_ms"]
    actions.moved_bytes += int(line["moved_bytes"])
    for name in MEMORY:
        if name in line:
            actions.memory[name] = max(actions.memory.get(name, 0), int(line[name]))
