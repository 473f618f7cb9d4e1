"""Validation of simulated speedups: the pipelines of `benchmarks.layers.plans` on the emulated cluster, by wall clock.

    python -m benchmarks.layers.emulated [--quick] [--json FILE]

Megatron's own 1F1B schedule over gloo on 8 ranks, with stages as timed waits. The costs of the 48 layers are those at
the end of each modelled run, scaled so that a step takes seconds. Every plan runs, and for early exit also the repacked
ones on 6, 4 and 2 ranks. The measured step must be within 5 % of the simulated one, and the speedup over equal numbers
of layers is compared with the predicted one. "filled" computes weight gradients while stages wait, by the plan of
`simulate_fill`; its speedup is over the same cost, too. Takes 4 minutes on two idle cores, with --quick one.
Exit code 1 if a row is out of its bounds.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from balancing.layers import LayerSeconds, StagePlan, plan_stages, refine_plan
from balancing.layers.simulated_fill import simulate_fill
from benchmarks.command import exit_code, load_before, parser, write_rows
from benchmarks.emulated import EmulatedCluster
from benchmarks.emulated.paced import run_pipelines
from benchmarks.layers.traces import TRACES, trace

__all__ = ["Row", "main", "measure", "slowed"]

_LAYERS, _MICRO_BATCHES, _STEP = 48, 32, 6.0
_BOUND = 0.05
_FILLED = "optimal, filled"


@dataclass(frozen=True)
class Row:
    """measured, simulated: seconds of a step. speedup, predicted: over equal numbers of layers on 8 ranks."""

    case: str
    method: str
    measured: float
    simulated: float
    speedup: float
    predicted: float

    @property
    def within(self) -> bool:
        return abs(self.measured / self.simulated - 1) <= _BOUND

    def line(self, width: int) -> str:
        """The row as text, the case `width` characters wide."""
        line = f"{self.case:{width}}  {self.method:18}  {self.measured:6.3f} s  {self.simulated:7.3f} s  "
        line += f"{self.measured / self.simulated:.3f}  {self.speedup:7.3f}  {self.predicted:9.3f}"
        return line + ("" if self.within else "  OUT OF BOUNDS")


def _pipelines(name: str) -> tuple[LayerSeconds, dict[str, StagePlan], float]:
    """The costs at the end of a run, slowed down to `_STEP` seconds with equal numbers of layers, the plans, and the
    share of weight gradients in a layer's backward."""
    run = trace(name, _LAYERS, 40)
    given = run.costs[-1]
    uniform = plan_stages(np.ones(_LAYERS), 8, method="uniform")
    cost = slowed(given, _STEP / given.simulate(uniform, _MICRO_BATCHES).step_time)

    def optimal(stages: int) -> StagePlan:
        return refine_plan(plan_stages(cost.total, stages, head=sum(cost.head)), cost, _MICRO_BATCHES)

    plans = {"uniform": uniform, "optimal": optimal(8)}
    plans[_FILLED] = plans["optimal"]
    if name == "early exit":
        plans |= {f"optimal, {stages} stages": optimal(stages) for stages in (6, 4, 2)}
    return cost, plans, run.weight_share


def slowed(cost: LayerSeconds, times: float) -> LayerSeconds:
    """The costs, so many times as long."""
    embedding, head = ((forward * times, backward * times) for forward, backward in (cost.embedding, cost.head))
    return LayerSeconds(cost.forward * times, cost.backward * times, embedding, head)


def measure(
    stages: int,
    jobs: list[tuple[LayerSeconds, StagePlan, float]],
    repeats: int,
    micro_batches: int = _MICRO_BATCHES,
) -> list[float]:
    """Seconds of a step under each plan on as many emulated ranks, the quickest of `repeats`. jobs: costs, plan, and
    the share of the backward whose weight gradients fill waits."""
    pipelines = []
    for cost, plan, share in jobs:
        if share:
            passes = cost.split_passes(plan, share)
            arrays = {name: getattr(passes, name) for name in ("forward", "weight_gradient", "activation", "pieces")}
            arrays["backward"] = passes.input_gradient
        else:
            arrays = dict(zip(("forward", "backward"), cost.stage_seconds(plan), strict=True))
        pipeline = {name: values.tolist() for name, values in arrays.items()}
        pipelines.append(pipeline | {"micro_batches": micro_batches, "repeats": repeats})
    with EmulatedCluster(1, stages) as cluster:
        return [min(seconds) for seconds in run_pipelines(cluster, pipelines)]


def _simulated(cost: LayerSeconds, plan: StagePlan, share: float) -> float:
    if share:
        return simulate_fill(cost.split_passes(plan, share), _MICRO_BATCHES).step_time
    return cost.simulate(plan, _MICRO_BATCHES).step_time


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options_of = parser("layers.emulated", __doc__, "three of the six cases, each plan once")
    options_of.add_argument("--cases", nargs="+", choices=[*TRACES], metavar="NAME", help="only these cases")
    options = options_of.parse_args(arguments)
    return exit_code("layers_emulated", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    load = load_before()
    print(f"{load}; emulated cluster on the CPU", flush=True)
    quick = ("layer freezing", "early exit", "gradual pruning")
    names = options.cases or [name for name in TRACES if not options.quick or name in quick]
    cases = {name: _pipelines(name) for name in names}
    width, rows, uniform = max(map(len, names)), [], {}
    print(f"{'':{width}}  {'':18}  measured  simulated  ratio  speedup  predicted", flush=True)
    for stages in sorted({plan.stages for _, plans, _ in cases.values() for plan in plans.values()}, reverse=True):
        own = [(n, m) for n, (_, plans, _) in cases.items() for m, plan in plans.items() if plan.stages == stages]
        jobs = []
        for name, method in own:
            cost, plans, share = cases[name]
            jobs.append((cost, plans[method], share if method == _FILLED else 0.0))
        found = measure(stages, jobs, 1 if options.quick else 2)
        for (name, method), (cost, plan, share), seconds in zip(own, jobs, found, strict=True):
            uniform.setdefault(name, seconds)  # the first plan of a case
            simulated, before = _simulated(cost, plan, share), _simulated(cost, cases[name][1]["uniform"], 0.0)
            rows.append(Row(name, method, seconds, simulated, uniform[name] / seconds, before / simulated))
            print(rows[-1].line(width), flush=True)
    write_rows(options.json, rows, "within", load=load)
    return 0 if all(row.within for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
