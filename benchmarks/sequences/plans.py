"""Plans of `balancing.sequences` for realistic batches: balance, modelled time, traffic, and planning time.

    python -m benchmarks.sequences.plans [--quick] [--lengths FILE] [--ranks N ...] [--json FILE]

One micro-batch a step and 4k tokens a rank, Zeppelin's regime, on 16 to 128 ranks; batches of documents as long as
those of published training sets, or recorded lengths. Baselines: ring (Transformer Engine's p2p), all-gather (Llama 3's
and Megatron-LM's, in two levels) and a2a+p2p (Transformer Engine's hierarchical one), both of
`benchmarks.sequences.peers`, hybrid (Megatron-LM's own scheduler, its groups one after another as Megatron-LM runs
them).

- Balance: the fullest rank over the mean, in area of attention and in tokens; for hybrid summed over its groups.
- Model: modelled seconds of the step over the physical limit (`balancing.sequences.cost`), on A800 nodes with 4 NICs
  and a 7B model with multi-head attention, and on H200 nodes with 8 NICs and an 8B model with grouped queries.
  Baselines run without routing, as their systems do; zones and chunks with and without it, zones also without
  remapping. No plan with equal tokens is faster than "bound" (`benchmarks.sequences.bound`).
- Traffic: tokens whose keys and values a rank receives forward in a layer, and those that all network cards carry, as
  a share of all tokens of the batch.
- Time: of one plan, and of compiling it for one rank, routes included ("program"). Processor time of one thread, the
  quickest of several runs.

Each row has its ratio to ring and to the limit, which for balance and modelled time is 1. "all of these" are means over
the distributions. Nothing is trained here. Takes about 5 minutes on one core, with --quick
two. Exit code 1 if a row misses its target.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from balancing.cluster import Cluster
from balancing.files import write_text
from balancing.sequences import (
    AttentionShape,
    SequencePlan,
    causal_area,
    kv_traffic,
    limit_seconds,
    step_cost,
)
from balancing.sequences.engine.compiler import compile_rank
from balancing.sequences.traffic import plan_links
from benchmarks.baselines.sequences import hybrid_groups, plan_sequences
from benchmarks.processor_time import milliseconds
from benchmarks.sequences.bound import bound_seconds
from benchmarks.sequences.lengths import DISTRIBUTIONS, draw_batch
from benchmarks.sequences.peers import all_gather_seconds, heads_and_ring

__all__ = ["Row", "baseline_parts", "plans", "sources", "times"]

_TOKENS = 4096  # a rank
_METHODS = ("ring", "all-gather", "a2a+p2p", "hybrid", "zones", "chunks")
_OURS = ("zones", "chunks")
_LAYOUTS = {"all-gather": "ring", "a2a+p2p": "ring"}
_MACHINES: dict[str, tuple[str, AttentionShape]] = {
    "A800, MHA": ("a800-4x200g", AttentionShape(4096, 32, 32, 32, 11008)),
    "H200, GQA 8:1": ("h200-8x400g", AttentionShape(4096, 32, 4, 32, 14336)),
}
_BALANCE_ON = "A800, MHA"  # balance depends little on the machine
_AREA, _EVEN = "attention max / mean", "token max / mean in attention"
_TIME, _KV, _FAR = "modelled time / limit", "keys and values received / tokens", "tokens over network cards / tokens"
_SECTIONS = [_AREA, _EVEN, *(f"{what}, {machine}" for what in (_TIME, _KV, _FAR) for machine in _MACHINES)]


@dataclass(frozen=True)
class Row:
    """One measurement; less is better.

    section, case, method: of the table.
    figure: mean over batches, in `unit`.
    most: figure of the worst batch.
    to_ring, to_limit: the figure over that of ring, and over the least possible one.
    target: bound of `most`; None for none.
    """

    section: str
    case: str
    method: str
    figure: float
    unit: str
    most: float
    to_ring: float | None
    to_limit: float
    target: float | None = None

    @property
    def met(self) -> bool:
        return self.target is None or self.most <= self.target + 1e-9


class _Found(dict[str, dict[str, list[float]]]):
    """Figures by section, then by method, one for each batch."""

    def add(self, section: str, method: str, figure: float) -> None:
        self.setdefault(section, {}).setdefault(method, []).append(figure)


def plans(sources: dict[str, str | np.ndarray], sizes: Sequence[int], batches: int, progress: Progress) -> list[Row]:
    """Balance, traffic and modelled seconds of every method."""
    rows: list[Row] = []
    overall: dict[int, _Found] = {ranks: _Found() for ranks in sizes}
    cells = [(name, ranks) for ranks in sizes for name in sources]
    for name, ranks in progress.track(cells, description="plans"):
        found = _Found()
        for batch in range(batches):
            lengths = draw_batch(sources[name], _TOKENS * ranks, np.random.default_rng(batch))
            kept: dict[str, list[SequencePlan]] = {}
            for machine, (preset, shape) in _MACHINES.items():
                cluster = Cluster.sheet(preset, nodes=ranks // 8)
                for method in _METHODS:
                    _measure(method, lengths, machine, cluster, shape, found, kept)
                least = bound_seconds(lengths, cluster, shape) / limit_seconds(lengths, cluster, shape)
                found.add(f"{_TIME}, {machine}", "bound", least)
        rows += _rows(f"{name}, {ranks} ranks", found)
        for section, by_method in found.items():
            for method, figures in by_method.items():
                overall[ranks].add(section, method, float(np.mean(figures)))
    for ranks, found in overall.items():
        rows += _rows(f"all of these, {ranks} ranks", found, overall=True)
    return sorted(rows, key=lambda row: _SECTIONS.index(row.section))


def _measure(
    method: str,
    lengths: Sequence[int],
    machine: str,
    cluster: Cluster,
    shape: AttentionShape,
    found: _Found,
    kept: dict[str, list[SequencePlan]],
) -> None:
    """Plan one batch for one machine. A step runs its parts one after another; all methods but hybrid have one part.

    method: of `_METHODS`.
    lengths: tokens of each sequence.
    machine: name of the machine and model, with its cluster and shape.
    found: figures are added to it.
    kept: plans of baselines, which are the same for every machine.
    """
    name = _LAYOUTS.get(method, method)
    if method in _OURS:
        parts = [plan_sequences(lengths, cluster, shape=shape, method=method)]
    else:
        if name not in kept:
            kept[name] = baseline_parts(name, lengths, cluster, shape)
        parts = kept[name]
    if method == "a2a+p2p":
        both, tokens = heads_and_ring(lengths, cluster, shape), sum(lengths)
        found.add(f"{_FAR}, {machine}", method, plan_links(both.plan, both.cluster).between()[1] / tokens)
        found.add(f"{_TIME}, {machine}", method, both.seconds(shape) / limit_seconds(lengths, cluster, shape))
        return
    if not parts:
        return  # upstream's scheduler fails on some batches; the others count
    mean, limit = causal_area(lengths) / cluster.world_size, limit_seconds(lengths, cluster, shape)
    if machine == _BALANCE_ON:
        found.add(_AREA, method, sum(int(plan.area.max()) for plan in parts) / mean)
        found.add(_EVEN, method, sum(int(plan.tokens.max()) for plan in parts) / _TOKENS)
    received = sum(sum(kv_traffic(plan).between(cluster)) for plan in parts)
    found.add(f"{_KV}, {machine}", method, received / cluster.world_size / sum(lengths))
    if method == "all-gather":
        found.add(f"{_FAR}, {machine}", method, cluster.nodes - 1.0)
        found.add(f"{_TIME}, {machine}", method, all_gather_seconds(lengths, cluster, shape, parts[0]) / limit)
        return
    far = sum(plan_links(plan, cluster).between()[1] for plan in parts) / sum(lengths)
    found.add(f"{_FAR}, {machine}", method, far)

    def model(name: str, routed: bool | None = None, remapped: bool = True) -> None:
        width = None if method in _OURS else 1.0  # baselines send gradients in bf16
        costs = (
            step_cost(plan, cluster, shape, routed=routed, remapped=remapped, gradient_width=width) for plan in parts
        )
        seconds = sum(cost.total for cost in costs)
        found.add(f"{_TIME}, {machine}", method + name, seconds / limit)

    model("", routed=None if method in _OURS else False)
    if method == "zones":
        model(", not routed", routed=False)
        model(", not remapped", remapped=False)
    if method == "chunks":
        model(", not routed", routed=False)


def baseline_parts(method: str, lengths: Sequence[int], cluster: Cluster, shape: AttentionShape) -> list[SequencePlan]:
    """One plan; for hybrid one for each of Megatron-LM's groups, which run one after another with a barrier after each,
    without remapping, and none where its scheduler fails."""
    if method != "hybrid":
        return [plan_sequences(lengths, cluster, shape=shape, method=method)]
    most = -(-sum(lengths) // cluster.world_size)
    parts: list[SequencePlan] = []
    try:
        groups = hybrid_groups(lengths, cluster.world_size, most)
    except ValueError:
        return parts
    for group in groups:
        batch = [lengths[sequence] for sequence in sorted(group)]
        planned = _Planned([group[sequence] for sequence in sorted(group)], cluster.world_size)
        plan = plan_sequences(
            batch, cluster, shape=shape, method="hybrid", token_capacity=most, scheduler=lambda *_, own=planned: own
        )
        parts.append(replace(plan, linear=plan.attention))
    return parts


class _Planned:
    """A scheduler with a given result: one group. ranks: of each sequence."""

    def __init__(self, ranks: Sequence[tuple[int, ...]], world_size: int) -> None:
        self._by_rank = [
            [sequence for sequence, held in enumerate(ranks) if rank in held] for rank in range(world_size)
        ]

    def get_groups_and_subsamples(self, lengths: object, config: object) -> tuple[None, list[list[list[int]]]]:
        return None, [self._by_rank]


def _rows(case: str, found: _Found, *, overall: bool = False) -> Iterator[Row]:
    for section, by_method in found.items():
        ring = float(np.mean(by_method["ring"]))
        for method, figures in by_method.items():
            target = {(_AREA, "chunks"): 1.02, (_EVEN, "chunks"): 1.0, (_AREA, "zones"): 1.20}.get((section, method))
            if overall and section.startswith(_KV) and method == "chunks":
                target = ring / 2
            most, figure = max(figures), float(np.mean(figures))
            if overall:
                most = figure
            yield Row(section, case, method, figure, "ratio", most, figure / ring if ring else None, figure, target)


def times(repeats: int, progress: Progress) -> list[Row]:
    """Milliseconds of a plan of 4k tokens a rank, on the machine whose plans take longer."""
    rows = []
    preset, shape = _MACHINES[_BALANCE_ON]
    cells = [(ranks, source) for ranks in (64, 1024) for source in DISTRIBUTIONS]
    for ranks, source in progress.track(cells, description="time"):
        lengths = draw_batch(source, _TOKENS * ranks, np.random.default_rng(0))
        cluster, aim = Cluster.sheet(preset, nodes=ranks // 8), 20.0 if ranks == 64 else 100.0
        for method in _OURS:
            plan = partial(plan_sequences, lengths, cluster, shape=shape, method=method)
            figure = milliseconds(plan, repeats)
            case = f"{source}, {ranks} ranks, {len(lengths)} sequences"
            rows.append(Row("planner ms", case, method, figure, "ms", figure, None, figure / aim, aim))
            figure = milliseconds(partial(compile_rank, plan(), ranks // 2), max(1, repeats // 3))
            rows.append(Row("planner ms", case, f"{method}: program", figure, "ms", figure, None, figure / aim, None))
    return rows


def _show(rows: Sequence[Row], console: Console) -> None:
    """A table a section: a line a case, a column a method, the mean and, in balance, the worst batch."""
    for section in dict.fromkeys(row.section for row in rows):
        own = [row for row in rows if row.section == section]
        methods = list(dict.fromkeys(row.method for row in own))
        table = Table(title=section, title_justify="left", box=None, pad_edge=False)
        for head in ("case", *methods, "target"):
            table.add_column(head, justify="left" if head in ("case", "target") else "right", no_wrap=True)
        digits = 1 if section == "planner ms" else 3
        for case in dict.fromkeys(row.case for row in own):
            line = {row.method: row for row in own if row.case == case}
            cells = []
            for method in methods:
                row = line.get(method)
                worst = row is not None and section in (_AREA, _EVEN) and not case.startswith("all")
                cells.append(
                    "" if row is None else f"{row.figure:.{digits}f}" + (f" ({row.most:.3f})" if worst else "")
                )
            promised = [row for row in line.values() if row.target is not None]
            table.add_row(case, *cells, ", ".join("met" if row.met else f"{row.method} MISSED" for row in promised))
        console.print(table, "")


def sources(path: str | None) -> dict[str, str | np.ndarray]:
    """The distributions, and recorded lengths first: every array of an .npz file, or one length a line."""
    found: dict[str, str | np.ndarray] = {}
    if path is not None and path.endswith(".npz"):
        with np.load(path) as arrays:
            found = {f"recorded {name}": arrays[name] for name in arrays}
    elif path is not None:
        try:
            found = {"recorded": np.array([int(line) for line in Path(path).read_text().split()], dtype=np.int64)}
        except ValueError as error:
            raise ValueError(
                f"--lengths {path} must be an .npz file or text with one whole number a line: {error}"
            ) from error
    for name, lengths in found.items():
        if not isinstance(lengths, str) and (lengths.ndim != 1 or not len(lengths) or lengths.min() < 1):
            raise ValueError(f"--lengths {path}: {name} must be a list of lengths of at least 1 token")
    return found | {name: name for name in DISTRIBUTIONS}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 1 if a target was missed, 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sequences.plans", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="fewer batches and sizes; about a minute")
    parser.add_argument("--lengths", metavar="FILE", help="recorded lengths: .npz, or text with one per line")
    parser.add_argument(
        "--ranks", type=int, nargs="+", metavar="N", help="numbers of ranks, multiples of 8 (default 16 32 64 128)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE")
    options = parser.parse_args(arguments)
    load = os.getloadavg()[0]
    try:
        known = sources(options.lengths)
        sizes = options.ranks or ((16, 64) if options.quick else (16, 32, 64, 128))
        if wrong := [ranks for ranks in sizes if ranks < 8 or ranks % 8]:
            raise ValueError(f"--ranks {wrong[0]} does not fill nodes of 8 ranks; give multiples of 8")
        with Progress(console=Console(stderr=True), transient=True) as progress:
            rows = plans(known, sizes, 1 if options.quick else 2, progress)
            rows += times(5 if options.quick else 10, progress)
        if options.json:
            table = [asdict(row) | {"met": row.met} for row in rows]
            write_text(options.json, json.dumps({"load": load, "rows": table}, indent=1) + "\n")
    except (ValueError, OSError) as error:
        print(f"sequences: {error}", file=sys.stderr)
        return 2
    print(f"{os.cpu_count()} cores, load {load:.1f} before the start; lengths: {options.lengths or 'made up'}\n")
    _show(rows, Console(width=max(160, Console().width)))
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
