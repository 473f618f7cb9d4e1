"""Gain and cost of planners of layers during the training of six kinds of dynamic models.

    python -m benchmarks.layers.plans [--quick] [--json FILE]
    python -m benchmarks.layers.plans --trace benchmarks/traces/*.npz

- Training: a run of each of DynMo's six cases on 8 stages, 32 and 48 layers, 32 micro-batches, 4000 iterations of which
  each tenth stands for ten. Costs of layers are modelled (sources in `benchmarks.layers.traces`); steps are simulated
  with Megatron's own 1F1B schedule, and a move costs its bytes at 50 GB/s and 0.25 s for new buffers and optimizer.
  Balancers have their default settings (`LayerConfig`). Methods:
    uniform             equal numbers of layers, for the whole run
    deepspeed           DeepSpeed's partition by parameters, for the whole run
    static              the best single plan for the whole run, by trial; unknown in advance
    diffusion, gate     neighbours exchange layers, if the gate allows the move
    optimal, gate       exact plans, refined by simulation, if the gate allows the move
    oracle              the best known plan of each iteration with its costs known in advance, and free moves
    uniform, 2 chunks   equal numbers of layers in chunks of Megatron's interleaved schedule, 2, 3 and 4 a stage, with
                        a shorter warm-up and cool-down; for the whole run
    optimal, 2 chunks, gate    plans of such chunks, 2, 3 and 4 a stage, refined by simulation, also from the plan in
                        force
    whole layers        a bound: the slowest stage of the best plan, without warm-up and cool-down
- Time: of one plan, processor time of one thread, the quickest of several.

With --trace, only the first of these, over costs that `benchmarks.layers.record` took from real training of a small
model, interpolated over the run and over depth.

Nothing is trained here. `benchmarks.layers.emulated` runs such pipelines by the clock. Takes some minutes on one core,
with --quick less than one. Exit code 1 if a row misses its target.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress

from balancing.layers import (
    CostAverage,
    Gate,
    LayerSeconds,
    Pipeline,
    Predicted,
    StagePlan,
    migration_seconds,
    plan_partition,
    plan_pipeline,
    plan_stages,
    refine_plan,
)
from balancing.layers.config import LayerConfig
from balancing.layers.plan import METHODS, ONE_CHUNK
from benchmarks.baselines.layers import deepspeed_plan
from benchmarks.command import exit_code, load_before, parser, show_table, write_rows
from benchmarks.layers.record import replay
from benchmarks.layers.traces import TRACES, Trace, trace

__all__ = ["Row", "reach_settings", "recorded", "times", "training"]

_STAGES, _MICRO_BATCHES = 8, 32
_BANDWIDTH, _REBUILD = 50e9, 0.25
_EVERY = 10  # iterations, of which one is simulated
_CONFIG = LayerConfig(enabled=True)
_CHUNKS = (2, 3, 4)  # a stage, beside one
_OF_ORACLE, _OF_BOUND, _PLAN_MS = 0.97, 0.90, 50.0


@dataclass(frozen=True)
class Row:
    """One measurement. speedup: over uniform. to_limit: share of what is possible (of the oracle's throughput; with
    several chunks a stage, of that of whole layers; of the time that is allowed). target: what `figure` or to_limit
    must reach, None if nothing is promised; met: whether it does. more: other figures."""

    section: str
    case: str
    method: str
    figure: float
    unit: str
    speedup: float | None
    to_limit: float | None
    target: float | None = None
    met: bool = True
    more: dict[str, float] = field(default_factory=dict)


class _Run:
    """One training run: its costs, and the simulated seconds of each `_EVERY`th iteration under any plan."""

    def __init__(self, costs: Trace) -> None:
        self.trace, self.layers = costs, costs.costs[0].layers
        self.simulated = range(0, len(costs.costs), _EVERY)
        self.transfer = costs.message_bytes / _BANDWIDTH
        self._known: dict[tuple[int, StagePlan], float] = {}

    def seconds(self, iteration: int, plan: StagePlan) -> float:
        key = iteration, plan
        if key not in self._known:
            cost = self.trace.costs[iteration]
            self._known[key] = cost.simulate(plan, _MICRO_BATCHES, transfer=self.transfer).step_time
        return self._known[key]

    def fixed(self, plan: StagePlan, every: int = 1) -> np.ndarray:
        return np.array([self.seconds(at, plan) for at in self.simulated[::every]])

    def best(self, cost: LayerSeconds) -> StagePlan:
        """The best known plan of one chunk a stage, with messages counted."""
        plan = plan_stages(cost.total, _STAGES, embedding=sum(cost.embedding), head=sum(cost.head))
        return refine_plan(plan, cost, _MICRO_BATCHES, transfer=self.transfer)

    def static(self) -> StagePlan:
        """The best of many plans over the whole run."""
        costs, parts = self.trace.costs, ("forward", "backward", "embedding", "head")
        mean = LayerSeconds(*(np.mean([getattr(cost, part) for cost in costs], axis=0) for part in parts))
        tried = {self.best(cost) for cost in [mean, *costs[:: max(len(costs) // 16, 1)]]}
        tried.add(plan_stages(mean.total, _STAGES, method="uniform"))
        return min(tried, key=lambda plan: self.fixed(plan, every=5).sum())

    def gated(self, method: str, start: StagePlan) -> tuple[np.ndarray, list[StagePlan], dict[str, float]]:
        """Seconds and plan of every simulated iteration, and what the balancer itself took. The settings, the planner,
        the predictions, which know nothing of messages, and the fewest layers of a chunk are those of training."""
        interval = _CONFIG.interval
        average, gate = CostAverage(window=interval), Gate(_CONFIG.gate, start)
        seconds, plans = np.zeros(len(self.simulated)), []
        spent = {"moves": 0.0, "rollbacks": 0.0, "plan_s": 0.0, "move_s": 0.0, "rebuild_s": 0.0}

        def predict(cost: LayerSeconds, plan: StagePlan) -> float:
            return cost.simulate(plan, _MICRO_BATCHES).step_time

        for iteration, cost in enumerate(self.trace.costs):
            if iteration and iteration % interval == 0:
                begin = time.thread_time()
                before, known = gate.plan, average.cost
                candidate = _plan(known, before, method)
                price = migration_seconds(before, candidate, self.trace.layer_bytes, _BANDWIDTH, fixed=_REBUILD)
                gate, decision = gate.check(
                    iteration, candidate, Predicted(
                        predict(known, before), predict(known, candidate),
                        predict(known, gate.watching) if gate.watching else None,
                    ), price, left=len(self.trace.costs) - iteration,
                )  # fmt: skip
                spent["plan_s"] += time.thread_time() - begin
                if decision.action != "keep":
                    price = migration_seconds(before, gate.plan, self.trace.layer_bytes, _BANDWIDTH, fixed=_REBUILD)
                    spent["moves"] += 1
                    spent["rollbacks"] += decision.action == "rollback"
                    spent["move_s"] += price - _REBUILD
                    spent["rebuild_s"] += _REBUILD
            if iteration % _EVERY == 0:
                seconds[iteration // _EVERY] = self.seconds(iteration, gate.plan)
                plans.append(gate.plan)
                gate = gate.measured(iteration, seconds[iteration // _EVERY])
            average.add(cost)
        return seconds, plans, spent


def _plan(cost: LayerSeconds, before: StagePlan, method: str) -> StagePlan:
    """As training plans it, from the plan in force."""
    least = min(1, *(len(chunk) for chunk in before.order))
    pipeline = Pipeline(_STAGES, _MICRO_BATCHES, before.virtual)
    if method == "optimal":
        return plan_pipeline(cost, pipeline, current=before, min_layers=least)
    return plan_partition(cost, pipeline, current=before, method=method, min_layers=least)


def training(layers: Sequence[int], iterations: int, progress: Progress) -> Iterator[Row]:
    """Every case at every number of layers."""
    for name, count in progress.track([(n, c) for n in TRACES for c in layers], description="training"):
        yield from _train(_Run(trace(name, count, iterations)), f"{name}, {count} layers", TRACES[name][1])


def recorded(traces: Sequence[Trace], progress: Progress) -> Iterator[Row]:
    """Every recorded run."""
    for given in progress.track(traces, description="training"):
        run = _Run(given)
        yield from _train(run, f"{given.name}, recorded, {run.layers} layers", TRACES[given.name][1])


def _train(run: _Run, case: str, paper: float) -> Iterator[Row]:
    costs = [run.trace.costs[at] for at in run.simulated]
    uniform = plan_stages(costs[0].total, _STAGES, method="uniform")
    ends = run.trace.end_parameters
    deepspeed = deepspeed_plan(run.trace.parameters, _STAGES, embedding=ends, head=ends)
    seconds = {"uniform": run.fixed(uniform), "deepspeed": run.fixed(deepspeed), "static": run.fixed(run.static())}
    spent: dict[str, dict[str, float]] = {}
    for method in METHODS:
        if method != "uniform":  # which never moves
            seconds[f"{method}, gate"], _, spent[f"{method}, gate"] = run.gated(method, uniform)
    for chunks in _CHUNKS:
        if run.layers >= chunks * _STAGES:
            interleaved = plan_stages(costs[0].total, _STAGES, method="uniform", virtual=chunks)
            name = f"optimal, {chunks} chunks, gate"
            seconds[f"uniform, {chunks} chunks"] = run.fixed(interleaved)
            seconds[name], _, spent[name] = run.gated("optimal", interleaved)
    best = [run.best(cost) for cost in costs]
    seconds["oracle"] = np.minimum.reduce(
        [
            *(own for method, own in seconds.items() if "chunks" not in method),
            np.array([run.seconds(at, plan) for at, plan in zip(run.simulated, best, strict=True)]),
        ]
    )
    slowest = [plan_stages(cost.total, _STAGES, embedding=sum(cost.embedding), head=sum(cost.head)) for cost in costs]
    seconds["whole layers"] = np.array(
        [_MICRO_BATCHES * cost.stage_loads(plan).max() for cost, plan in zip(costs, slowest, strict=True)]
    )
    for method, own in seconds.items():
        more = {"paper": paper, "best_iteration": float((seconds["uniform"] / own).max())}
        total = _EVERY * float(own.sum())
        if method in spent:
            overhead = sum(value for name, value in spent[method].items() if name.endswith("_s"))
            total += overhead
            more |= spent[method] | {"overhead": overhead / total}
        of_oracle, of_bound = (_EVERY * float(seconds[best].sum()) / total for best in ("oracle", "whole layers"))
        more |= {"of_oracle": of_oracle, "of_bound": of_bound}
        reached = of_bound if "chunks" in method else of_oracle
        target = {"optimal, gate": _OF_ORACLE}.get(method, _OF_BOUND if method.endswith("chunks, gate") else None)
        yield Row("training", case, method, total, "s", 
                  _EVERY * float(seconds["uniform"].sum()) / total, reached, target,
                  target is None or reached >= target, more)  # fmt: skip


class Reach(NamedTuple):
    """How uneven layers must be for a figure of the paper.

    name: of the scheme. setting: in words. times_stages: micro-batches for each stage.
    """

    name: str
    setting: str
    cost: LayerSeconds
    times_stages: int


def reach_settings() -> list[Reach]:
    """48 layers, without a head unless the setting has one."""
    layers, place = 48, np.arange(48)
    ones = np.ones(layers)

    def dense(share: np.ndarray, head: float = 0.0) -> LayerSeconds:
        return LayerSeconds(share, 2 * share, head=(head, 2 * head))

    front, back = place < 6, place >= 42
    return [
        Reach(
            "mixture of experts", "six neighbouring layers have rank max / mean 2.4, all others 1.2",
            dense(0.4 + 0.6 * np.where(front, 2.4, 1.2)), 4,
        ),
        Reach(
            "gradual pruning", "the last six layers keep their weights, the rest takes 8 % of the time",
            dense(np.where(back, 1.0, 0.08)), 4,
        ),
        Reach(
            "layer freezing", "all but the last six layers are frozen, 64 P micro-batches",
            LayerSeconds(ones, 2.0 * back), 64,
        ),
        Reach(
            "layer freezing", "the same with 4 P micro-batches", LayerSeconds(ones, 2.0 * back), 4,
        ),
        Reach(
            "sparse attention", "six layers attend to everything, the rest takes 6 % of the time",
            dense(np.where(front, 1.0, 0.06)), 4,
        ),
        Reach("early exit", "5 % of the tokens are left after six layers", dense(np.where(front, 1.0, 0.05)), 4),
        Reach(
            "mixture of depths", "every second layer takes 12.5 %, and a head of 2.5 layers",
            dense(np.where(place % 2 == 0, 1.0, 0.125), 2.5), 4,
        ),
    ]  # fmt: skip


def times(repeats: int) -> Iterator[Row]:
    """Milliseconds of one plan of 128 layers on 32 stages, from a plan in force."""
    draw = np.random.default_rng(0)
    for virtual in (1, 2):
        for method in METHODS:
            if virtual > 1 and method in ONE_CHUNK:
                continue
            spent = []
            for _ in range(repeats):
                cost = draw.lognormal(0, 0.4, 128)
                old = plan_stages(cost * draw.lognormal(0, 0.2, 128), 32, virtual=virtual, head=2.0)
                begin = time.thread_time()
                plan_stages(cost, 32, virtual=virtual, head=2.0, current=old, method=method)
                spent.append((time.thread_time() - begin) * 1e3)
            target = _PLAN_MS if method == "optimal" else None
            typical = float(np.median(spent))
            case = f"128 layers, 32 stages, {virtual} chunk{'s' * (virtual > 1)} each"
            yield Row("time", case, method, typical, "ms", None, typical / _PLAN_MS, target,
                      target is None or typical <= target, {"slowest": max(spent)})  # fmt: skip


_HEADS = {
    "training": ("case", "method", "seconds", "speedup", "best step", "of oracle", "of bound", "moves", "plan", "move",
                 "rebuild", "overhead", "paper", "target"),
    "time": ("case", "method", "ms", "slowest", "/ allowed", "target"),
}  # fmt: skip


def _cells(row: Row) -> tuple[str, ...]:
    met, more = "" if row.target is None else "met" if row.met else "MISSED", row.more
    speedup = "" if row.speedup is None else f"{row.speedup:.3f}"
    match row.section:
        case "training":
            spent = [f"{more[name]:.2f} s" if name in more else "" for name in ("plan_s", "move_s", "rebuild_s")]
            counted = (f"{more['moves']:.0f}", *spent, f"{more['overhead']:.2%}") if "moves" in more else ("",) * 5
            shares = (f"{more[name]:.1%}" for name in ("of_oracle", "of_bound"))
            return (row.case, row.method, f"{row.figure:.1f}", speedup, f"{more['best_iteration']:.2f}", *shares,
                    *counted, f"{more['paper']:.2f}", met)  # fmt: skip
        case _:
            return row.case, row.method, f"{row.figure:.2f}", f"{more['slowest']:.2f}", f"{row.to_limit:.2f}", met


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 1 if a target was missed."""
    options_of = parser("layers.plans", __doc__, "shorter runs, one number of layers; under a minute")
    options_of.add_argument("--layers", type=int, nargs="+", metavar="N", help="numbers of layers (default: 32 48)")
    options_of.add_argument("--trace", type=Path, nargs="+", metavar="FILE", help="only replay these recordings")
    options = options_of.parse_args(arguments)
    return exit_code("layers", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    load, iterations = load_before(), 800 if options.quick else 4000
    sizes = options.layers or ([32] if options.quick else [32, 48])
    try:
        traces = [replay(path, count, iterations) for path in options.trace or () for count in sizes]
    except (OSError, ValueError) as error:
        raise ValueError(f"--trace: {error}") from None
    with Progress(console=Console(stderr=True), transient=True) as progress:
        rows = list(recorded(traces, progress) if traces else training(sizes, iterations, progress))
    if not traces:
        rows += times(5 if options.quick else 20)
    write_rows(options.json, rows, load=load)
    print(f"{load}; {'recorded' if traces else 'modelled'} costs, simulated steps\n")
    for section, heads in _HEADS.items():
        if own := [_cells(row) for row in rows if row.section == section]:
            before = ["", *(case for case, *_ in own)]
            lines = [(case if case != last else "", *rest) for last, (case, *rest) in zip(before, own, strict=False)]
            show_table(section, heads, lines, 180)
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
