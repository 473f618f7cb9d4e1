"""Deals of whole sequences over data-parallel ranks: what each promises, and what is gained."""

import json

import numpy as np
import pytest

from balancing.cluster import Cluster
from benchmarks.baselines.data_parallel import deal, work
from benchmarks.sequences import data_parallel

RANKS, LIMIT = 8, 65536


def _lengths(seed: int) -> np.ndarray:
    draw = np.random.default_rng(seed)
    return np.clip(8000 * np.exp(draw.normal(size=16 * RANKS)), 16, LIMIT).astype(np.int64)


@pytest.mark.parametrize("method", data_parallel._METHODS)
@pytest.mark.parametrize("seed", range(3))
def test_each_sequence_is_in_one_micro_batch_of_one_rank(method, seed):
    lengths = _lengths(seed)
    dealt = data_parallel._deal(lengths, RANKS, LIMIT, method, Cluster.sheet("h200-8x400g").relabel(1, 1))
    assert dealt.rank.shape == dealt.micro_batch.shape == lengths.shape
    assert {*dealt.rank} == set(range(RANKS)) and dealt.micro_batch.min() >= 0
    assert dealt.micro_batch.max() < dealt.micro_batches
    cells = np.bincount(dealt.rank * dealt.micro_batches + dealt.micro_batch, lengths)
    if method != "verl":  # by work alone
        assert cells.max() <= LIMIT
    if method in ("drawn", "verl"):
        assert {*np.bincount(dealt.rank)} == {16}, "equally many sequences"
    if method == "slime":
        assert (cells > 0).all(), "equally many micro-batches"


def test_differencing_evens_out_the_work_of_ranks():
    lengths = _lengths(0)
    found = {}
    for method in ("drawn", "verl"):
        of_ranks = np.bincount(deal(lengths, RANKS, LIMIT, method).rank, work(lengths))
        found[method] = of_ranks.max() / of_ranks.mean()
    assert found["verl"] < 1.15 < 1.3 < found["drawn"]


def test_the_benchmark_tells_what_is_gained(tmp_path):
    assert data_parallel.main(["--quick", "--json", str(tmp_path / "rows.json")]) == 0
    rows = {
        (row["section"], row["case"], row["method"]): row["figure"]
        for row in json.loads((tmp_path / "rows.json").read_text())["rows"]
    }
    case = "RL reasoning, 8 ranks"
    assert rows["step, apart", case, "ranks first"] < 1.01
    figures = [rows["step, together", case, each] for each in ("balanced + attention", "balanced", "verl", "slime")]
    assert figures == sorted(figures) and figures[0] < 1.15 < 1.3 < figures[2]
    assert rows["area max / mean", case, "verl + attention"] < 1.05 < rows["area max / mean", case, "verl"]
