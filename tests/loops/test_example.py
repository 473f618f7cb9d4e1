"""The example of a plain loop: three balancers at once, and checkpoints after layers have moved, change no number."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.plain_loop import ALL, train
from tests.support.weights import assert_same_weights, named_weights

STEPS, PER_STEP, RANKS = 7, 4, 4  # a checkpoint after five steps; layers move after four


def _train(
    steps: int, folder: Path, balancers: Collection[str] = ALL
) -> tuple[list[float], dict[str, Any], str, list[dict]]:
    losses, model, layout, events = train(steps, folder, balancers)
    return losses, named_weights([model.module]), layout, events


@pytest.fixture(scope="module")
def plain(pool, tmp_path_factory):
    return pool.run(RANKS, _train, STEPS, tmp_path_factory.mktemp("plain"), ())


def test_three_balancers_and_a_resumed_run_change_no_number(pool, plain, tmp_path):
    begun = pool.run(RANKS, _train, 6, tmp_path)
    assert {layout for _, _, layout, _ in begun} == {"Ettt|tttL"}, "layers have not moved"
    resumed = pool.run(RANKS, _train, STEPS, tmp_path)
    without = pool.run(RANKS, _train, STEPS, tmp_path, ())
    for (losses, _, layout, _), (expected, *_) in zip(resumed, plain, strict=True):
        assert layout == "Ettt|tttL", "the layout of the checkpoint is not used"
        np.testing.assert_allclose(losses, expected[5 * PER_STEP :], rtol=1e-12)
    for (losses, *_), (expected, *_) in zip(begun, plain, strict=True):
        np.testing.assert_allclose(losses, expected[: 6 * PER_STEP], rtol=1e-12)
    for run in (resumed, without):
        assert_same_weights([weights for _, weights, *_ in run], [weights for _, weights, *_ in plain])
    assert [len(losses) // PER_STEP for losses, *_ in without] == [0, 0, 2, 2]
    events = [event for run in (begun, resumed) for *_, told in run for event in told]
    of = {name: [event for event in events if event["balancer"] == name] for name in ("experts", "sequences", "layers")}
    assert sum(event["replicas"] for event in of["experts"]) > 0 and sum(e["moved_bytes"] for e in of["sequences"]) > 0
    assert [event["action"] for event in of["layers"]] == ["move"]
    for name in ("experts", "sequences"):
        before, after = (np.mean([event[f"imbalance_{when}"] for event in of[name]]) for when in ("before", "after"))
        assert after - 1 < 0.5 * (before - 1), name
