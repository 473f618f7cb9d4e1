"""The benchmark of layers: its traces match their sources, and the balancer beats a static plan."""

import numpy as np
import pytest

from balancing.layers import LayerSeconds, plan_stages
from benchmarks.layers.hybrid import rows as hybrid_rows
from benchmarks.layers.plans import _MICRO_BATCHES, _STAGES, _Run, main
from benchmarks.layers.record import replay
from benchmarks.layers.traces import TRACES, trace
from benchmarks.layers.training import bound

LAYERS, ITERATIONS = 24, 600


@pytest.mark.parametrize("name", TRACES)
def test_traces_have_the_unevenness_of_their_kind(name):
    given = trace(name, LAYERS, ITERATIONS)
    first, last = given.costs[0], given.costs[-1]
    assert len(given.costs) == ITERATIONS and {cost.layers for cost in given.costs} == {LAYERS}
    again = trace(name, LAYERS, ITERATIONS)
    assert all(np.array_equal(a.total, b.total) for a, b in zip(given.costs, again.costs, strict=True))
    dense = trace("layer freezing", LAYERS, 2).costs[0].total.mean()
    match name:
        case "mixture of experts":
            assert (last.total > dense * 0.98).all() and 1.05 < last.total.max() / last.total.mean() < 2
        case "gradual pruning":
            assert first.total.mean() == pytest.approx(dense, rel=0.02) and 0.25 < last.total.mean() / dense < 0.5
        case "layer freezing":
            assert (last.backward[:18] == 0).all() and (last.backward[18:] > 0).all() and (first.backward > 0).all()
            assert (last.forward > 0).all()
        case "sparse attention":
            assert last.total.sum() < 0.75 * first.total.sum() and last.total.max() > 1.3 * last.total.mean()
        case "early exit":
            assert last.forward[LAYERS // 2] < 0.2 * last.forward[0] and last.head[0] < 0.05 * first.head[0]
        case "mixture of depths":
            assert last.forward[1::2] == pytest.approx(0.125 * last.forward[::2], rel=0.2)


def test_balanced_training_beats_a_fixed_plan_and_never_the_oracle():
    run = _Run(trace("early exit", LAYERS, ITERATIONS))
    uniform = plan_stages(np.ones(LAYERS), _STAGES, method="uniform")
    seconds, plans, spent = run.gated("optimal", uniform)
    assert plans[0] == uniform and 1 < len(set(plans)) <= spent["moves"] + 1
    total = seconds.sum() + spent["move_s"] + spent["rebuild_s"]
    assert total < 0.9 * run.fixed(uniform).sum()
    for at, own in zip(run.simulated, seconds, strict=True):
        cost = run.trace.costs[at]
        assert own >= _MICRO_BATCHES * cost.stage_loads(plan_stages(cost.total, _STAGES, head=sum(cost.head))).max()


def _recording(path, scheme, seconds):
    """seconds: [iteration, layer, pass], the embedding and the head behind the layers."""
    np.savez(path, scheme=scheme, command="", seconds=seconds, fullest=np.ones((len(seconds), seconds.shape[1] - 2)))
    return path


def test_a_recording_is_stretched_over_run_and_depth(tmp_path):
    # Every second of four layers costs a tenth; at half time the first two lose their backward pass.
    seconds = np.ones((40, 6, 2)) * np.array([1, 0.1, 1, 0.1, 0, 0.5])[:, None]
    seconds[20:, :2, 1] = 0
    seconds[5] *= 9  # disturbed
    given = replay(_recording(tmp_path / "depths.npz", "mixture of depths", seconds), 8, 80)
    assert len(given.costs) == 80 and given.costs[0].layers == 8
    assert given.costs[10].total == pytest.approx(given.costs[0].total)
    before, after = given.costs[39], given.costs[40]
    assert before.forward / before.forward[0] == pytest.approx([1, 0.1] * 4)
    assert before.head == pytest.approx((0.5 * before.forward[0],) * 2)
    assert (after.backward[:4] == 0).all() and after.backward[4:] == pytest.approx(before.backward[4:])
    dense = trace("layer freezing", 8, 1).costs[0].total.mean()
    assert before.total.mean() == pytest.approx(dense)


def test_a_recording_of_nothing_known_is_said(tmp_path, capsys):
    path = _recording(tmp_path / "other.npz", "knitting", np.ones((2, 6, 2)))
    assert main(["--trace", str(path)]) == 2
    assert f"layers: --trace: {path} is of scheme 'knitting'" in capsys.readouterr().err


def test_the_bound_of_training_is_the_best_cut():
    cost = LayerSeconds(np.ones(6), np.array([0.0, 0, 0, 2, 2, 2]))
    speedup, first = bound(cost, 1000)
    assert first == 4 and speedup == pytest.approx(9 / 6, rel=0.01)


def test_unwritable_output_is_said(tmp_path, capsys, monkeypatch):
    for part in ("training", "repack", "times", "reach"):
        monkeypatch.setattr(f"benchmarks.layers.plans.{part}", lambda *_: [])
    assert main(["--quick", "--json", str(tmp_path / "no" / "rows.json")]) == 2
    assert f"layers: cannot write {tmp_path / 'no' / 'rows.json'}: there is no folder" in capsys.readouterr().err


def test_moves_of_published_hybrid_models_pay():
    """Against equal counts and against the segments of Megatron-LM's own test; plans come near the bound."""
    for row in hybrid_rows():
        assert row.gain > 1.05 and 1 <= row.pays_after <= 5, row
        assert row.seconds[2] < row.seconds[1] < row.seconds[0] and row.seconds[2] / row.seconds[1] > 0.8, row
        assert row.before.replace("|", "") == row.after.replace("|", "")
