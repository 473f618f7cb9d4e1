"""Rows that router padding adds, with and without replicas of experts.

    python -m benchmarks.experts.padding [--trace FILE]

`--moe-router-padding-for-quantization` rounds what a rank sends to an expert up to a multiple of 16 (fp8) or 32 (mxfp8)
rows. With replicas the rows of an expert are sent to several ranks, and are rounded up for each. Replicas are placed
from one micro-batch, and another of the same popularity is split over them; with --trace, the next recorded one. The
figures are counted: rows of the busiest rank over the mean of rows without padding, and rows that padding adds over
all rows.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from balancing.cluster import Cluster
from balancing.experts import Splitter, plan_replicas, read_load_trace
from benchmarks.experts.synthetic import sampled_load, zipf_popularity

__all__ = ["padded", "rows"]

_SLOTS = 2
# experts, expert-parallel ranks, experts a token: of published recipes, with 4096 tokens a rank
_SHAPES = {"DeepSeek-V3": (256, 64, 8), "Qwen3-235B": (128, 32, 8), "Qwen3-30B": (128, 8, 8)}
_IMBALANCE = 2.0  # of synthetic loads, the busiest rank over the mean
_TOKENS, _PAIRS = 4096, 8

Pairs = Sequence[tuple[np.ndarray, np.ndarray]]


def padded(served: np.ndarray, multiple: int) -> np.ndarray:
    """int [source_rank, physical], rounded up to `multiple`; what is 0 stays 0."""
    return -(-served // multiple) * multiple


def rows(pairs: Pairs, method: str, multiple: int) -> tuple[float, float]:
    """Means over pairs of loads: rows of the busiest rank over the mean of rows without padding, and added rows.

    pairs: loads int [source_rank, expert], of which the first is planned from and the second is split.
    method: of `plan_replicas`.
    multiple: of rows; 1 for no padding.
    """
    busiest, added = [], []
    for before, load in pairs:
        ranks = len(load)
        cluster = Cluster.preset("h200-8x400g").relabel(-(-ranks // 8), min(8, ranks))
        served = padded(Splitter(plan_replicas(before, cluster, slots=_SLOTS, method=method))(load), multiple)
        by_rank = served.sum(0).reshape(ranks, -1).sum(1)
        busiest.append(by_rank.max() / (load.sum() / ranks))
        added.append(served.sum() / load.sum() - 1)
    return float(np.mean(busiest)), float(np.mean(added))


def _synthetic() -> dict[str, Pairs]:
    loads = {}
    for name, (experts, ranks, topk) in _SHAPES.items():
        rng = np.random.default_rng(0)
        pairs = []
        for _ in range(_PAIRS):
            popularity = zipf_popularity(experts, ranks, _IMBALANCE, rng)
            first, second = (sampled_load(popularity, ranks, _TOKENS * topk, rng) for _ in range(2))
            pairs.append((first, second))
        loads[f"{name}, EP {ranks}, {experts} experts"] = pairs
    return loads


def _recorded(path: Path) -> dict[str, Pairs]:
    trace = read_load_trace(path)
    loads = {}
    for ranks in (8, 16):
        counts = trace.on_ranks(ranks)
        pairs = [(of[:, layer, 0], of[:, layer, 1]) for of in counts[::6] for layer in range(0, counts.shape[2], 3)]
        loads[f"recorded, EP {ranks}, {counts.shape[-1]} experts"] = pairs
    return loads


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.experts.padding", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--trace", type=Path, help="recorded loads (.npz)")
    options = parser.parse_args(argv)
    table = Table("loads", "method", "multiple", "busiest rank", "added rows")
    for name, pairs in (_recorded(options.trace) if options.trace else _synthetic()).items():
        for method in ("none", "quota"):
            for multiple in (1, 16, 32):
                busiest, added = rows(pairs, method, multiple)
                table.add_row(name, method, str(multiple), f"{busiest:.3f}", f"{added:.1%}")
    Console(width=100).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
