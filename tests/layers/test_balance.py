"""--balance-layers from the command line to the event log: layers move, and no number changes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.events import events_in
from tests.support.set_clock import SetClock, slow_layers
from tests.support.training import EXACT, MOCK_DATA, MODEL, RankRun, join, train, train_rank

UNEVEN = "--num-layers 8 --pipeline-model-parallel-size 4 --untie-embeddings-and-output-weights --train-iters 5".split()
BASE = [*MODEL, *MOCK_DATA, *EXACT, *UNEVEN]
BALANCE = "--layer-balance-interval 3".split()


def _train_willing(argv: list[str]) -> RankRun:
    """As the command line does, but moves are assumed to be free, since these runs are too short to pay for any."""
    from megatron.balanced.layers import planning

    planning._BANDWIDTH, planning._FIXED_SECONDS = 1e18, 0.0
    planning.usable_memory = lambda: 1e12  # as on a GPU, whose memory plans have to keep to
    return train_rank(argv, True)


def _train_uneven(argv: list[str], slow: tuple[int, ...] = ()) -> RankRun:
    """slow: layers that take three times as long as the others."""
    slow_layers(SetClock().install(), lambda layer: (0.03, 0.06) if layer in slow else (0.01, 0.02))
    return _train_willing(argv)


def _decisions(report: Path) -> list[dict[str, Any]]:
    events = events_in(report)
    return [event for event in events if event["balancer"] == "layers" and event["action"] != "observe"]


def test_uneven_stages_are_evened_out(pool, tmp_path):
    argv = [*BASE, *BALANCE, "--balance-layers", "--balance-report", str(tmp_path)]
    balanced = join(pool.run(4, _train_uneven, argv, (0, 1, 6, 7)))
    plain = train(pool, 4, "", base=BASE, parameters=True)
    assert balanced.losses == plain.losses
    for name, whole in plain.parameters.items():
        assert np.array_equal(balanced.parameters[name], whole), name
    first, *later = _decisions(tmp_path)
    assert (first["iteration"], first["action"]) == (4, "move")
    assert first["layout_before"] == "Ett|tt|tt|ttL"
    assert first["layout_after"] == "Et|ttt|ttt|tL"
    assert first["imbalance_after"] < first["imbalance_before"] - 0.1
    assert first["moved_bytes"] > 2 * 8 * 12 * 32**2 * 3  # two layers in float64, with moments
    assert first["apply_ms"] == first["move_ms"] + first["rebuild_ms"] > 0
    assert [event["action"] for event in later] == ["keep"] * len(later)


@pytest.mark.exhaustive
def test_stages_are_evened_out_beside_multi_token_prediction(pool, tmp_path):
    base = [*BASE, "--mtp-num-layers", "1"]
    balanced = join(
        pool.run(4, _train_uneven, [*base, *BALANCE, "--balance-layers", "--balance-report", str(tmp_path)], (0,))
    )
    plain = train(pool, 4, "", base=base, parameters=True)
    assert balanced.losses == plain.losses
    assert all(np.array_equal(balanced.parameters[name], whole) for name, whole in plain.parameters.items())
    first, *_ = _decisions(tmp_path)
    assert (first["layout_before"], first["layout_after"]) == ("Ett|tt|tt|ttmL", "Ett|tt|ttt|tmL")
    # The layer of multi-token prediction is the first of its own, as slow as the first of the model.
    assert first["stage_cost_after"] == pytest.approx([0.12, 0.06, 0.09, 0.03 + 0.09])


@pytest.mark.exhaustive
def test_chunks_are_evened_out_in_larger_groups_of_micro_batches(pool, tmp_path):
    """Groups of three of five micro-batches: on two stages groups of two would leave one over, which is refused."""
    base = [*MODEL, *MOCK_DATA, *EXACT, *"--num-layers 8 --global-batch-size 5 --train-iters 5".split()]
    base += "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ettt|t|t|tttL".split()
    base += "--microbatch-group-size-per-virtual-pipeline-stage 3".split()
    flags = [*base, *BALANCE, "--balance-layers", "--balance-report", str(tmp_path)]
    balanced = join(pool.run(2, _train_uneven, flags))
    plain = train(pool, 2, "", base=base, parameters=True)
    assert balanced.losses == plain.losses
    assert all(np.array_equal(balanced.parameters[name], whole) for name, whole in plain.parameters.items())
    first, *_ = _decisions(tmp_path)
    assert (first["action"], first["layout_before"], first["layout_after"]) == (
        "move",
        "Ettt|t|t|tttL",
        "Ett|tt|tt|ttL",
    )
    assert 0 < first["predicted_step_after"] < first["predicted_step_before"]


def _train_with_slow_layers(argv: list[str]) -> RankRun:
    """The first two layers take long, wherever they are."""
    slow_layers(SetClock().install(), lambda layer: (0.04, 0.0) if layer < 2 else (0.01, 0.0))
    return _train_willing(argv)


def test_settled_once_by_measured_time(pool, tmp_path):
    flags = "--pipeline-model-parallel-size 2 --global-batch-size 8 --balance-layers-once --layer-balance-interval 3"
    pool.run(
        2,
        _train_with_slow_layers,
        [*MODEL, *MOCK_DATA, "--train-iters", "5", *flags.split(), "--balance-report", str(tmp_path)],
    )
    (decision,) = _decisions(tmp_path)
    assert (decision["iteration"], decision["action"]) == (4, "move")
    assert (decision["layout_before"], decision["layout_after"]) == ("Ett|ttL", "Et|tttL")
    assert decision["stage_cost_before"] == pytest.approx([0.08, 0.02])
    assert decision["stage_cost_after"] == pytest.approx([0.04, 0.06])
    # Forward passes are all that takes time: 8 on the slower stage, behind the first or before the last on the other.
    assert decision["predicted_step_before"] == pytest.approx(8 * 0.08 + 0.02)
    assert decision["predicted_step_after"] == pytest.approx(8 * 0.06 + 0.04)
    line = "final layout: --pipeline-model-parallel-layout 'Et|tttL', predicted to make a step 21.2% shorter"
    assert line in pool.output[0]
