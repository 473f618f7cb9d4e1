"""Balance of expert-parallel ranks by the planners of `balancing.experts`, and the time that planners take.

    python -m benchmarks.experts.plans [--quick] [--trace FILE] [--json FILE]
    python -m benchmarks.experts.plans --workloads      # W0 to W7 of Megatron-LM's pull request 7488, alone

- Replay: recorded loads, or synthetic ones without --trace. Every planner places replicas from one micro-batch, and the
  next one is split over them, at several expert-parallel sizes. Then the same from the last micro-batch of the record
  before.
- Grid: synthetic loads of known imbalance, which drift by a known part after replicas are placed.

  Loads are drawn by Zipf's law, and lognormal, as recorded loads of DeepSeek-V3 are.

  "quota, --cluster" knows what transfers cost and hide, and how much loads drift, as training does with `--cluster`.
- Time: one placement and one split, CPU time of one thread, the best of several; with a GPU, also the split there.

"quota, 1 late slot" adds late copies to quota's two slots, from the load that is split (`balancing.experts.late`).
"alias, load known" places all replicas from it, after MoonEP. "graph" is LPLB's idea: replicas on a fixed graph of
ranks. The last columns count the copies that a layer and micro-batch sends when its load is known, and their weights.

"quota, fewest for 1 %" has the fewest transfers found that would leave 1 % of the load that is planned from
(`benchmarks.experts.fewest`). The difference is the number of transfers that the robustness of the others costs. Tables
count replicas inside a node and between nodes, and weigh them 1 and 3.

The figure is the load of the busiest rank over the mean. Each row has its ratio to no balancing (none) and to the lower
bound, at most 1 token over the mean. Nothing is trained; `benchmarks.experts.emulated` measures step times. Takes about
10 minutes on one core with the recorded loads, about one minute with --quick. Exit code 1 if a target is missed.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from balancing.cluster import Cluster
from balancing.experts import (
    ExpertShape,
    ReplicaPlacement,
    Splitter,
    TransferWindow,
    add_late_copies,
    plan_replicas_layers,
    traffic,
)
from balancing.experts.load_history import total_variation
from balancing.experts.split.placed_split import SplitTables, place_all
from balancing.files import write_text
from balancing_tools.load_trace import LoadTrace, read_load_trace
from benchmarks.baselines.experts import plan_replicas
from benchmarks.experts.fewest import BETWEEN, by_link, fewest_replicas
from benchmarks.experts.synthetic import DISTRIBUTIONS, drifted, sampled_load, zipf_popularity
from benchmarks.experts.workloads import print_workloads
from benchmarks.processor_time import milliseconds

__all__ = ["Row", "grid", "made_up_run", "replay", "times"]

_CLUSTER = "h200-8x400g"
_IMBALANCE, _DRIFT = (1.0, 1.3, 2.0, 4.0), (0.0, 0.03, 0.1, 0.2, 0.3)
_FEWEST = "quota, fewest for 1 %"
_CLUSTERED = "quota, --cluster"
_LATE, _ALIAS = "quota, 1 late slot", "alias, load known"
_SHAPE = ExpertShape(hidden=2048, ffn_hidden=1408, bytes_per_parameter=2)
_COSTS = {
    "costs, hidden": TransferWindow(1e-3, micro_batches=4),
    "costs, partly hidden": TransferWindow(1e-4),
    "costs, first layer": TransferWindow(1e-3, first=True, micro_batches=4),
    "costs, exposed": TransferWindow(),
    "costs, exposed, 4 micro-batches": TransferWindow(micro_batches=4),
}


@dataclass(frozen=True)
class Row:
    """One measurement.

    section, case, method: what was measured.
    figure: in `unit`; less is better.
    to_none: the figure over that of no balancing; None where there is none.
    to_limit: the figure over its lower bound.
    target: upper bound of the figure; None without a target.
    more: other figures.
    """

    section: str
    case: str
    method: str
    figure: float
    unit: str
    to_none: float | None
    to_limit: float
    target: float | None = None
    more: dict[str, float] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        return self.target is None or self.figure <= self.target


@dataclass
class _Balance:
    """Balance that one planner reached on many loads."""

    fullest: list[float] = field(default_factory=list)  # over the mean
    limit: list[float] = field(default_factory=list)
    deviation: list[float] = field(default_factory=list)
    inside: list[int] = field(default_factory=list)  # replicas whose expert lives in their node
    between: list[int] = field(default_factory=list)
    layer: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)  # copies that are sent when the load is known

    def add(self, load: np.ndarray, placement: ReplicaPlacement, layer: int = 0, known: bool = False) -> None:
        tokens = traffic(load, placement).sum(0)
        mean = max(float(tokens.mean()), 1.0)
        self.fullest.append(float(tokens.max()) / mean)
        self.limit.append(float(np.ceil(mean)) / mean)
        self.deviation.append(float(tokens.std()))
        self.late.append(placement.replicas if known else placement.late_copies)
        inside, between = by_link(placement.planned)
        self.inside.append(inside)
        self.between.append(between)
        self.layer.append(layer)

    def deviation_by_layer(self) -> np.ndarray:
        layers, deviation = np.array(self.layer), np.array(self.deviation)
        return np.array([deviation[layers == layer].mean() for layer in sorted(set(self.layer))])


def _rows(section: str, case: str, found: dict[str, _Balance], target: tuple[float, float] | None) -> Iterator[Row]:
    """Rows of the mean and the 99th percentile of each method. target: upper bounds of both for quota."""
    none, shadow = found["none"], found.get("shadow")
    for method, balance in found.items():
        more = {name: float(np.mean(getattr(balance, name))) for name in ("inside", "between", "late")}
        more["late_mb"] = more["late"] * _SHAPE.weight_bytes / 1e6
        if shadow is not None:
            # Pro-Prophet's balance degree is the standard deviation over ranks, its figure (RB) the ratio to shadowing.
            # Deviations below one token count as one.
            ratio = shadow.deviation_by_layer() / np.maximum(balance.deviation_by_layer(), 1.0)
            more |= {"rb_over_shadow_least": float(ratio.min()), "rb_over_shadow_most": float(ratio.max())}
        for at, (unit, reduce) in enumerate((("mean", np.mean), ("p99", lambda values: np.percentile(values, 99)))):
            figure = float(reduce(balance.fullest))
            aim = target[at] if target and method == "quota" else None
            baseline, limit = figure / float(reduce(none.fullest)), figure / float(reduce(balance.limit))
            yield Row(section, case, method, figure, unit, baseline, limit, aim, more)


def replay(trace: LoadTrace, sizes: Sequence[int], samples: int, progress: Progress) -> list[Row]:
    """Place replicas from one micro-batch for the next; then from the last record.

    trace: the loads.
    sizes: expert-parallel sizes.
    samples: maximal number of micro-batches for each size.
    progress: shows the progress.
    """
    rows = []
    for ranks in sizes:
        counts, cluster = trace.on_ranks(ranks), _cluster(ranks)
        records, _, layers, batches, experts = counts.shape
        every = [
            (record, layer, batch) for record in range(records) for layer in range(layers) for batch in range(batches)
        ]
        following = [at for at in every if at[2] > 0] or [at for at in every if at[0] > 0]
        stale = [at for at in every if at[0] > 0 and at[2] == 0]
        for slots in (1, 2):
            case, target = f"EP {ranks}, {_slots(slots)}", (1.005, 1.02) if slots == 2 else None
            found: dict[str, _Balance] = {}
            plans = {
                "none": (slots, "none"),
                "shadow": (slots, "shadow"),
                "shadow, any number": (experts, "shadow"),
                "prophet": (slots, "prophet"),
                "prophet, any number": (experts, "prophet"),
                "eplb": (slots, "eplb"),
                "quota": (slots, "quota"),
            }
            chosen = _thin(following, samples)
            for record, layer, batch in progress.track(chosen, description=f"replay, {case}"):
                before = counts[record, :, layer, batch - 1] if batch else counts[record - 1, :, layer, -1]
                placed = {
                    name: plan_replicas(before, cluster, slots=room, method=method)
                    for name, (room, method) in plans.items()
                }
                placed[_FEWEST] = _fewest(before, cluster, slots, trials=3)
                for name, placement in placed.items():
                    found.setdefault(name, _Balance()).add(counts[record, :, layer, batch], placement, layer)
            rows += _rows("replay, last micro-batch", case, found, target)
            found = {}
            chosen = _thin(stale, samples // 3)
            for record, layer, batch in progress.track(chosen, description=f"replay, last record, {case}"):
                before, now = counts[record - 1, :, layer, -1], counts[record, :, layer, batch]
                drift = float(total_variation(counts[max(record - 2, 0), :, layer, -1], before))
                for method in ("none", "prophet", "eplb", "graph", "quota"):
                    placement = plan_replicas(before, cluster, slots=slots, method=method)
                    found.setdefault(method, _Balance()).add(now, placement, layer)
                _add_late(found, now, placement, cluster, layer)
                for name, placement in (
                    (_CLUSTERED, _clustered(before, cluster, slots, drift)),
                    (_FEWEST, _fewest(before, cluster, slots, trials=3)),
                ):
                    found.setdefault(name, _Balance()).add(now, placement, layer)
            rows += _rows("replay, last record", case, found, None) if chosen else ()
    return rows


def _fewest(before: np.ndarray, cluster: Cluster, slots: int, trials: int) -> ReplicaPlacement:
    """The fewest transfers found for 1 % of imbalance; those of quota where slots are too few for that."""
    found = fewest_replicas(before, cluster, slots=slots, trials=trials)
    return found if found is not None else plan_replicas(before, cluster, slots=slots)


def _add_late(
    found: dict[str, _Balance], now: np.ndarray, placement: ReplicaPlacement, cluster: Cluster, layer: int = 0
) -> None:
    """Rows of what is planned from the load itself: late copies beside `placement`, and all replicas."""
    found.setdefault(_LATE, _Balance()).add(now, add_late_copies(now, placement), layer)
    alias = plan_replicas(now, cluster, slots=placement.homes_per_rank, method="alias")
    found.setdefault(_ALIAS, _Balance()).add(now, alias, layer, known=True)


def _clustered(before: np.ndarray, cluster: Cluster, slots: int, drift: float) -> ReplicaPlacement:
    """The placement of training with `--cluster`, where loads have drifted by `drift` before."""
    return plan_replicas(before, cluster, slots=slots, shape=_SHAPE, window=_COSTS["costs, hidden"], drift=drift)


def grid(draws: int, progress: Progress) -> list[Row]:
    """Loads of 64 ranks with two slots each, which drift after replicas are placed. draws: loads of each kind."""
    ranks, slots, tokens, rows = 64, 2, 65536, []
    cluster, methods = _cluster(ranks), ("none", "shadow", "prophet", "eplb", "graph", "quota")
    cells = [
        (experts, name, imbalance) for experts in (128, 256) for name in DISTRIBUTIONS for imbalance in _IMBALANCE
        if imbalance > 1 or name == "Zipf"  # at 1 they are the same
    ]  # fmt: skip
    for experts, name, imbalance in progress.track(cells, description="grid"):
        found: dict[float, dict[str, _Balance]] = {drift: {} for drift in _DRIFT}
        for draw in range(draws):
            generator = np.random.default_rng(1000 * experts + draw)
            popularity = DISTRIBUTIONS[name](experts, ranks, imbalance, generator)
            before = sampled_load(popularity, ranks, tokens, generator)
            plans: dict[str, ReplicaPlacement] = {
                # As in training, whose gate knows that loads drift.
                method: plan_replicas(before, cluster, slots=slots, method=method, min_gain=0.0)
                for method in methods
            }
            plans[_FEWEST] = _fewest(before, cluster, slots, trials=9)
            for drift in _DRIFT:
                now = sampled_load(drifted(popularity, drift, generator), ranks, tokens, generator)
                more = {
                    _CLUSTERED: _clustered(before, cluster, slots, drift),
                    "quota, load known": plan_replicas(now, cluster, slots=slots),
                }
                for method, placement in (plans | more).items():
                    found[drift].setdefault(method, _Balance()).add(now, placement)
                _add_late(found[drift], now, plans["quota"], cluster)
        for drift in _DRIFT:
            case = f"E {experts}, {name} {imbalance:g}, drift {drift:g}"
            rows += [row for row in _rows("grid", case, found[drift], None) if row.unit == "mean"]
    return rows


def times(repeats: int, progress: Progress) -> list[Row]:
    """Milliseconds of one layer on 64 ranks, and of each of 32 layers planned together."""
    ranks, experts, rows = 64, 256, []
    cluster, generator = _cluster(ranks), np.random.default_rng(0)
    load = sampled_load(zipf_popularity(experts, ranks, 2.0, generator), ranks, 65536, generator)
    layers = np.stack([load] * 32)
    for slots in progress.track((1, 2, 4), description="time"):
        case, aims = f"E {experts}, EP {ranks}, {_slots(slots)}", (5.0, 1.0)
        for method in ("shadow", "prophet", "eplb", "quota"):
            figure = milliseconds(lambda m=method, s=slots: plan_replicas(load, cluster, slots=s, method=m), repeats)
            aim = aims[0] if method == "quota" and slots == 2 else None
            rows.append(Row("time", f"placement, {case}", method, figure, "ms", None, figure / aims[0], aim))
        figure = milliseconds(lambda s=slots: plan_replicas_layers(layers, cluster, slots=s), max(1, repeats // 8)) / 32
        rows.append(Row("time", f"placement, each of 32 layers, {case}", "quota", figure, "ms", None, figure / aims[0]))
        for name, window in _COSTS.items():
            plan = partial(plan_replicas, load, cluster, slots=slots, shape=_SHAPE, window=window)
            figure, aim = milliseconds(plan, repeats), aims[0] if slots <= 2 else None
            rows.append(Row("time", f"placement, {name}, {case}", "quota", figure, "ms", None, figure / aims[0], aim))
        placement = plan_replicas(load, cluster, slots=slots)
        splitter = Splitter(placement)
        aim = aims[1] if slots == 2 else None
        for name, split, promised in (
            ("split", lambda s=splitter: s(load), aim),
            ("split, tables of a new placement", lambda p=placement: Splitter(p), None),
        ):
            figure = milliseconds(split, repeats)
            rows.append(Row("time", f"{name}, {case}", "quota", figure, "ms", None, figure / aims[1], promised))
        if torch.cuda.is_available():
            figure = _on_gpu(placement, torch.from_numpy(load).cuda(), repeats)
            rows.append(Row("time", f"split on the GPU, {case}", "quota", figure, "ms", None, figure / aims[1]))
    return rows


def _on_gpu(placement: ReplicaPlacement, load: torch.Tensor, repeats: int) -> float:
    """Milliseconds of a split in a sequence of splits, the best of several: the longer of GPU and host time."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    (placed,) = place_all([SplitTables(placement, load.device)], load.device)
    placed.split(load)  # kernels are compiled
    figures = []
    for _ in range(repeats):
        begin.record()
        for _ in range(10):
            placed.split(load)
        end.record()
        end.synchronize()
        figures.append(begin.elapsed_time(end) / 10)
    return min(figures)


def _cluster(ranks: int) -> Cluster:
    return Cluster.sheet(_CLUSTER).relabel(-(-ranks // 8), min(8, ranks))


def _slots(number: int) -> str:
    return "1 slot" if number == 1 else f"{number} slots"


def _thin(items: Sequence, most: int) -> list:
    """At most `most` of the items, evenly spaced."""
    return list(items) if len(items) <= most else [items[int(at)] for at in np.linspace(0, len(items) - 1, most)]


def made_up_run(records: int) -> LoadTrace:
    """Four layers, from nearly balanced to very imbalanced, which drift by 1 % a micro-batch and 7 % a record."""
    generator, sources, experts = np.random.default_rng(0), 32, 64
    counts = np.zeros((records, sources, 4, 4, experts), dtype=np.int64)
    for layer, imbalance in enumerate((1.2, 1.6, 2.2, 3.2)):
        popularity = zipf_popularity(experts, 8, imbalance, generator)
        for record in range(records):
            for batch in range(4):
                counts[record, :, layer, batch] = sampled_load(popularity, sources, 8192, generator)
                popularity = drifted(popularity, 0.01, generator)
            popularity = drifted(popularity, 0.07, generator)
    return LoadTrace(counts, np.arange(records), np.arange(4))


def _show(rows: Sequence[Row], console: Console) -> None:
    for section in dict.fromkeys(row.section for row in rows):
        own = [row for row in rows if row.section == section]
        table = Table(title=section, title_justify="left", box=None, pad_edge=False)
        if section == "grid":
            _fill_grid(table, own)
        else:
            _fill(table, own)
        console.print(table, "")


def _fill(table: Table, rows: Sequence[Row]) -> None:
    by_case = {(row.case, row.method): {} for row in rows}
    for row in rows:
        by_case[row.case, row.method][row.unit] = row
    timed = rows[0].unit == "ms"
    heads = (
        ["ms", "/ limit"]
        if timed
        else ["mean", "p99", "/ none", "/ limit", "inside", "between", "weighted", "late", "MB", "RB / shadow"]
    )
    for head in ("case", "method", *heads, "target"):
        table.add_column(head, justify="left" if head in ("case", "method", "target") else "right", no_wrap=True)
    for (case, method), found in by_case.items():
        first = next(iter(found.values()))
        target = ", ".join(("met" if row.met else "MISSED") for row in found.values() if row.target is not None)
        if timed:
            table.add_row(case, method, f"{first.figure:.3f}", f"{first.to_limit:.3f}", target)
            continue
        rb = (
            f"{first.more['rb_over_shadow_least']:.1f}-{first.more['rb_over_shadow_most']:.1f}"
            if "rb_over_shadow_least" in first.more
            else ""
        )
        table.add_row(
            case,
            method,
            f"{first.figure:.4f}",
            f"{found['p99'].figure:.4f}",
            f"{first.to_none:.3f}",
            f"{first.to_limit:.4f}",
            *_links(first),
            *_late(first),
            rb,
            target,
        )


def _fill_grid(table: Table, rows: Sequence[Row]) -> None:
    """One line for each planner and imbalance, drift from left to right; its transfers where nothing drifts, and late
    ones at the last drift but one."""
    for head in (
        "E, imbalance",
        "method",
        *(f"drift {drift:g}" for drift in _DRIFT),
        "inside",
        "between",
        "weighted",
        "late",
        "MB",
    ):
        table.add_column(head, justify="left" if head in ("E, imbalance", "method") else "right", no_wrap=True)
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        lines.setdefault((row.case.rpartition(", drift")[0], row.method), []).append(row)
    for (case, method), own in lines.items():
        table.add_row(case, method, *(f"{row.figure:.3f}" for row in own), *_links(own[0]), *_late(own[-2]))


def _links(row: Row) -> tuple[str, str, str]:
    """Replicas inside nodes, between nodes, and both weighed."""
    inside, between = row.more["inside"], row.more["between"]
    return f"{inside:.1f}", f"{between:.1f}", f"{inside + BETWEEN * between:.0f}"


def _late(row: Row) -> tuple[str, str]:
    """Copies of a layer and micro-batch that are sent when the load is known, and their MB of weights."""
    return f"{row.more['late']:.1f}", f"{row.more['late_mb']:.0f}"


def _read(options: argparse.Namespace) -> LoadTrace:
    if options.trace is None:
        return made_up_run(6 if options.quick else 20)
    return read_load_trace(options.trace)


def _sizes(trace: LoadTrace) -> list[int]:
    """Expert-parallel sizes that the trace's experts and source ranks divide into."""
    sources, experts = trace.counts.shape[1], trace.counts.shape[-1]
    sizes = [size for size in (8, 16, 32) if experts % size == 0 and (sources % size == 0 or size % sources == 0)]
    if not sizes:
        raise ValueError(f"{experts} experts from {sources} source ranks fit none of 8, 16 or 32 expert-parallel ranks")
    return sizes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 1 if a target was missed, 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.experts.plans", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="fewer loads; under a minute")
    parser.add_argument("--trace", metavar="FILE", help="recorded loads, .npz")
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE")
    parser.add_argument("--workloads", action="store_true", help="only W0 to W7 (benchmarks.experts.workloads)")
    options = parser.parse_args(arguments)
    if options.workloads:
        print_workloads(8 if options.quick else 32)
        return 0
    load = os.getloadavg()[0]
    try:
        trace = _read(options)
        sizes = _sizes(trace)
        with Progress(console=Console(stderr=True), transient=True) as progress:
            rows = replay(trace, sizes, 100 if options.quick else 2400, progress)
            rows += grid(2 if options.quick else 6, progress)
            rows += times(10 if options.quick else 40, progress)
        if options.json:
            table = [asdict(row) | {"met": row.met} for row in rows]
            write_text(options.json, json.dumps({"load": load, "rows": table}, indent=1) + "\n")
    except (ValueError, OSError) as error:
        print(f"experts: {error}", file=sys.stderr)
        return 2
    print(f"{os.cpu_count()} cores, load {load:.1f} before the start; loads: {options.trace or 'made up'}\n")
    _show(rows, Console(width=max(140, Console().width)))
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
