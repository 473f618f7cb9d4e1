"""Every published headline of the systems that this project builds on, beside the project's own figure and the limit.

    python -m benchmarks.headlines [--emulated] [--only NAME ...] [--trace FILE] [--json FILE] [--page FILE]

A row for each headline, in a setting in which that gain is there to be had: a step without balancing, with the paper's
own method (DynMo's diffusion, Zeppelin's zones, Pro-Prophet's greedy search), with a rival that the paper names, with
this project's balancer, and the limit. Rows marked "usual" are milder, so that a reader sees what is common and what is
possible. Below the table stands what is uneven in each setting, by how much, and why that is fair. All methods of a row
have the same machine, model and loads.

- simulated: Megatron-LM's 1F1B schedule with made-up costs of layers
- modelled: the cost models by which planners choose (`balancing.sequences.cost`, `balancing.experts.cost`)
- counted: loads of ranks, no times
- emulated (--emulated): real schedules, collectives and transfers by the clock, paced compute, limited network cards

Takes a minute on one core; --emulated 20 to 25 more on two idle ones. --page replaces the table of docs/results.md.
--trace reads SmartMoE's public record of routing (moe_routing_counts.npz), which this repository does not hold; without
it loads are made up, as skewed as that record. Exit code 1 if a headline is not reached and its row knows no reason.
"""

import argparse
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from balancing.cluster import Cluster
from balancing.experts import ExpertShape, traffic
from balancing.experts.cost import TransferWindow, layer_cost
from balancing.files import write_text
from balancing.layers import LayerSeconds, StagePlan, plan_stages, refine_plan
from balancing.sequences import limit_seconds, step_cost
from balancing_tools.load_trace import LoadTrace, read_load_trace
from balancing_tools.whatif.job import read_flags
from balancing_tools.whatif.step import StepModel
from benchmarks.baselines.experts import plan_replicas
from benchmarks.baselines.layers import deepspeed_plan
from benchmarks.baselines.sequences import plan_sequences
from benchmarks.command import exit_code, load_before, parser, write_rows
from benchmarks.experts import emulated as experts_emulated
from benchmarks.experts import taot
from benchmarks.experts.emulated_workload import Loads, Scale, made_up_loads, recorded_loads, scaled_load
from benchmarks.experts.modelled import bound_of_forced_balance, modelled_seconds
from benchmarks.experts.plans import made_up_run, replay
from benchmarks.experts.synthetic import zipf_popularity
from benchmarks.headlines.data import SKEW, TABLE_IV, TAOT_LEFT
from benchmarks.headlines.table import Row, table
from benchmarks.layers import emulated as layers_emulated
from benchmarks.layers.plans import reach_settings
from benchmarks.layers.traces import TRACES, trace
from benchmarks.sequences import emulated_workload as documents
from benchmarks.sequences.emulated import Row as SequenceRow
from benchmarks.sequences.emulated import measure_rows
from benchmarks.sequences.lengths import DISTRIBUTIONS, draw_batch
from benchmarks.sequences.peers import all_gather_seconds

__all__ = ["main"]

_STEP = {32: 6.0, 512: 30.0}  # seconds of a step with equal numbers of layers, by micro-batches
_RANKS = (16, 128)  # Zeppelin's smallest and largest job
_MARK = "<!-- python -m benchmarks.headlines writes what stands between these lines -->"
_ROLES = ("none", "paper", "rival", "ours", "limit")


# Layers.


@dataclass(frozen=True)
class _Pipeline:
    """ends: parameters of the embedding, and of the head, over those of a layer."""

    name: str
    setting: str
    cost: LayerSeconds
    micro_batches: int
    ends: float

    @cached_property
    def plans(self) -> dict[str, StagePlan]:
        plan = partial(plan_stages, self.cost.total, 8, head=sum(self.cost.head))
        uniform = plan(method="uniform")
        return {
            "none": uniform,
            "paper": plan(current=uniform, method="diffusion"),
            "rival": deepspeed_plan(np.ones(self.cost.layers), 8, embedding=self.ends, head=self.ends),
            "ours": refine_plan(plan(), self.cost, self.micro_batches),
        }

    def row(self, how: str, seconds: Mapping[str, float]) -> Row:
        slowest = float(self.cost.stage_loads(plan_stages(self.cost.total, 8, head=sum(self.cost.head))).max())
        times = {name: [each] for name, each in (*seconds.items(), ("limit", self.micro_batches * slowest))}
        short = self.name == "layer freezing" and self.micro_batches == 32
        reason = "four micro-batches a stage fill and drain too long" if short else ""
        if how == "emulated" and not reason:
            none, ours = (self.cost.simulate(self.plans[role], self.micro_batches) for role in ("none", "ours"))
            reason = (
                f"the plan gives {none.step_time / ours.step_time:.2f}, of which passes and messages cost the host some"
            )
        return Row(f"DynMo, {self.name}", f"{how}, {self.micro_batches} micro-batches", self.setting, times,
                   "DeepSpeed", usual=self.setting == "L2", reason=reason)  # fmt: skip


def _pipelines() -> list[_Pipeline]:
    found = [("L1", name, cost, 8 * each, cost.head[0]) for name, _, cost, each in reach_settings()]
    for name in TRACES:
        run = trace(name, 48, 40)
        found.append(("L2", name, run.costs[-1], 32, run.end_parameters / float(run.parameters[0])))
    pipelines = []
    for setting, name, cost, count, ends in found:
        before = cost.simulate(plan_stages(cost.total, 8, method="uniform"), count).step_time
        pipelines.append(_Pipeline(name, setting, layers_emulated.slowed(cost, _STEP[count] / before), count, ends))
    return pipelines


def _layers(progress: Progress) -> Iterator[Row]:
    for one in progress.track(_pipelines(), description="layers"):
        steps = {role: one.cost.simulate(plan, one.micro_batches) for role, plan in one.plans.items()}
        yield one.row("simulated", {role: step.step_time for role, step in steps.items()})


def _layers_emulated() -> Iterator[Row]:
    for count in _STEP:
        known = [one for one in _pipelines() if one.micro_batches == count]
        jobs = {(one.name, one.setting, plan): one.cost for one in known for plan in one.plans.values()}
        found = layers_emulated.measure(8, [(cost, plan, 0.0) for (*_, plan), cost in jobs.items()], 1, count)
        seconds = dict(zip(jobs, found, strict=True))
        for one in known:
            own = {role: seconds[one.name, one.setting, plan] for role, plan in one.plans.items()}
            yield one.row("emulated", own)


# Sequences.


def _rest(ranks: int, cluster: Cluster) -> float:
    """Seconds of a 7B model's embedding, head, gradient sums and optimizer, with context parallelism over all ranks."""
    flags = (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --swiglu "
        f"--vocab-size 32000 --seq-length {4096 * ranks} --micro-batch-size 1 --global-batch-size 1 "
        f"--context-parallel-size {ranks} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    )
    job = read_flags(flags.split()).on(ranks)
    model = StepModel(job, cluster)
    return sum(model.head()) + sum(model.embedding()) + model.data_parallel_seconds(job.plan)


def _sequences(progress: Progress) -> Iterator[Row]:
    for model, ranks in progress.track([(m, r) for m in documents.SHAPES for r in _RANKS], description="sequences"):
        shape, cluster = replace(documents.SHAPES[model], layers=32), Cluster.sheet("a800-4x200g", nodes=ranks // 8)
        times: dict[str, list[float]] = {role: [] for role in _ROLES}
        for name in DISTRIBUTIONS:
            lengths = draw_batch(name, 4096 * ranks, np.random.default_rng(0))
            plan = partial(plan_sequences, lengths, cluster, shape=shape)
            ring = plan(method="ring")
            seconds = (
                step_cost(ring, cluster, shape, routed=False, gradient_width=1.0).total,
                step_cost(plan(method="zones"), cluster, shape).total,
                all_gather_seconds(lengths, cluster, shape, ring, two_level=False),
                step_cost(plan(method="chunks"), cluster, shape).total,
                limit_seconds(lengths, cluster, shape),
            )
            for role, each in zip(_ROLES, seconds, strict=True):
                times[role].append(each + _rest(ranks, cluster))
        yield from _of_documents(f"modelled, {ranks} ranks", model, times)


def _of_documents(how: str, model: str, times: Mapping[str, Sequence[float]]) -> Iterator[Row]:
    usual, setting = model != "MHA", "S1" if model == "MHA" else "S2"
    most = float((np.array(times["none"]) / times["limit"]).max())
    reason = f"no method can be more than {most:.2f} times faster here; see the longest documents and 128 ranks"
    yield Row("Zeppelin, mean", how, setting, times, "LLaMA CP", usual=usual)
    yield Row("Zeppelin, largest", how, setting, times, "LLaMA CP", pick="largest", usual=usual, reason=reason)


_EMULATED = {"none": "ring", "paper": "zones", "rival": "all-gather", "ours": "chunks"}


def _sequences_emulated() -> Iterator[Row]:
    rows = [
        row
        for name, size in documents.CLUSTERS.items()
        for row in measure_rows(name, documents.Scale(*size, 100.0), tuple(_EMULATED.values()), tuple(documents.SHAPES))
    ]
    for model in documents.SHAPES:
        own = _of_methods([row for row in rows if row.model == model])
        yield from _of_documents("emulated, 16 ranks", model, own)
    scale = documents.Scale(2, 8, 250.0, preset="h200-8x400g")
    times = _of_methods(measure_rows("H200", scale, tuple(_EMULATED.values()), ("MHA",), ("prolong",)))
    yield Row("Zeppelin, largest", "emulated, 16 ranks", "S3", times, "LLaMA CP", pick="largest")


def _of_methods(rows: Sequence[SequenceRow]) -> dict[str, list[float]]:
    """Times by role."""
    own = {role: [row for row in rows if row.method == method] for role, method in _EMULATED.items()}
    times = {role: [row.seconds for row in each] for role, each in own.items()}
    return times | {"limit": [row.seconds / row.to_limit for row in own["ours"]]}


# Experts.


def _settings(record: LoadTrace | None, steps: int, seconds: float) -> Iterator[tuple[str, Scale, Loads]]:
    """Setting, machine and loads: skewed ones, and the usual. seconds: `Scale.expert_seconds`."""
    scale = Scale(16, 32, seconds)
    if record is None:
        yield "E1", scale, made_up_loads(scale, 4, 4, steps, (SKEW,))
    else:
        own = replace(scale, experts=record.counts.shape[-1])
        yield "E1", own, recorded_loads(record, own, 4, 4, steps)
    yield "E2", scale, made_up_loads(scale, 4, 4, steps)


def _of_experts(how: str, setting: str, seconds: Mapping[str, float], even: float) -> Iterator[Row]:
    times = {role: [each] for role, each in seconds.items()}
    for name in ("Pro-Prophet, largest", "Pro-Prophet over FasterMoE, largest"):
        yield Row(name, how, setting, times, "FasterMoE", usual=setting == "E2")
    if setting == "E2":
        yield Row("UltraEP, share of forced balance", how, "E6", times | {"limit": [even]}, "FasterMoE", usual=True)


def _experts(record: LoadTrace | None, progress: Progress) -> Iterator[Row]:
    for setting, scale, loads in progress.track(list(_settings(record, 3, 0.24)), description="experts"):

        def step(method: str, slots: int = 2, scale: Scale = scale, loads: Loads = loads) -> tuple[float, float]:
            even, own = modelled_seconds(loads, scale, method, 4, slots)
            return even / 3, own / 3

        even, ours = step("quota")
        seconds = {"none": step("none")[1], "ours": ours, "limit": even / bound_of_forced_balance(loads, scale, 4)}
        for role, method in (("paper", "prophet"), ("rival", "shadow")):
            seconds[role] = min(step(method, slots)[1] for slots in (2, scale.experts))
        yield from _of_experts("modelled", setting, seconds, even)
    cells = [(name, top) for name in TABLE_IV for top in (1, 2)]
    yield from (_table_iv(record, name, top) for name, top in progress.track(cells, description="table IV"))
    rows = replay(record or made_up_run(6), [16], 60, progress)
    ratio = {row.method: row.more["rb_over_shadow_most"] for row in rows
             if row.section == "replay, last micro-batch" and row.case.endswith("2 slots")}  # fmt: skip
    ratios = {"none": ratio["none"], "paper": max(ratio["prophet"], ratio["prophet, any number"]), "rival": 1.0,
              "ours": ratio["quota"], "limit": math.inf}  # fmt: skip
    times = {role: [1 / each] for role, each in ratios.items()}
    yield Row("Pro-Prophet, balance over FasterMoE", "counted", "E4", times, "FasterMoE", "")
    left = taot.compare(32, 70, zipf_popularity, 5)["as TAOT"][2]
    points = zip(_ROLES, (70.0, TAOT_LEFT[3], TAOT_LEFT[1], left, 0.0), strict=True)
    times = {role: [each] for role, each in points}
    yield Row("TAOT, 70 % of imbalance on 32 ranks", "counted", "E5", times, "LLEP", "points")


def _table_iv(record: LoadTrace | None, model: str, top: int) -> Row:
    layers, hidden, inner, *_ = TABLE_IV[model]
    cluster = Cluster(nodes=4, ranks_per_node=4, nics_per_node=1, intra_node_bandwidth=12e9, nic_bandwidth=12.5e9,
                      flops=35.6e12, memory=24e9)  # fmt: skip
    shape = ExpertShape(hidden, inner, 4, gated=False)
    under = 1024 * hidden * (8 * hidden + 2 * 256) / cluster.flops  # projections, and 256 tokens attended
    options: dict[str, Any] = {"shape": shape, "window": TransferWindow(under)}
    found: dict[str, list[float]] = {role: [] for role in _ROLES}
    for before, now in _pairs(record, 1024 * top):
        even = np.full_like(now, now.sum() // now.size)
        methods = (("none", "none", (0,)), ("paper", "prophet", (2, 16)), ("rival", "shadow", (2, 16)),
                   ("ours", "quota", (2,)), ("limit", "none", (0,)))  # fmt: skip
        for role, method, rooms in methods:
            plans = [plan_replicas(before, cluster, slots=room, method=method, **options) for room in rooms]
            load = even if role == "limit" else now
            costs = [layer_cost(traffic(load, each), each, cluster, shape, TransferWindow(under)) for each in plans]
            found[role].append(layers * (min(cost.total for cost in costs) + 3 * under))
    times = {role: [float(np.mean(each))] for role, each in found.items()}
    slower = "; FasterMoE's broadcast is faster" if times["ours"] > times["rival"] else ""
    reason = f"four GPUs share a card, which exchanges of tokens fill{slower}"
    return Row(f"Pro-Prophet, table IV, GPT-{model}, top-{top}", "modelled", "E3", times, "FasterMoE", reason=reason)


def _pairs(record: LoadTrace | None, tokens: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Loads of one expert a rank, int [16, 16], a step and the next: each rank's tokens make up `tokens`."""
    if record is None:
        own = made_up_loads(Scale(16, 16, 0.24), 4, 1, 4, (SKEW,))
        pairs = [(own.before[at][:, layer, 0], own.now[at][:, layer, 0]) for at, layer in np.ndindex(4, 4)]
    else:  # the first records
        counts = record.on_ranks(16)[:10, :, ::4, 0]
        counts = counts.reshape(*counts.shape[:-1], 16, -1).sum(-1)
        pairs = [(counts[at][:, layer], counts[at + 1][:, layer]) for at, layer in np.ndindex(9, counts.shape[2])]
    yield from ((scaled_load(before, tokens, tokens), scaled_load(now, tokens, tokens)) for before, now in pairs)


def _experts_emulated(record: LoadTrace | None) -> Iterator[Row]:
    roles = {"limit": (experts_emulated.CEILING,), "none": ("none",), "ours": ("quota",),
             "paper": ("prophet", "prophet, 8 slots"), "rival": ("shadow", "shadow, 8 slots")}  # fmt: skip
    variants = [experts_emulated.VARIANTS[name] for names in roles.values() for name in names]
    for setting, scale, loads in _settings(record, 1, experts_emulated.EXPERT_SECONDS[16]):
        found = {row.method: row.seconds for row in experts_emulated.measure(loads, scale, variants)[0]}
        seconds = {role: min(found[name] for name in names) for role, names in roles.items()}
        yield from _of_experts("emulated", setting, seconds, seconds["limit"])


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options_of = parser("headlines", __doc__)
    parts = ("layers", "sequences", "experts")
    options_of.add_argument("--emulated", action="store_true", help="also on the emulated cluster, by the clock")
    options_of.add_argument("--only", nargs="+", choices=parts, default=parts, metavar="NAME", help=", ".join(parts))
    options_of.add_argument("--trace", metavar="FILE", help="recorded loads of experts, .npz")
    options_of.add_argument("--page", type=Path, metavar="FILE", help="replace the table of this page")
    options = options_of.parse_args(arguments)
    return exit_code("headlines", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    load, record = load_before(), read_load_trace(options.trace) if options.trace else None
    rows: list[Row] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        planned: dict[str, Callable[[], Iterator[Row]]] = {
            "layers": partial(_layers, progress),
            "sequences": partial(_sequences, progress),
            "experts": partial(_experts, record, progress),
        }
        rows += [row for name in options.only for row in planned[name]()]
    emulated: dict[str, Callable[[], Iterator[Row]]] = {
        "layers": _layers_emulated,
        "sequences": _sequences_emulated,
        "experts": partial(_experts_emulated, record),
    }
    rows += [row for name in options.only if options.emulated for row in emulated[name]()]
    write_rows(options.json, [asdict(row) | {"gain": row.gain()} for row in rows], load=load)
    about = f"{load}, no GPU, commit {_commit()}"
    print(f"{about}\n\n{table(rows)}")
    if options.page:
        before, _, after = options.page.read_text().partition(_MARK)
        write_text(options.page, f"{before}{_MARK}\n{about}\n\n{table(rows)}\n\n{_MARK}{after.partition(_MARK)[2]}")
    return 1 if any(row.fails for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
