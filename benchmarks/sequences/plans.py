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
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

from balancing.cluster import Cluster
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
from benchmarks.command import Row, exit_code, load_before, parser, show_methods, write_rows
from benchmarks.processor_time import milliseconds
from benchmarks.sequences.bound import bound_seconds
from benchmarks.sequences.lengths import DISTRIBUTIONS, draw_batch
from benchmarks.sequences.peers import all_gather_seconds, heads_and_ring

__all__ = ["baseline_parts", "plans", "sources", "times"]

_TOKENS = 4096  # a rank
_METHODS = ("ring", "all-gather", "a2a+p2p", "hybrid", "zones", "chunks")
_OURS = ("zones", "chunks")
_LAYOUTS = {"all-gather": "ring", "a2a+p2p": "ring"}
_MACHINES: dict[str, tuple[str, AttentionShape]] = {
    "A800, MHA": ("a800-4x200g", AttentionShape(4096, 32, 32, 32, 11008)),
    "H200, GQA 8:1": ("h200-8x400g", AttentionShape(4096, 32, 4, 32, 14336)),
}
_BALANCE_ON = "A800, MHA"  # balance depends little on the machine
_PLANNER = "planner ms"
_AREA, _EVEN = "attention max / mean", "token max / mean in attention"
_TIME, _KV, _FAR = "modelled time / limit", "keys and values received / tokens", "tokens over network cards / tokens"
_SECTIONS = [_AREA, _EVEN, *(f"{what}, {machine}" for what in (_TIME, _KV, _FAR) for machine in _MACHINES)]


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
            yield Row(section, case, method, figure, figure / ring if ring else None, figure, target, most)


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
            rows.append(Row(_PLANNER, case, method, figure, None, figure / aim, aim))
            figure = milliseconds(partial(compile_rank, plan(), ranks // 2), max(1, repeats // 3))
            rows.append(Row(_PLANNER, case, f"{method}: program", figure, None, figure / aim))
    return rows


def _shows_worst(row: Row) -> bool:
    return row.section in (_AREA, _EVEN) and not row.case.startswith("all")


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
    options_of = parser("sequences.plans", __doc__, "fewer batches and sizes; about two minutes")
    options_of.add_argument("--lengths", metavar="FILE", help="recorded lengths: .npz, or text with one per line")
    options_of.add_argument(
        "--ranks", type=int, nargs="+", metavar="N", help="numbers of ranks, multiples of 8 (default 16 32 64 128)"
    )
    options = options_of.parse_args(arguments)
    return exit_code("sequences", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    load, known = load_before(), sources(options.lengths)
    sizes = options.ranks or ((16, 64) if options.quick else (16, 32, 64, 128))
    if wrong := [ranks for ranks in sizes if ranks < 8 or ranks % 8]:
        raise ValueError(f"--ranks {wrong[0]} does not fill nodes of 8 ranks; give multiples of 8")
    with Progress(console=Console(stderr=True), transient=True) as progress:
        rows = plans(known, sizes, 1 if options.quick else 2, progress)
        rows += times(5 if options.quick else 10, progress)
    write_rows(options.json, rows, "met", load=load)
    print(f"{load}; lengths: {options.lengths or 'made up'}\n")
    show_methods(rows, lambda section: 1 if section == _PLANNER else 3, _shows_worst)
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
