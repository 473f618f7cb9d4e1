"""The benchmark of emulated sequences: it runs, checks itself, and no step is shorter than its work."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from balancing.kernels.base import CPU, Pieces
from balancing.sequences import limit_seconds, plan_sequences, step_cost
from balancing.sequences.cost import kv_bytes, linear_seconds, tile_area
from balancing.sequences.engine.compiler import compile_rank
from balancing.sequences.engine.program import Compute
from benchmarks.emulated import device as emulated_device
from benchmarks.emulated.device import Device
from benchmarks.sequences.emulated import Row, make_rows, measure, targets
from benchmarks.sequences.emulated_rank import Job, ZeroScores
from benchmarks.sequences.emulated_workload import (
    CONTEXT_METHODS,
    DATA_METHODS,
    METHODS,
    SHAPES,
    Scale,
    host_seconds,
    make_case,
    predicted_seconds,
    tile_pairs,
)
from tests.support.patience import PATIENCE


@pytest.mark.parametrize("causal", [True, False])
def test_the_kernel_is_attention_where_scores_are_zero(causal):
    pieces = Pieces((5, 3), (9, 3), causal)
    q, k = torch.zeros(8, 4, 8, dtype=torch.float64), torch.zeros(12, 2, 8, dtype=torch.float64)
    v, grad = torch.randn(12, 2, 8, dtype=torch.float64), torch.zeros_like(q)
    grad[:, 0, 0] = torch.randn(8, dtype=torch.float64)
    ours, exact = ZeroScores(Device(), 0.0), CPU
    out, logsumexp = exact.forward(q, k, v, pieces, 1.0)
    found = ours.forward(q, k, v, pieces, 1.0)
    torch.testing.assert_close(found[0][:, 0, 0], out[:, 0, 0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[1].double(), logsumexp, rtol=1e-6, atol=1e-6)
    gradients = (kernel.backward(grad, q, k, v, out, logsumexp, pieces, 1.0)[2] for kernel in (ours, exact))
    one, other = (gradient[:, 0, 0] for gradient in gradients)
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_tiles_are_those_of_the_cost_model():
    scale = Scale(2, 2, 20.0)
    lengths = [5000, 1, 127, 129, 3000]
    plan = plan_sequences(lengths, scale.cluster, shape=SHAPES["MHA"], method="gather")
    for rank in range(4):
        program = compile_rank(plan, rank).program
        computed = [call.pieces for call in (program.calls[step.call] for step in program.forward if _calls(step))]
        # Runs of one rank that stand behind one another are one piece, of no more tiles than two; but a turn of keys
        # may end within a tile.
        assert 0.9 <= sum(map(tile_pairs, computed)) / tile_area(plan)[rank] <= 1.05
    assert tile_pairs(Pieces((128, 1), (256, 129), True)) == (2 + 2) * 128**2
    assert tile_pairs(Pieces((129,), (257,), False)) == 6 * 128**2


def _calls(step) -> bool:
    return isinstance(step, Compute) and step.call is not None


def test_the_scaled_machine_keeps_its_proportions():
    scale = Scale(2, 8, 20.0)
    assert scale.cluster.nics_per_node < scale.cluster.ranks_per_node
    for shape in SHAPES.values():
        _, kv_heads = scale.heads(shape)
        emulated = 2 * kv_heads * scale.width * 2
        assert emulated * scale.bytes == kv_bytes(shape)
        # A token's seconds on a NIC against its seconds in linear layers, as modelled and as emulated.
        modelled = kv_bytes(shape) / scale.cluster.nic_bandwidth / linear_seconds(1, scale.cluster, shape)
        slow = linear_seconds(1, scale.cluster, shape) * scale.time
        assert emulated / scale.nic / slow == pytest.approx(modelled)


def test_a_run_is_right_and_takes_no_less_than_its_work():
    scale = Scale(2, 2, 10.0)
    case = make_case(scale.cluster, "GQA 8:1", "prolong", 0, list(METHODS.values()), tokens=1024)
    job = Job(scale, 1, tuple(METHODS), (case,))
    lines, reason = measure(job, limited=False, timeout=PATIENCE)
    assert reason is not None
    rows = make_rows("2 x 2", job, lines)
    assert [row.method for row in rows] == [name for name in METHODS if name in case.parts]
    work = limit_seconds(case.lengths, scale.cluster, SHAPES["GQA 8:1"]) / SHAPES["GQA 8:1"].layers * scale.time
    for row in rows:
        assert row.seconds >= 0.999 * work, f"{row.method} took {row.seconds} s for {work} s of work"
        assert row.to_limit == pytest.approx(row.seconds / work) and row.predicted >= 0.999
        assert row.batches == 1 and 0 <= row.exposed <= 1


def test_a_step_takes_no_less_than_its_host_where_operations_cost_one():
    scale = Scale(2, 2, 4.0, host=True)
    names = ("as drawn", "chunks")
    case = make_case(scale.cluster, "GQA 8:1", "prolong", 0, [METHODS[name] for name in names], tokens=128)
    lines, _ = measure(Job(scale, 1, names, (case,)), limited=False, timeout=PATIENCE)
    for row in make_rows("2 x 2", Job(scale, 1, names, (case,)), lines):
        (plan,), cluster = case.parts[row.method], scale.cluster
        plan = replace(plan, cluster=cluster, shape=SHAPES["GQA 8:1"])
        asked = sum(host_seconds(plan)) + 75 * cluster.host_seconds
        assert asked > 1.5e-3 > limit_seconds(case.lengths, cluster, SHAPES["GQA 8:1"]) / 2, "the host is slower"
        assert row.seconds >= 0.99 * asked * scale.time, f"{row.method} took {row.seconds} s"


class _Timer:
    """Time that passes only in waits, each of which takes 3 ms too long."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def pace(self, seconds: float) -> None:
        self.now += seconds + 0.003


@pytest.mark.parametrize(("host", "device"), [(0.1, 0.3), (0.3, 0.1), (0.2, 0.2)])
def test_the_host_runs_ahead_of_the_device(monkeypatch, host, device):
    """Whichever is slower sets the pace."""
    timer = _Timer()
    monkeypatch.setattr(emulated_device, "time", timer)
    monkeypatch.setattr(emulated_device, "pace", timer.pace)
    emulated = Device()
    for _ in range(2):  # the first step leaves nothing to the second
        emulated.begin()
        began = timer.now
        for _ in range(10):
            emulated.issue(host)
            emulated.run(device)
        assert timer.now - began == pytest.approx(9 * max(host, device) + host + device, abs=0.004)
        emulated.finish()


def test_predictions_know_what_the_host_takes():
    free, scale = Scale(2, 8, 20.0), Scale(2, 8, 20.0, host=True)
    methods = [METHODS["ring"], METHODS["chunks"]]
    case = make_case(scale.cluster, "GQA 8:1", "prolong", 0, methods, tokens=128)
    seconds = {name: predicted_seconds(case, METHODS[name], scale.cluster) for name in case.parts}
    without = {name: predicted_seconds(case, METHODS[name], free.cluster) for name in case.parts}
    assert seconds["chunks"] > without["chunks"]
    assert seconds["ring"] == pytest.approx(without["ring"], rel=0.02), "what a peer's operations cost is not known"
    cluster = scale.cluster
    (plan,) = case.parts["chunks"]
    attention = sum(host_seconds(plan))
    least = SHAPES["GQA 8:1"].layers * (attention + 75 * cluster.host_seconds)
    assert seconds["chunks"] == pytest.approx(least) and step_cost(plan, cluster, SHAPES["GQA 8:1"]).device < least


def test_predictions_know_what_is_switched_off():
    scale = Scale(2, 8, 20.0)
    case = make_case(scale.cluster, "MHA", "prolong", 0, [METHODS[name] for name in CONTEXT_METHODS])
    seconds = {name: predicted_seconds(case, METHODS[name], scale.cluster) for name in case.parts}
    assert seconds["chunks"] == min(seconds.values())
    assert seconds["ring + routing"] < seconds["ring"]
    assert seconds["zones"] < seconds["zones, not remapped"] < seconds["zones: engine only"] < seconds["ring"]
    (unmapped,) = case.parts["zones, not remapped"]
    np.testing.assert_array_equal(unmapped.linear_tokens, unmapped.tokens)


def test_tokens_stay_where_their_sample_was_drawn():
    scale = Scale(2, 8, 20.0)
    case = make_case(scale.cluster, "GQA 8:1", "mix", 0, [METHODS[name] for name in DATA_METHODS])
    (drawn,), (travels,), (moved,) = (case.parts[name] for name in DATA_METHODS)
    assert drawn.attention == drawn.linear == travels.linear != moved.linear
    for plan in (travels, moved):
        assert plan.area.max() < 1.05 * plan.area.mean() < drawn.area.max()
    seconds = [predicted_seconds(case, METHODS[name], scale.cluster) for name in DATA_METHODS]
    assert seconds == sorted(seconds, reverse=True)


def test_targets_are_missed_by_what_is_too_slow():
    def row(method: str, seconds: float) -> Row:
        return Row("2 x 8", "MHA", "prolong", method, seconds, 6.0 / seconds, seconds, seconds, 0.0, 1)

    def met(*rows: Row) -> list[bool]:
        return [each for *_, each in targets(rows)]

    assert met(row("ring", 6.0), row("zones", 1.2), row("chunks", 1.1)) == [True, True]
    assert met(row("ring", 6.0), row("zones", 1.0), row("chunks", 1.1)) == [True, False]
    assert met(row("ring", 6.0), row("chunks", 2.5)) == [False, True]
