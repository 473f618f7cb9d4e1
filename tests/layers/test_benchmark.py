"""The benchmark of layers: its traces match their sources, and the balancer beats a static plan."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

from balancing.layers import LayerSeconds, plan_stages
from benchmarks.layers import overlap
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
    for part in ("training", "times"):
        monkeypatch.setattr(f"benchmarks.layers.plans.{part}", lambda *_, **named: [])
    assert main(["--quick", "--json", str(tmp_path / "no" / "rows.json")]) == 2
    assert f"layers: cannot write {tmp_path / 'no' / 'rows.json'}: there is no folder" in capsys.readouterr().err


def test_moves_of_published_hybrid_models_pay():
    """Against equal counts and against the segments of Megatron-LM's own test; plans come near the bound."""
    for row in hybrid_rows():
        assert row.gain > 1.05 and 1 <= row.pays_after <= 5, row
        assert row.seconds[2] < row.seconds[1] < row.seconds[0] and row.seconds[2] / row.seconds[1] > 0.8, row
        assert row.before.replace("|", "") == row.after.replace("|", "")


class _Node:
    """A node of Megatron-LM's plan of a layer on simulated streams."""

    def __init__(self, streams, layer, forward, backward, weights=0.0, stream="compute"):
        self._streams, self._layer, self._stream = streams, layer, stream
        self._forward, self._backward, self._weights = forward, backward, weights

    def forward(self, given):
        self._streams.run("forward", self._layer, self._forward, self._stream)

    def backward(self, given):
        self._streams.run("backward", self._layer, self._backward, self._stream)

    def backward_dw(self):
        self._streams.weight_gradient(self._layer, self._weights)


def test_simulated_calls_run_as_megatrons_do():
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan

    draw = np.random.default_rng(0)
    model = overlap.Model(draw.uniform(1, 2, 6), draw.uniform(1, 2, 6), draw.uniform(1, 2, 6) * [0, 1, 1, 1, 0, 1])
    streams = overlap._Streams()

    def plan(layer):
        attention, experts, message = model.attention[layer], model.experts[layer], model.message[layer]
        sent = dict(forward=message, backward=message, stream="messages")
        return SimpleNamespace(
            pre_dispatch_computation=_Node(streams, layer, attention, attention, attention),
            mlp=_Node(streams, layer, experts, experts, experts),
            moe_dispatch=_Node(streams, layer, **sent),
            moe_combine=_Node(streams, layer, **sent),
            mtp_post_process=_Node(streams, layer, 0.0, 0.0),
            config=SimpleNamespace(ep_overlap_early_attn_memory_release=False),
            get_low_precision_context=contextlib.nullcontext,
        )

    pairs = [(0, 5), (1, 4), (2, 3), (None, 2)]
    for ahead, back in pairs:
        TransformerLayerSchedulePlan.run(None if ahead is None else plan(ahead), plan(back))
    call = overlap._call(model, (0, 3), (2, 6))
    assert call.pieces == streams.call.pieces and call.messages == streams.call.messages
    assert {len(call.pieces), len(call.messages)} == {3 * 2 + 4 * 4, 2 * 2 + 2 * 3}


def test_a_partition_is_for_the_step_that_its_costs_were_measured_in():
    (row,) = [row for row in overlap.rows((4,), (2.0,)) if row.case == "dense half"]
    by_serial, by_computation, measured = row.overlapped
    assert by_serial < 0.95 < by_computation < 1.05 < measured
    assert row.serial[0] > 1.05 * row.serial[2] > 1.05 > row.serial[1]
    assert abs(row.predicted[2] - 1) < 0.06 < 0.2 < min(abs(row.predicted[0] - 1), abs(row.predicted[1] - 1))


def test_measured_shares_add_up_to_the_calls():
    model = dict(overlap._models(2.0))["dense first"]
    plan = plan_stages(np.ones(model.layers), 4, virtual=2, method="uniform")
    shares = overlap.measured_cost(model, plan)
    for rank in range(4):
        in_turn = [call.seconds for at, passes, call in overlap._calls(model, plan) if at == rank and len(passes) == 2]
        assert shares.stage_loads(plan)[rank] * len(in_turn) / 2 == pytest.approx(sum(in_turn), rel=0.03)
    assert (shares.total >= model.cost(messages=False).total - 1e-9).all()
    assert (shares.total <= model.cost(messages=True).total + 1e-9).all()
