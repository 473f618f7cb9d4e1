"""What the layer benchmark is made of: traces that mean what they say, and a balancer that beats standing still."""

import numpy as np
import pytest

from balancing.layers import plan_stages
from benchmarks.layers import _MICRO_BATCHES, _STAGES, _Run, main
from benchmarks.layers_traces import TRACES, trace

LAYERS, ITERATIONS = 24, 60


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
    for cost, own in zip(run.trace.costs, seconds, strict=True):
        assert own >= _MICRO_BATCHES * cost.stage_loads(plan_stages(cost.total, _STAGES, head=sum(cost.head))).max()


def test_unwritable_output_is_said(tmp_path, capsys, monkeypatch):
    for part in ("training", "repack", "times", "reach"):
        monkeypatch.setattr(f"benchmarks.layers.{part}", lambda *_: [])
    assert main(["--quick", "--json", str(tmp_path / "no" / "rows.json")]) == 2
    assert "layers: [Errno 2]" in capsys.readouterr().err
