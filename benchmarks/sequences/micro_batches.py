"""Documents distributed over the micro-batches of a step: balance, memory, pipeline step and planning time.

    python -m benchmarks.sequences.micro_batches [--quick] [--emulated] [--lengths FILE] [--sources NAME ...]

Steps of 8 to 64 micro-batches, samples of 32k tokens packed from documents as long as those of published training sets,
or from recorded lengths; an 8B model with grouped queries on H200 nodes. A micro-batch is one sample on 8 ranks ("1
sample": one data-parallel replica) or eight on 64 ("8 samples": replicas share their micro-batches). Only drawn and our
methods keep a limit of tokens, 1.25 times the mean. Methods:

- drawn: as Megatron-LM packs documents.
- sorted: by length, assigned in turn.
- differencing: Karmarkar-Karp on squares of lengths, as verl does.
- hybrid: Megatron-LM's scheduler of hybrid context parallelism, with a micro-batch in the place of each rank.
- whole: ours if documents of a sample must stay together: samples are distributed, the same number each.
- balanced: ours, equal micro-batches.
- slopes: ours, as in training: cheap micro-batches in the warm-up and cool-down of the pipeline. Balance and tokens are
  those for one chunk a stage.

Columns:

- Balance: the most expensive micro-batch over the mean, worst of several steps. "bound" is the least that is possible
  without cutting documents; the ratio to the limit is to it.
- Tokens: the fullest micro-batch over the mean, which is memory.
- Modelled exchange: as balance, of whole modelled micro-batches planned over their ranks, transfers included.
- Pipeline: a step of Megatron's 1F1B on 4 stages over that of equal micro-batches, simulated; with 2 chunks, too.
- Emulated (--emulated): the same step measured on 4 emulated ranks, the median of several turns.
- Time: CPU time of one thread to distribute 16,384 documents.

Nothing is trained here. Takes about a minute on one core, with --emulated four. Exit code 1 if a row misses its target.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from rich.console import Console
from rich.progress import Progress

from balancing.cluster import Cluster
from balancing.pipeline import simulate_schedule
from balancing.sequences import (
    AttentionShape,
    MicroBatchPlan,
    deal_whole,
    plan_micro_batches,
    plan_sequences,
    step_cost,
)
from balancing.sequences.cost import linear_seconds
from balancing.sequences.micro_batches import document_seconds
from benchmarks.baselines import micro_batches as baselines
from benchmarks.command import Row, exit_code, load_before, parser, show_methods, write_rows
from benchmarks.emulated import EmulatedCluster
from benchmarks.emulated.paced import run_pipelines
from benchmarks.processor_time import milliseconds
from benchmarks.sequences.lengths import DISTRIBUTIONS, draw_batch, draw_lengths
from benchmarks.sequences.plans import sources

__all__ = ["main"]

_SHAPE, _PRESET = AttentionShape(4096, 32, 8, 32, 14336), "h200-8x400g"
_SAMPLE, _RANKS = 32768, 8  # tokens of a sample, ranks of a replica
_METHODS = ("drawn", "sorted", "differencing", "hybrid", "balanced", "whole", "slopes")
_EMULATED_METHODS = ("drawn", "sorted", "differencing", "balanced", "whole", "slopes")
_STAGES = 4
_BALANCE, _TOKENS, _EXCHANGE = "cost max / mean", "tokens max / mean", "modelled with exchange, max / mean"
_PIPELINE, _EMULATED, _TIME = "step / equal micro-batches, simulated", "step / equal micro-batches, emulated", "ms"
_LARGEST_HYBRID = 16  # micro-batches
_STEP_SECONDS = 3.0  # of an emulated step of equal micro-batches


@dataclass(frozen=True)
class _Step:
    """Documents of a step: their lengths, and the sample and the micro-batch in which each was drawn."""

    lengths: tuple[int, ...]
    sample: tuple[int, ...]
    drawn: tuple[int, ...]
    micro_batches: int
    cluster: Cluster

    @classmethod
    def of(cls, source: str | np.ndarray, micro_batches: int, samples: int, seed: int) -> "_Step":
        generator = np.random.default_rng(seed)
        packed = [draw_batch(source, _SAMPLE, generator) for _ in range(micro_batches * samples)]
        sample = tuple(at for at, lengths in enumerate(packed) for _ in lengths)
        drawn = tuple(at // samples for at in sample)
        cluster = Cluster.sheet(_PRESET).relabel(samples, _RANKS)
        return cls(tuple(length for lengths in packed for length in lengths), sample, drawn, micro_batches, cluster)

    def plan(self, method: str, chunks: int = 1) -> MicroBatchPlan:
        """Raises ValueError where Megatron-LM's scheduler fails. chunks: of a pipeline stage."""
        own = partial(plan_micro_batches, self.lengths, self.micro_batches, self.cluster, shape=_SHAPE)
        quickest = partial(_of_costs, chunks=chunks)
        if method == "slopes":
            return own(drawn=self.drawn, step=quickest)
        if method == "balanced":
            return own(drawn=self.drawn)
        seconds, deal = tuple(document_seconds(self.lengths, self.cluster, _SHAPE).tolist()), self.drawn
        if method in ("sorted", "differencing", "hybrid"):
            deal = tuple(baselines.deal(self.lengths, self.micro_batches, method).tolist())
        if method == "whole":
            of_samples = np.bincount(self.sample, seconds)
            deal = tuple(deal_whole(of_samples, self.micro_batches, quickest)[list(self.sample)].tolist())
        return MicroBatchPlan(self.lengths, seconds, deal, self.micro_batches, method)

    def passes(self, plan: MicroBatchPlan) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of the forward and the backward pass of each micro-batch through all layers, float64 [micro-batch]:
        a third of linear layers' work is forward, and one in three and a half of attention's."""
        linear = np.array([linear_seconds(int(tokens), self.cluster, _SHAPE) for tokens in plan.tokens])
        linear /= self.cluster.world_size
        forward = linear / 3 + (plan.cost - linear) / 3.5
        return forward, plan.cost - forward


def _pipeline(forward: np.ndarray, backward: np.ndarray, chunks: int) -> float:
    stages = [np.broadcast_to(each / _STAGES / chunks, (_STAGES, chunks, len(each))) for each in (forward, backward)]
    return simulate_schedule(*stages, len(forward)).step_time


def _of_costs(costs: np.ndarray, chunks: int) -> float:
    """As `_pipeline`, where linear layers' and attention's part of a micro-batch are not told apart."""
    return _pipeline(0.32 * costs, 0.68 * costs, chunks)


def _plans(known: dict[str, str | np.ndarray], quick: bool, progress: Progress) -> Iterator[Row]:
    cells = [(name, samples, size) for name in known for samples in (1, 8) for size in ((8,) if quick else (8, 16, 64))]
    for name, samples, size in progress.track(cells, description="plans"):
        found: dict[str, dict[str, list[float]]] = {}
        bound = 1.0
        for seed in range(2):
            step = _Step.of(known[name], size, samples, seed)
            for method in _METHODS:
                if method == "hybrid" and size > _LARGEST_HYBRID:
                    continue  # it would take minutes
                try:
                    plan = step.plan(method)
                except ValueError:
                    continue  # upstream's scheduler fails on some steps
                passes = step.passes(plan)
                equal = [np.full(size, each.mean()) for each in passes]
                figures = {
                    _BALANCE: plan.imbalance,
                    _TOKENS: float(plan.tokens.max() / plan.tokens.mean()),
                }
                for chunks in (1, 2):
                    section = _PIPELINE if chunks == 1 else f"{_PIPELINE}, 2 chunks"
                    if chunks > 1:
                        passes = step.passes(step.plan(method, chunks))
                    figures[section] = _pipeline(*passes, chunks) / _pipeline(*equal, chunks)
                if method in ("drawn", "balanced") and not seed and size == 8:
                    figures[_EXCHANGE] = _with_exchange(step, plan)
                for section, figure in figures.items():
                    found.setdefault(section, {}).setdefault(method, []).append(figure)
                bound = max(bound, least_imbalance(plan.seconds, size))
        case = f"{name}, {samples} sample{'s' if samples > 1 else ''}, {size} micro-batches"
        for section, by_method in found.items():
            drawn = max(by_method["drawn"])
            for method, each in by_method.items():
                yield Row(
                    section, case, method, max(each), max(each) / drawn, *_limits(section, method, max(each), bound)
                )
        yield Row(_BALANCE, case, "bound", bound, None, 1.0)


def _limits(section: str, method: str, figure: float, bound: float) -> tuple[float, float | None]:
    """The figure over the limit, and the target: where documents forbid even cost, of balance over what they forbid."""
    limit = bound if section == _BALANCE else 1.0
    targets = {_BALANCE: 1.05 * bound, _TOKENS: 1.25}
    if bound <= 1.0 + 1e-9:
        targets[_PIPELINE] = 1.03
    aims = {_BALANCE: ("balanced",), _PIPELINE: ("balanced", "slopes")}.get(section, ("balanced", "whole", "slopes"))
    return figure / limit, targets.get(section) if method in aims else None


def least_imbalance(seconds: Sequence[float] | np.ndarray, micro_batches: int) -> float:
    """A lower bound of the imbalance of every deal of whole documents: 1 where they do not forbid an even one.

    seconds: of each document. The most expensive one is in some micro-batch, and some micro-batch of n has k + 1 of the
    k n + 1 most expensive ones. Memory may forbid more.
    """
    ordered = np.sort(np.asarray(seconds, dtype=np.float64))[::-1]
    before = np.concatenate([[0.0], np.cumsum(ordered)])
    mean, most = before[-1] / micro_batches, 0.0
    for first in range(0, len(ordered), micro_batches):  # the k + 1 cheapest of the `first + 1` most expensive ones
        together = first // micro_batches + 1
        most = max(most, before[first + 1] - before[first + 1 - together])
    return max(1.0, float(most / mean))


def _with_exchange(step: _Step, plan: MicroBatchPlan) -> float:
    """Max / mean of modelled micro-batches, each planned over its ranks."""
    totals = []
    for at in range(plan.micro_batches):
        own = [length for length, number in zip(step.lengths, plan.micro_batch, strict=True) if number == at]
        planned = plan_sequences(own, step.cluster, shape=_SHAPE)
        totals.append(step_cost(planned, step.cluster, _SHAPE).total)
    return max(totals) / float(np.mean(totals))


def _times(repeats: int, progress: Progress) -> Iterator[Row]:
    for source in progress.track(DISTRIBUTIONS, description="time"):
        lengths = np.minimum(draw_lengths(source, 16384, np.random.default_rng(0)), 131072)
        for size in (8, 64, 512):
            plan = partial(plan_micro_batches, lengths, size, Cluster.sheet(_PRESET), shape=_SHAPE)
            figure = milliseconds(plan, repeats)
            yield Row(_TIME, f"{source}, 16384 documents, {size} micro-batches", "balanced", figure, None, figure)


def _emulated(known: dict[str, str | np.ndarray], quick: bool) -> Iterator[Row]:
    """Each step in turns with the others, so that all see the same machine."""
    size, turns = 8 if quick else 16, 1 if quick else 3
    for name, source in known.items():
        step = _Step.of(source, size, 8, 0)
        passes = {method: step.passes(step.plan(method)) for method in _EMULATED_METHODS}
        passes["equal"] = tuple(np.full(size, each.mean()) for each in passes["balanced"])  # type: ignore[assignment]
        slower = _STEP_SECONDS / _pipeline(*passes["equal"], 1)
        pipelines = []
        for _ in range(turns):
            for each in passes.values():
                stages = [np.broadcast_to(one * slower / _STAGES, (_STAGES, 1, size)).tolist() for one in each]
                pipelines.append({"forward": stages[0], "backward": stages[1], "micro_batches": size})
        with EmulatedCluster(1, _STAGES) as cluster:
            seconds = np.array(run_pipelines(cluster, pipelines)).reshape(turns, len(passes))
        ratios = np.median(seconds / seconds[:, -1:], axis=0)
        forbidden = least_imbalance(step.plan("balanced").seconds, size) > 1
        for method, ratio in zip(passes, ratios.tolist(), strict=True):
            target = 1.03 if method in ("balanced", "slopes") and not forbidden else None
            case = f"{name}, 8 samples, {size} micro-batches"
            yield Row(_EMULATED, case, method, ratio, ratio / float(ratios[0]), ratio, target)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 1 if a target was missed, 2 for bad input."""
    options_of = parser("sequences.micro_batches", __doc__, "fewer steps, 8 micro-batches alone")
    options_of.add_argument("--emulated", action="store_true", help="also measure steps on 4 emulated pipeline stages")
    options_of.add_argument("--lengths", metavar="FILE", help="recorded lengths: .npz, or text with one per line")
    options_of.add_argument("--sources", nargs="+", metavar="NAME", help="only these distributions")
    options = options_of.parse_args(arguments)
    return exit_code("micro_batches", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    load, known = load_before(), sources(options.lengths)
    if unknown := set(options.sources or ()) - set(known):
        raise ValueError(f"--sources {sorted(unknown)[0]} is none of {', '.join(known)}")
    known = {name: source for name, source in known.items() if not options.sources or name in options.sources}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        rows = [*_plans(known, options.quick, progress)]
        rows += [] if options.quick else _times(3, progress)
    if options.emulated:
        rows += _emulated(known, options.quick)
    write_rows(options.json, rows, "met", load=load)
    print(f"{load}; lengths: {options.lengths or 'made up'}\n")
    sections = list(dict.fromkeys(row.section for row in rows))
    rows.sort(key=lambda row: sections.index(row.section))
    show_methods(rows, lambda section: 1 if section == _TIME else 3, lambda row: False)
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
