"""Whole sequences of fine-tuning and reinforcement learning over data-parallel ranks, compared with verl and slime.

    python -m benchmarks.sequences.data_parallel [--quick] [--json FILE]

A step has whole sequences of different lengths, 8 or 32 data-parallel ranks without context parallelism, and a limit of
tokens for a micro-batch on a rank, which is the longest possible sequence. An 8B model with grouped queries on nodes of
8 H200. Methods: drawn, verl and slime (`benchmarks/baselines/data_parallel.py` says what each does). Ours keep the
limit: ranks first (`plan_micro_batches` over ranks, then of each rank over its micro-batches) and balanced
(`plan_micro_batches` over ranks and micro-batches alike). "+ attention" also balances attention, as `SequenceBalancer`
does; tokens stay on their ranks.

- Tokens: the fullest micro-batch of a rank over the limit. Above 1 the loop exceeds its own limit of memory.
- Area: query-key pairs of the rank with most of a micro-batch over the mean of its ranks, averaged by pairs.
- Step: modelled seconds over those of the same work spread evenly, which is the limit. "apart": ranks of a dense model
  meet once a step. "together": they meet in each micro-batch, as expert parallelism, a pipeline and shared attention
  have it; transfers of attention are included.

Nothing is trained here. Takes a quarter of a minute on one core. Exit code 1 if a row misses its target.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from balancing.cluster import Cluster
from balancing.sequences import AttentionShape, SequencePlan, plan_micro_batches, step_cost
from balancing.sequences.micro_batches import document_seconds
from balancing.sequences.plan import plan_attention
from benchmarks.baselines.data_parallel import DEALS, Dealt, as_drawn, deal
from benchmarks.command import Row, exit_code, load_before, parser, show_methods, write_rows
from benchmarks.sequences.lengths import draw_lengths

__all__ = ["main"]

_SHAPE, _PRESET = AttentionShape(4096, 32, 8, 32, 14336), "h200-8x400g"
_SEQUENCES = 16  # of a rank and step


def _within(points: Sequence[tuple[float, float]]) -> Callable[[int, np.random.Generator], np.ndarray]:
    """Lengths between the points of a table of (percentile, tokens), log-uniform between two of them."""
    percent, tokens = np.array(points).T
    return lambda number, draw: np.exp(np.interp(draw.random(number) * 100, percent, np.log(tokens)))


def _responses(median: float, sigma: float) -> Callable[[int, np.random.Generator], np.ndarray]:
    """Log-normal lengths, the shape that rollouts have."""
    return lambda number, draw: median * np.exp(sigma * draw.normal(size=number))


# Name -> most tokens of a sequence, and lengths.
# SFT. llama3: of Llama 3's data 99.89 % have under 1k tokens on average and 0.11 % 37k (arXiv 2407.21783). longalign:
# 10k instructions of 8k to 64k tokens (arXiv 2401.18058). prolong mix: 60 % of tokens in sequences of 64k.
# RL. Of rollouts, limits of length are published, and that most are far shorter; percentiles are not. math: limit of
# DeepScaleR's first and verl's usual runs, 16k. reasoning: the limit of Moonlight in Seer (arXiv 2511.14617), 64k.
SOURCES: dict[str, tuple[int, Callable[[int, np.random.Generator], np.ndarray]]] = {
    "SFT llama3": (65536, _within([(0, 100), (50, 600), (99.89, 4096), (99.9, 20000), (100, 65536)])),
    "SFT longalign": (65536, _within([(0, 8192), (100, 65536)])),
    "SFT prolong mix": (65536, lambda number, draw: draw_lengths("mix", number, draw)),
    "RL math": (16384, _responses(2000, 0.8)),
    "RL reasoning": (65536, _responses(8000, 1.0)),
}
_METHODS = (*DEALS, "ranks first", "balanced")
_TOKENS, _AREA, _APART, _TOGETHER = "tokens / limit", "area max / mean", "step, apart", "step, together"


def _balanced(lengths: np.ndarray, ranks: int, limit: int, alone: Cluster) -> Dealt:
    """Ranks and micro-batches of equal cost and no more tokens than the limit, as few as possible."""
    number = -(-int(lengths.sum()) // (ranks * limit))
    while True:
        try:
            cells = plan_micro_batches(lengths, ranks * number, alone, shape=_SHAPE, token_capacity=limit)
            break
        except ValueError:  # they do not fit
            number += 1
    order = np.argsort(-cells.cost, kind="stable").reshape(number, ranks)  # neighbours meet in a micro-batch
    rank_of, micro_batch_of, spent = np.zeros(order.size, int), np.zeros(order.size, int), np.zeros(ranks)
    for micro_batch, own in enumerate(order):
        to = np.argsort(spent, kind="stable")  # the dearest goes to the rank that has least
        rank_of[own], micro_batch_of[own] = to, micro_batch
        spent[to] += cells.cost[own]
    cell = np.array(cells.micro_batch)
    return Dealt(rank_of[cell], micro_batch_of[cell], number)


def _ranks_first(lengths: np.ndarray, ranks: int, limit: int, alone: Cluster) -> Dealt:
    """Ranks of equal cost, and of each the micro-batches of equal cost and no more tokens than the limit."""
    number = -(-int(lengths.sum()) // (ranks * limit))
    while True:
        try:
            over = plan_micro_batches(lengths, ranks, alone, shape=_SHAPE, token_capacity=number * limit)
            rank, micro_batch = np.array(over.micro_batch), np.zeros(len(lengths), dtype=np.int64)
            for each in range(ranks):
                own = np.flatnonzero(rank == each)
                several = min(number, len(own))
                plan = plan_micro_batches(lengths[own], several, alone, shape=_SHAPE, token_capacity=limit)
                place = np.argsort(np.argsort(-plan.cost, kind="stable"))  # the dearest of all ranks meet
                micro_batch[own] = place[list(plan.micro_batch)]
            return Dealt(rank, micro_batch, number)
        except ValueError:  # they do not fit
            number += 1


def _deal(lengths: np.ndarray, ranks: int, limit: int, method: str, alone: Cluster) -> Dealt:
    own = {"ranks first": _ranks_first, "balanced": _balanced}
    return own[method](lengths, ranks, limit, alone) if method in own else deal(lengths, ranks, limit, method)


def _of_cells(values: np.ndarray, dealt: Dealt, ranks: int) -> np.ndarray:
    """The sums of `values` [sequence] by micro-batch and rank."""
    flat = np.bincount(dealt.micro_batch * ranks + dealt.rank, values, dealt.micro_batches * ranks)
    return flat.reshape(dealt.micro_batches, ranks)


def _own(lengths: np.ndarray, dealt: Dealt, at: int, ranks: int) -> tuple[tuple[int, ...], ...]:
    """The sequences of each rank in micro-batch `at`."""
    chosen = [lengths[(dealt.micro_batch == at) & (dealt.rank == rank)] for rank in range(ranks)]
    return tuple(tuple(int(length) for length in of_rank) for of_rank in chosen)


def _plans(own: tuple[tuple[int, ...], ...], cluster: Cluster) -> tuple[SequencePlan, SequencePlan]:
    """Of a micro-batch: each rank computes its own attention, and what `SequenceBalancer` plans."""
    alone = as_drawn(own)
    return alone, plan_attention(alone.lengths, alone.linear, cluster, shape=_SHAPE)


def _areas(plan: SequencePlan, ranks: int) -> np.ndarray:
    """Query-key pairs of each rank."""
    area = np.zeros(ranks)
    for shard in plan.attention:
        area[shard.rank] += (shard.stop * (shard.stop + 1) - shard.start * (shard.start + 1)) / 2
    return area


def _spread(areas: Sequence[np.ndarray]) -> float:
    """Of several micro-batches, the area of the fullest rank over the mean."""
    return float(sum(each.max() for each in areas) / sum(each.mean() for each in areas))


def _figures(
    lengths: np.ndarray, dealt: Dealt, ranks: int, limit: int, cluster: Cluster
) -> dict[str, dict[str, float]]:
    """Of a deal as it is, and with balanced attention: section -> figure."""
    each = document_seconds(lengths, cluster.relabel(1, 1), _SHAPE)
    even, tokens = float(each.sum()) / ranks, float(_of_cells(lengths, dealt, ranks).max() / limit)
    together: list[list[SequencePlan]] = [[], []]
    for at in range(dealt.micro_batches):
        own = _own(lengths, dealt, at, ranks)
        for plans, plan in zip(together, _plans(own, cluster) if any(own) else (), strict=False):
            plans.append(plan)
    found = [
        {
            _TOKENS: tokens,
            _AREA: _spread([_areas(plan, ranks) for plan in plans]),
            _TOGETHER: sum(step_cost(plan, cluster, _SHAPE).total for plan in plans) / even,
        }
        for plans in together
    ]
    apart = {_APART: float(_of_cells(each, dealt, ranks).sum(0).max() / even)}
    return {"": found[0] | apart, " + attention": found[1]}


def _rows(quick: bool) -> Iterator[Row]:
    for name, (longest, draw) in SOURCES.items():
        for ranks in (8,) if quick else (8, 32):
            cluster = Cluster.sheet(_PRESET, nodes=-(-ranks // 8))
            found: dict[tuple[str, str], list[float]] = {}
            for seed in range(1 if quick else 3):
                lengths = np.clip(draw(_SEQUENCES * ranks, np.random.default_rng(seed)), 16, longest).astype(np.int64)
                for method in _METHODS:
                    dealt = _deal(lengths, ranks, longest, method, cluster.relabel(1, 1))
                    for suffix, figures in _figures(lengths, dealt, ranks, longest, cluster).items():
                        for section, figure in figures.items():
                            found.setdefault((section, method + suffix), []).append(figure)
            for (section, method), each in found.items():
                figure = max(each)
                target = 1.0 if section == _TOKENS and method.startswith(("balanced", "ranks")) else None
                drawn = max(found[section, "drawn"])
                yield Row(section, f"{name}, {ranks} ranks", method, figure, figure / drawn, figure, target)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 1 if a target was missed, 2 for bad input."""
    options = parser("sequences.data_parallel", __doc__, "one step each, 8 ranks alone").parse_args(arguments)
    return exit_code("data_parallel", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    rows = sorted(_rows(options.quick), key=lambda row: [_TOKENS, _AREA, _APART, _TOGETHER].index(row.section))
    write_rows(options.json, rows, "met", load=load_before())
    show_methods(rows, lambda section: 2, lambda row: False)
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
