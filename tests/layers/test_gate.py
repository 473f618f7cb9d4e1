"""Averages of costs with detection of jumps, the cost of a move, and the gate."""

import numpy as np
import pytest

from balancing.layers import (
    CostAverage,
    Gate,
    GateConfig,
    LayerSeconds,
    Predicted,
    StagePlan,
    layer_moves,
    migration_seconds,
    noise_of_gain,
    over_ranks,
    plan_stages,
)
from balancing.layers.config import LayerConfig
from balancing.pipeline import simulate_schedule, simulate_steps

OLD, NEW, OTHER = (StagePlan.from_counts(((a,), (8 - a,))) for a in (4, 5, 6))
CONFIG = GateConfig(min_gain=0.02, interval=10, horizon=100, watch=3, slower=0.02)


def run(
    gate,
    iteration,
    *,
    seconds=1.0,
    then=0.8,
    now=1.0,
    candidate=NEW,
    migration=1.0,
    previous_now=None,
    noise=0.0,
    **more,
):
    """One iteration: decide before it, then measure it."""
    gate, decision = gate.check(iteration, candidate, Predicted(now, then, previous_now, noise), migration, **more)
    return gate.measured(iteration, seconds), decision


# ---- the gate


def test_moves_where_it_pays():
    gate, decision = run(Gate(CONFIG, OLD), 2)
    assert decision.action == "move" and decision.plan == gate.plan == NEW and gate.moved_at == 2


def test_the_gate_of_a_training_run():
    """Settings come from the flags; the rest is the gate's own."""
    gate = LayerConfig(min_gain=0.1, interval=7).gate
    assert gate == GateConfig(min_gain=0.1, interval=7)


@pytest.mark.parametrize(
    "case, why",
    [
        ({"candidate": OLD}, "is the best one"),
        ({"then": 0.99}, "gains 1.0% of a step, less than 2.0%"),
        ({"then": 1.2}, "less than 2.0%"),
        ({"noise": 0.1}, "gains 20.0% of a step, measured to no more than 20.0%"),
        ({"migration": 20.0}, "gains 20 s in 100 iterations, the move takes 20 s"),
        ({"left": 5}, "gains 1 s in 5 iterations, the move takes 1 s"),
        ({"now": 0.0, "then": 0.0}, "less than"),
    ],
)
def test_stays_where_a_move_does_not_pay(case, why):
    gate = Gate(CONFIG, OLD)
    for iteration in range(1, 6):
        gate, decision = run(gate, iteration, **case)
        assert decision.action == "keep" and decision.plan == OLD and why in decision.reason


def moved(config=CONFIG):
    """A gate that has measured an iteration of the old plan and moved before iteration 2."""
    gate, decision = run(Gate(config, OLD).measured(1, 1.0), 2)
    assert decision.action == "move"
    return gate


def test_waits_between_moves():
    gate = moved()
    for iteration in range(3, 30):
        gate, decision = run(gate, iteration, seconds=0.8, now=0.8, then=0.5, candidate=OTHER, previous_now=1.0)
        if decision.action == "move":
            break
    assert iteration == 2 + CONFIG.interval


def test_a_slower_step_is_taken_back_and_the_next_move_waits_longer():
    gate = moved()
    seen = []
    for iteration in range(3, 60):
        gate, decision = run(gate, iteration, seconds=1.3, now=0.8, then=0.6, candidate=OTHER, previous_now=1.0)
        seen.append((iteration, decision.action))
        if decision.action == "rollback":
            assert gate.plan == OLD and "steps take 1.3 s, the plan before would take 1 s" in decision.reason
            break
    # iteration 2 pays for new buffers; 3, 4 and 5 are watched
    assert iteration == 6 and gate.patience == 2
    for iteration in range(7, 60):
        gate, decision = run(gate, iteration, candidate=NEW)
        if decision.action == "move":
            break
    assert iteration == 6 + 2 * CONFIG.interval


def test_a_model_that_grew_is_no_reason_to_go_back():
    gate = moved()
    for iteration in range(3, 12):  # all layers cost half more now: the old plan would take 1.5 s, the new one 1.3 s
        assert gate.watching in (OLD, None)
        gate, decision = run(gate, iteration, seconds=1.3, now=1.3, then=1.3, previous_now=1.5)
        assert decision.action == "keep"
    assert gate.plan == NEW and gate.previous is None and gate.patience == 1


def test_a_drift_is_no_reason_to_go_back():
    """Costs rise while the old plan is measured, and stay. Each step is as long as predicted, and the new plan takes
    0.9 of the old one's."""
    config = GateConfig(min_gain=0.02, interval=2, horizon=100, watch=5, slower=0.02)
    gate, moved_at = Gate(config, OLD), None
    for iteration in range(1, 20):
        slow = 1 + 0.25 * min(iteration, 8)
        now = slow if gate.plan == OLD else 0.9 * slow
        gate = gate.measured(iteration, now)
        candidate = NEW if iteration > 5 else OLD
        gate, decision = gate.check(iteration + 1, candidate, Predicted(now, 0.9 * slow, slow), 0.01)
        assert decision.action != "rollback", decision.reason
        if decision.action == "move":
            moved_at = iteration
    assert moved_at == 6 and gate.plan == NEW and gate.previous is None


@pytest.mark.parametrize(("first", "share"), [(1.0, (0.0, 0.03)), (4.0, (0.9, 1.0))], ids=["even", "uneven"])
def test_noise_moves_no_layers_and_hides_no_imbalance(first, share):
    """16 layers on two stages, the first four `first` times as long, measured in eight iterations to half a layer. By
    `min_gain` of 1 % alone noise would move layers in a tenth of all runs."""
    old, moves, by_mean = StagePlan.from_counts(((8,), (8,))), 0, 0
    layers, generator = np.where(np.arange(16) < 4, first, 1.0), np.random.default_rng(0)
    for _ in range(100):
        costs = layers * np.maximum(generator.normal(1, 0.5, (8, 16)), 0.01)
        new = plan_stages(costs.mean(0), 2)

        def slowest(cost: np.ndarray, plan: StagePlan) -> float:
            return float(np.bincount(plan.stage_of, cost).max())

        now, then = (slowest(costs.mean(0), plan) for plan in (old, new))
        noise = noise_of_gain([slowest(cost, old) - slowest(cost, new) for cost in costs])
        _, decision = Gate(GateConfig(0.01, 10), old).check(8, new, Predicted(now, then, None, noise), 0.0)
        moves += decision.action == "move"
        by_mean += now - then > 0.01 * now
    assert share[0] <= moves / 100 <= share[1] and by_mean >= 10


def test_a_slow_first_iteration_is_not_held_against_a_move():
    gate, _ = moved().check(3, NEW, Predicted(0.8, 0.8), 1.0)
    assert gate.measured(2, 99.0).steps == gate.steps


@pytest.mark.parametrize("bad", [{"min_gain": -0.1}, {"min_gain": 1.0}, {"interval": 0}, {"watch": 0}, {"slower": -1}])
def test_bad_configuration(bad):
    name, value = next(iter(bad.items()))
    with pytest.raises(ValueError, match=f"{name}={value}"):
        GateConfig(**({"min_gain": 0.02, "interval": 10} | bad))


# ---- the price of a move


def test_what_a_move_carries():
    old, new = StagePlan.from_counts(((4,), (4,), (4,))), StagePlan.from_counts(((3,), (3,), (6,)))
    assert [tuple(move) for move in layer_moves(old, new)] == [(3, 0, 1), (6, 1, 2), (7, 1, 2)]
    weight = np.arange(12.0)
    assert migration_seconds(old, new, weight, 10.0, fixed=0.5) == pytest.approx(0.5 + 13 / 10)
    assert migration_seconds(old, old, weight, 10.0, fixed=0.5) == 0
    with pytest.raises(ValueError, match="has 12 layers, the new one 8"):
        layer_moves(old, OLD)
    with pytest.raises(ValueError, match="bandwidth is 0"):
        migration_seconds(old, new, weight, 0, fixed=0.0)


# ---- costs


def cost(scale=1.0, layers=8):
    forward = np.linspace(1, 2, layers) * scale
    return LayerSeconds(forward, 1.5 * forward, (0.1, 0.2), (0.3, 0.6))


def test_stage_seconds_by_hand():
    plan = plan_stages(cost().total, 2, virtual=2)
    forward, backward = cost().stage_seconds(plan)
    for stage in range(2):
        for chunk in range(2):
            ends = (0.1 if (stage, chunk) == (0, 0) else 0) + (0.3 if (stage, chunk) == (1, 1) else 0)
            own = cost().forward[list(plan.chunks[stage][chunk])].sum()
            assert forward[stage, chunk] == pytest.approx(own + ends)
            assert backward[stage, chunk] == pytest.approx(1.5 * own + 2 * ends)
    assert cost().simulate(plan, 8).step_time == simulate_schedule(forward, backward, 8).step_time


def test_a_frozen_front_is_seen_in_backward_only():
    front = np.arange(8) < 4
    frozen = LayerSeconds(np.ones(8), np.where(front, 0, 2.0))
    assert frozen.total.tolist() == [1] * 4 + [3] * 4
    assert plan_stages(frozen.total, 2).counts == ((5,), (3,))
    assert plan_stages(frozen.forward, 2).counts == ((4,), (4,))


def test_over_ranks():
    """Two replicas of two expert-parallel ranks: the slower of each pair, then the mean of the pairs."""
    seconds = [[1.0, 4.0], [3.0, 2.0], [2.0, 2.0], [2.0, 8.0]]
    assert over_ranks(seconds, seconds, [0, 0, 1, 1], tells_waiting=True).tolist() == [2.5, 6.0]
    assert over_ranks(seconds, seconds, range(4), tells_waiting=True).tolist() == [2.0, 4.0]
    with pytest.raises(ValueError, match=r"experts \(2,\), for device of shape \(4, 2\)"):
        over_ranks(seconds, seconds, [0, 1], tells_waiting=True)


def test_messages_are_a_cost_of_the_layer_and_waiting_for_another_rank_is_not():
    """One rank enters a layer 5 s before the other. Work takes 1 and 2 s, messages 1.5 s, in which both wait."""
    device, wall = [[1.0], [2.0]], [[8.5], [3.5]]
    assert over_ranks(device, wall, [0, 0], tells_waiting=True).tolist() == [3.5]
    assert over_ranks(device, wall, [0, 1], tells_waiting=True).tolist() == [1.5], (
        "alone in its group a rank waits for no other"
    )
    # A GPU's events have the wait of the rank that came first in its work.
    assert over_ranks(wall, wall, [0, 0], tells_waiting=False).tolist() == [3.5]
    assert over_ranks(wall, wall, [0, 1], tells_waiting=False).tolist() == [6.0]


def noisy(draw, scale=1.0, noise=0.05):
    each = cost(scale)
    factor = 1 + noise * draw.standard_normal(each.layers)
    return LayerSeconds(each.forward * factor, each.backward * factor, each.embedding, each.head)


def test_noise_is_averaged_and_is_no_jump():
    draw, average = np.random.default_rng(0), CostAverage(window=20)
    assert not any([average.add(noisy(draw)) for _ in range(300)])
    assert average.cost.total == pytest.approx(cost().total, rel=0.05)


def test_a_jump_is_noticed_and_starts_afresh():
    draw, average = np.random.default_rng(1), CostAverage(window=20)
    for _ in range(50):
        average.add(noisy(draw))
    after = [average.add(noisy(draw, 0.5)) for _ in range(5)]
    assert after == [False, False, True, False, False]
    assert average.cost.total == pytest.approx(cost(0.5).total, rel=0.1), "nothing of the old costs is left"


def test_one_outlier_is_no_jump():
    draw, average = np.random.default_rng(2), CostAverage(window=20)
    for iteration in range(60):
        assert not average.add(noisy(draw, 4.0 if iteration == 40 else 1.0))
    assert average.cost.total == pytest.approx(cost().total, rel=0.06)


def test_a_slow_drift_is_followed():
    average = CostAverage(window=10)
    for iteration in range(200):
        average.add(cost(1 + iteration / 200))
    assert average.cost.total == pytest.approx(cost(2).total, rel=0.05)


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"forward": []}, "forward has shape"),
        ({"backward": [1.0]}, r"backward has shape \(1,\); it has to be \(2,\)"),
        ({"backward": [-1.0, 1.0]}, "backward has -1.0 among its seconds"),
        ({"head": (1.0,)}, r"head has shape \(1,\)"),
    ],
)
def test_bad_costs(bad, message):
    with pytest.raises(ValueError, match=message):
        LayerSeconds(**({"forward": [1.0, 1.0], "backward": [1.0, 1.0]} | bad))
    with pytest.raises(ValueError, match="no iteration was measured yet"):
        _ = CostAverage().cost


def test_many_pipelines_at_once_are_the_same_pipelines():
    draw = np.random.default_rng(4)
    for ranks, chunks, count in ((4, 1, 9), (3, 2, 6)):
        forward, backward = draw.uniform(0, 1, (2, 5, ranks, chunks))
        links = draw.uniform(0, 0.2, ranks)
        each = [
            simulate_schedule(f, b, count, transfer=links).step_time for f, b in zip(forward, backward, strict=True)
        ]
        assert simulate_steps(forward, backward, count, transfer=links).tolist() == each
    with pytest.raises(ValueError, match="give seconds as"):
        simulate_steps(forward[0], backward[0], 6)
    with pytest.raises(ValueError, match="finite and at least 0"):
        simulate_steps(-forward, backward, 6)
