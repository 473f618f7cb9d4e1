"""The benchmark of all balancers together: even work equals uneven work in sum, and the demonstration runs."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

from benchmarks.together.demo import pace_of
from benchmarks.together.workload import (
    CONTEXT,
    EXPERTS,
    FROZEN,
    LAYERS,
    TOKENS,
    TOP_K,
    Pace,
    lengths_of,
    pairs_of,
    routed,
)
from tests.support.command import run_python
from tests.support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


def test_even_work_is_the_same_work():
    from balancing.kernels.base import Pieces
    from benchmarks.sequences.emulated_rank import _BACKWARD

    uneven, even = Pace(0.03, even=False), Pace(0.03, even=True)
    for pace in (uneven, even):
        lengths = lengths_of(pace.even)
        assert sum(lengths) == TOKENS
        attention = pairs_of(Pieces(lengths, lengths, causal=True)) * pace.pair / CONTEXT
        assert attention + pace.linear + pace.token * TOKENS * TOP_K / CONTEXT == pytest.approx(pace.layer)
    trained = 3 + (_BACKWARD - 2) * attention / even.layer
    passes = np.where(np.arange(LAYERS) < FROZEN, 1, trained)  # frozen layers run forward alone
    assert passes.sum() * uneven.layer == pytest.approx(trained * LAYERS * even.layer)
    cut = passes.cumsum() / passes.sum()
    assert np.abs(cut - 0.5).min() < 0.01, "a cut between two layers evens out the stages"
    assert pace_of(even.step(3)) == pytest.approx(0.03)


def test_routing_is_recorded_uneven_and_complete():
    tokens = TOKENS // CONTEXT
    imbalance = []
    for even in (False, True):
        for layer in range(LAYERS):
            counts = np.array([routed(rank, layer, tokens, even, record=9) for rank in range(4)])
            assert counts.shape == (4, EXPERTS) and (counts.sum(1) == tokens * TOP_K).all() and counts.max() <= tokens
            of_ranks = counts.sum(0).reshape(4, -1).sum(1)
            imbalance.append(of_ranks.max() / of_ranks.mean())
    assert np.mean(imbalance[:LAYERS]) > 1.4 and set(imbalance[LAYERS:]) == {1}


def test_the_demonstration_refuses_what_it_does_not_know():
    done = subprocess.run(["scripts/demo.sh", "--shrot"], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "--shrot" in done.stderr


_DEMONSTRATION = """
import sys
from pathlib import Path
from benchmarks.together import demo, figure, ranks
ranks.prepare()
folder = Path(sys.argv[1])
with demo.emulated() as cluster:
    steps = ranks.train(cluster, demo.VARIANTS["all"], folder, steps=figure.BEFORE + 2, micro_batches=2,
                        seconds=1e-3, quick=(0,), report=True)
figure.draw({"none": steps[0], "all": steps[-1]}, folder / "report", folder / "report", folder / "together.png")
print(len(steps))
"""


def test_the_demonstrations_ranks_train_with_all_balancers_and_are_drawn(tmp_path):
    """One run of short steps. It fails if the trainer has got other calls than those that its ranks replace."""
    done = run_python("-W", "ignore", "-c", _DEMONSTRATION, tmp_path, timeout=3 * PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["5"] and (tmp_path / "together.png").read_bytes()[:4] == b"\x89PNG"
    assert "layers moved to" in "".join(path.read_text() for path in tmp_path.glob("rank_*.log"))
