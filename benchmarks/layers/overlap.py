"""Partitions by what layers cost serially, by what they compute, and by their share of a step with overlapped messages.

    python -m benchmarks.layers.overlap [--quick] [--json FILE]

4 and 8 stages of 2 chunks, 32 micro-batches. With `--overlap-moe-expert-parallel-comm` Megatron-LM runs the forward
pass of one micro-batch in turn with the backward pass of another, layer by layer, on one stream for computation and one
for messages. This is simulated node by node, in the order of megatron-core's `TransformerLayerSchedulePlan.run` with
delayed weight gradients; the step is the interleaved schedule with these calls. Nothing is trained. Models:

    dense first     3 dense layers, 58 with experts, all of equal computation, and a head, as DeepSeek-V3
    dense half      24 dense layers, then 24 with experts, all of equal computation
    alternating     every second of 48 layers has experts, all of equal computation, as Llama 4
    uneven          48 layers with experts; the fullest rank has 1.28 to 2.43 times the mean of tokens and of messages

"messages" is the dispatch and the combine of a layer, over what it computes forward without unevenness; "exposed" the
part of them that nothing hides under equal numbers of layers. Partitions are made by the planner of training: by serial
costs, computation and messages one after the other; by computation alone; and by measured shares. Shares are those that
training measures (`balancing.report.exposed`) in the simulated events, under equal numbers of layers first and then up
to three times under the plan before. As in training, a plan that makes the step longer is taken back. Columns s, c and
m are these three: speedups over equal numbers of layers with overlap and without, and for the step with overlap what
the planner predicts with these costs, over the simulated step. Takes half a minute.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import groupby

import numpy as np
from rich.console import Console
from rich.progress import track

from balancing.layers import LayerSeconds, Pipeline, StagePlan, plan_pipeline
from balancing.layers.measurements import join_ranks, layer_seconds
from balancing.layers.plan import plan_stages
from balancing.pipeline import Schedule, operations, simulate_schedule
from balancing.report import RankRecord, Span
from balancing.report.exposed import exposed_spans
from benchmarks.command import parser, show_table, write_rows

__all__ = ["Model", "Row", "measured_cost", "overlapped_step", "rows"]

_CHUNKS, _MICRO_BATCHES = 2, 32
_IN_PARTS = Schedule(in_parts=True)
_ROUNDS = 3
_SHARES = (0.5, 1.0, 2.0)


@dataclass(frozen=True, eq=False)
class Model:
    """Forward seconds of parts of layers. A backward takes twice the computation, half of it for weight gradients, and
    the same messages.

    attention, experts: float arrays [layer]; a dense layer's MLP counts as experts.
    message: float array [layer], of the dispatch and of the combine each; 0 in a dense layer.
    head: of the head.
    """

    attention: np.ndarray
    experts: np.ndarray
    message: np.ndarray
    head: float = 0.0

    @property
    def layers(self) -> int:
        return len(self.attention)

    def cost(self, messages: bool) -> LayerSeconds:
        """What layers compute, and their messages, one after the other."""
        computed, sent = self.attention + self.experts, 2 * self.message * messages
        return LayerSeconds(computed + sent, 2 * computed + sent, head=(self.head, 2 * self.head))

    @cached_property
    def calls(self) -> "lru_cache":
        return lru_cache(maxsize=None)(lambda *bounds: _call(self, *bounds))


@dataclass(frozen=True, eq=False)
class _Call:
    """Seconds of a call of one chunk forward and one backward, and what the clock of a rank sees: its pieces of
    computation and its messages, each kind, part, start and seconds."""

    seconds: float
    pieces: list[tuple[str, int | str, float, float]]
    messages: list[tuple[str, int | str, float, float]]


class _Streams:
    """Two streams that run in order. A micro-batch's next node begins when its last one has ended."""

    def __init__(self) -> None:
        self.free = {"compute": 0.0, "messages": 0.0}
        self.done = {"forward": 0.0, "backward": 0.0}
        self.call = _Call(0.0, [], [])

    def run(self, kind: str, part: int | str, seconds: float, stream: str = "compute") -> None:
        if not seconds:
            return
        begin = max(self.free[stream], self.done[kind])
        self.free[stream] = self.done[kind] = begin + seconds
        (self.call.pieces if stream == "compute" else self.call.messages).append((kind, part, begin, seconds))

    def weight_gradient(self, part: int | str, seconds: float) -> None:
        """Nothing of its micro-batch waits for it."""
        begin = self.free["compute"]
        self.free["compute"] = begin + seconds
        self.call.pieces.append(("backward", part, begin, seconds))


def _call(model: Model, ahead: tuple[int, int] | None, back: tuple[int, int] | None) -> _Call:
    """One chunk forward and one backward in turn, as `TransformerModelChunkSchedulePlan.run` orders them. ahead, back:
    first layer and one past the last; None for a call in warm-up or cool-down."""
    streams = _Streams()
    forward = [*range(*ahead)] if ahead else []
    backward = [*range(*back)][::-1] if back else []
    if back and back[1] == model.layers:
        streams.run("backward", "head", 2 * model.head)
    both = min(len(forward), len(backward))
    pairs: list[tuple[int | None, int | None]] = [*zip(forward[:both], backward[:both], strict=True)]
    pairs += [(None, layer) for layer in backward[both:]] + [(layer, None) for layer in forward[both:]]
    for f, b in pairs:
        if b is not None:
            streams.run("backward", b, model.message[b], "messages")
        if f is not None:
            streams.run("forward", f, model.attention[f])
        if b is not None:
            streams.run("backward", b, model.experts[b])
        if f is not None:
            streams.run("forward", f, model.message[f], "messages")
        if b is not None:
            streams.weight_gradient(b, model.experts[b])
            streams.run("backward", b, model.message[b], "messages")
        if f is not None:
            streams.run("forward", f, model.experts[f])
            streams.run("forward", f, model.message[f], "messages")
        if b is not None:
            streams.run("backward", b, model.attention[b])
            streams.weight_gradient(b, model.attention[b])
    if ahead and ahead[1] == model.layers:
        streams.run("forward", "head", model.head)
    seconds = max(*streams.free.values(), *streams.done.values())
    return _Call(seconds, streams.call.pieces, streams.call.messages)


def _calls(model: Model, plan: StagePlan) -> Iterator[tuple[int, list[tuple[str, int, int]], _Call]]:
    """Rank, operations (kind, chunk, micro-batch) and timing of each call of a step, in order."""
    every = operations(plan.stages, _MICRO_BATCHES, chunks=plan.virtual, schedule=_IN_PARTS)
    for rank, of_rank in enumerate(every):
        warm_up = [each.kind for each in of_rank].index("backward") - 1
        steady = 2 * (len(of_rank) // 2 - warm_up)
        calls = [[each] for each in of_rank[:warm_up]]
        calls += [[*of_rank[at : at + 2]] for at in range(warm_up, warm_up + steady, 2)]
        calls += [[each] for each in of_rank[warm_up + steady :]]
        for call in calls:
            bounds = {each.kind: _bounds(plan, rank, each.chunk) for each in call}
            timed = model.calls(bounds.get("forward"), bounds.get("backward"))
            yield rank, [(each.kind, each.chunk, each.micro_batch) for each in call], timed


def _bounds(plan: StagePlan, stage: int, chunk: int) -> tuple[int, int]:
    at = chunk * plan.stages + stage
    return plan.bounds[at], plan.bounds[at + 1]


@cache
def overlapped_step(model: Model, plan: StagePlan) -> float:
    """Seconds of a step with overlapped messages."""
    seconds = np.zeros((2, plan.stages, plan.virtual, _MICRO_BATCHES))
    for rank, passes, call in _calls(model, plan):
        kind, chunk, micro_batch = passes[0]  # a backward follows its forward at once, and takes none of its own
        seconds[int(kind == "backward"), rank, chunk, micro_batch] = call.seconds
    return simulate_schedule(*seconds, _MICRO_BATCHES, schedule=_IN_PARTS).step_time


@cache
def measured_cost(model: Model, plan: StagePlan) -> LayerSeconds:
    """What training would measure in this step: two expert-parallel ranks a stage, which see the same."""
    spans: list[list[Span]] = [[] for _ in range(plan.stages)]
    for rank, passes, call in _calls(model, plan):
        of = {kind: (chunk, micro_batch) for kind, chunk, micro_batch in passes}
        spans[rank] += [Span(kind, part, *of[kind], start, took, took) for kind, part, start, took in call.pieces]
        for kind, several in groupby(call.pieces, key=lambda piece: piece[0]):
            took = sum(piece[3] for piece in several)
            spans[rank].append(Span(f"{kind}-step", "", *of[kind], 0.0, took, took))
        messages = [Span(kind, part, *of[kind], start, took, took) for kind, part, start, took in call.messages]
        spans[rank] += exposed_spans(messages, [piece[2:] for piece in call.pieces])
    spans[0] += [Span("forward", "embedding", 0, 0, 0.0, 0.0, 0.0)]
    spans[-1] += [Span("forward", "head", plan.virtual - 1, 0, 0.0, 0.0, 0.0)] if not model.head else []
    records = [RankRecord(at, at, 0, 0, 0, 0, 0, 0.0, 0.0, 1.0, 0, 0, 0, 0, each) for at, each in enumerate(spans)]
    seconds = [layer_seconds(record, model.layers, in_turn=True)[None] for record in records for _ in range(2)]
    return join_ranks(seconds, [0] * len(seconds), tells_waiting=True)[0]


def _models(share: float) -> Iterator[tuple[str, Model]]:
    """share: seconds of a layer's messages over what it computes forward, without unevenness."""
    has_experts = np.r_[np.zeros(3), np.ones(58)]
    attention, mlp, head = 0.32, 0.68, 1.6  # products of DeepSeek-V3, over those of a layer
    ones = np.ones(61)
    yield "dense first", Model(attention * ones, mlp * ones, share / 2 * has_experts, head)
    ones = np.ones(48)
    yield "dense half", Model(0.4 * ones, 0.6 * ones, share / 2 * (np.arange(48) >= 24), 0.5)
    yield "alternating", Model(0.4 * ones, 0.6 * ones, share / 2 * (np.arange(48) % 2), 0.5)
    fullest = np.random.default_rng(0).uniform(1.28, 2.43, 48)
    yield "uneven", Model(0.4 * ones, 0.6 * fullest, share / 2 * fullest, 0.5)


@dataclass(frozen=True)
class Row:
    """Partitions by serial costs, by computation and by measured shares, in this order.

    exposed: part of the messages that nothing hides under equal numbers, in passes in turn with another micro-batch's.
    overlapped, serial: the step of equal numbers of layers over theirs, with overlap and without.
    predicted: what the planner predicts for the step with overlap, over the simulated one.
    """

    case: str
    stages: int
    messages: float
    exposed: float
    overlapped: tuple[float, ...]
    serial: tuple[float, ...]
    predicted: tuple[float, ...]


def _partitions(model: Model, stages: int) -> tuple[StagePlan, dict[str, tuple[LayerSeconds, StagePlan]]]:
    """Equal numbers of layers; and costs and partition for the step with overlap by each kind of costs."""
    equal = plan_stages(np.ones(model.layers), stages, virtual=_CHUNKS, method="uniform")
    measured, shares = measured_cost(model, equal), equal
    for _ in range(_ROUNDS):
        found = _plan(measured, stages, _IN_PARTS)
        if overlapped_step(model, found) >= overlapped_step(model, shares):
            break
        shares, measured = found, measured_cost(model, found)
    by = {
        name: (cost, _plan(cost, stages, _IN_PARTS))
        for name, cost in (("serial", model.cost(messages=True)), ("computed", model.cost(messages=False)))
    }
    return equal, by | {"measured": (measured, shares)}


def _plan(cost: LayerSeconds, stages: int, schedule: Schedule) -> StagePlan:
    return plan_pipeline(cost, Pipeline(stages, _MICRO_BATCHES, _CHUNKS, schedule))


def _at(case: str, stages: int, share: float, model: Model) -> Row:
    equal, partitions = _partitions(model, stages)
    serially, computed = model.cost(messages=True), model.cost(messages=False)
    steps = [overlapped_step(model, plan) for _, plan in partitions.values()]
    predicted = [cost.step_seconds(plan, _MICRO_BATCHES, schedule=_IN_PARTS) for cost, plan in partitions.values()]
    alone = [serially.step_seconds(_plan(cost, stages, Schedule()), _MICRO_BATCHES) for cost, _ in partitions.values()]
    exposed = measured_cost(model, equal).total - computed.total
    return Row(
        case,
        stages,
        share,
        exposed=float(exposed.sum() / (4 * model.message).sum()),
        overlapped=tuple(overlapped_step(model, equal) / each for each in steps),
        serial=tuple(serially.step_seconds(equal, _MICRO_BATCHES) / each for each in alone),
        predicted=tuple(said / each for said, each in zip(predicted, steps, strict=True)),
    )


def rows(stages: Sequence[int] = (4, 8), shares: Sequence[float] = _SHARES) -> list[Row]:
    names = [name for name, _ in _models(1.0)]
    cases = [(name, many, share, dict(_models(share))[name]) for name in names for many in stages for share in shares]
    return [_at(*case) for case in track(cases, "simulating", console=Console(stderr=True))]


def main() -> None:
    options = parser("layers.overlap", __doc__, "four stages, one size of messages").parse_args()
    found = rows((4,), (1.0,)) if options.quick else rows()
    of_kinds = [name for kind in ("overlap", "without", "predicted") for name in (f"{kind}: s", "c", "m")]
    lines = []
    for row in found:
        gains = [f"{gain:.3f}" for gain in (*row.overlapped, *row.serial)]
        said = [f"{share:.2f}" for share in row.predicted]
        lines.append((row.case, f"{row.stages}", f"{row.messages:.1f}", f"{row.exposed:.0%}", *gains, *said))
    show_table("", ("case", "stages", "messages", "exposed", *of_kinds), lines)
    write_rows(options.json, found)


if __name__ == "__main__":
    main()
