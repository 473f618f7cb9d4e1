"""The benchmark of all balancers together: even work equals uneven work in sum, and the demonstration runs."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

from benchmarks.together.__main__ import rows_of
from benchmarks.together.workload import CONTEXT, EXPERTS, LAYERS, TOKENS, TOP_K, Pace, lengths_of, pairs_of, routed
from tests.support.command import run_python
from tests.support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


def test_even_work_is_the_same_work():
    from balancing.sequences.engine.kernels import Pieces

    uneven, even = Pace(0.02, even=False), Pace(0.02, even=True)
    for pace in (uneven, even):
        lengths = lengths_of(pace.even)
        assert sum(lengths) == TOKENS
        assert pairs_of(Pieces(lengths, lengths, causal=True)) * pace.pair == pytest.approx(0.02 * CONTEXT)
    seconds = [[pace.linear(layer) for layer in range(LAYERS)] for pace in (uneven, even)]
    assert sum(seconds[0]) == pytest.approx(sum(seconds[1])) and len(set(seconds[1])) == 1
    cost = np.add(seconds[0], 2 * 0.02)  # with attention and experts
    assert cost[:2].sum() == pytest.approx(cost[2:].sum()), "a cut between two layers evens out the stages"


def test_routing_is_uneven_and_complete():
    tokens = TOKENS // CONTEXT
    for even in (False, True):
        counts = np.array([routed(rank, 3, tokens, even) for rank in range(8)])
        assert counts.shape == (8, EXPERTS) and (counts.sum(1) == tokens * TOP_K).all() and counts.max() <= tokens
        of_ranks = counts.sum(0).reshape(8, -1).sum(1)
        imbalance = of_ranks.max() / of_ranks.mean()
        assert imbalance == 1 if even else imbalance > 1.5


def test_gains_alone_are_multiplied():
    steps = {"none": [6.0, 6.0], "layers": [5.0], "experts": [4.0], "layers + experts": [3.0], "limit": [2.4]}
    rows = {row.name: row for row in rows_of(steps)}
    both = rows["layers + experts"]
    assert both.gain == 2 and both.alone == pytest.approx(1.2 * 1.5) and both.to_limit == pytest.approx(0.8)
    assert rows["layers"].alone is None


def test_the_demonstration_refuses_what_it_does_not_know():
    done = subprocess.run(["scripts/demo.sh", "--shrot"], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "--shrot" in done.stderr


@pytest.mark.exhaustive
def test_the_demonstration_ends_with_a_picture(tmp_path):
    command = ["-W", "ignore", "-m", "benchmarks.together", "--demo", tmp_path, "--short"]
    done = run_python(*command, timeout=3 * PATIENCE)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["16", "none", "all"]
    assert (tmp_path / "together.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "all/report/trace.json").exists()
