"""Simulated steps with deferred weight gradients: by hand, against the schedule without, and within the budget."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing.layers import LayerMemory, LayerSeconds, StagePlan, stage_memory
from balancing.layers.simulated_fill import SplitPasses, kept_share, simulate_fill
from balancing.pipeline import Schedule, operations, simulate_schedule

quick = settings(max_examples=40)


@st.composite
def pipelines(draw):
    """(forward, input gradient, weight gradient, micro-batches, transfer)"""
    ranks, chunks = draw(st.integers(2, 6)), draw(st.integers(1, 3))
    micro_batches = ranks * draw(st.integers(1, 3)) if chunks > 1 else draw(st.integers(1, 9))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    seconds = generator.uniform(0.1, 3, (3, ranks, chunks))
    return *seconds, micro_batches, generator.uniform(0, 1, ranks) if draw(st.booleans()) else 0.0


@quick
@given(pipelines())
def test_without_weight_gradients_it_is_the_schedule(pipeline):
    forward, inputs, _, micro_batches, transfer = pipeline
    step = simulate_fill(SplitPasses(forward, inputs, np.zeros_like(inputs)), micro_batches, transfer=transfer)
    expected = simulate_schedule(forward, inputs, micro_batches, transfer=transfer)
    assert step.step_time == pytest.approx(expected.step_time)
    assert not np.any([sum(fills) for fills in step.fills])


@quick
@given(pipelines(), st.integers(1, 4), st.sampled_from([0.0, 0.05, 3.0]))
def test_each_piece_runs_once_within_the_budget(pipeline, pieces, spare):
    forward, inputs, weights, micro_batches, transfer = pipeline
    passes = SplitPasses(forward, inputs, weights, pieces=pieces)
    step = simulate_fill(passes, micro_batches, spare=spare, transfer=transfer)
    ranks, chunks = forward.shape
    assert [sum(fills) for fills in step.fills] == [pieces * chunks * micro_batches] * ranks
    assert (step.peak <= (1 + spare) * step.peak_without.max() * (1 + 1e-9)).all()
    busy = micro_batches * (forward + inputs + weights).sum(axis=1).max()
    assert step.step_time >= busy * (1 - 1e-9)
    # No piece runs before the backward that it belongs to.
    for rank, fills in enumerate(step.fills):
        backward = [step.kind == "backward" for step in operations(ranks, micro_batches, chunks=chunks)[rank]]
        assert (np.cumsum(fills) <= pieces * np.cumsum([0, *backward])).all()


def test_two_ranks_by_hand():
    """F = I = W = 1, two micro-batches. Rank 1 has no wait; rank 0 waits for its first gradient and fills its last."""
    step = simulate_fill(SplitPasses(np.ones((2, 1)), np.ones((2, 1)), np.ones((2, 1))), 2, spare=1.0)
    # rank 0: F0 F1 . I0 . I1 W0 W1 or with a W in the second wait; rank 1: . F0 I0 F1 I1 W0 W1
    assert step.step_time == pytest.approx(7)
    assert simulate_schedule(np.ones(2), 2 * np.ones(2), 2).step_time == pytest.approx(9)


def test_memory_of_late_stages_is_what_it_uses():
    """With the memory of the fullest rank for all, even stages reach 92 % of the bound; Megatron's schedule 82 %."""
    ones = np.ones((8, 1))
    step = simulate_fill(SplitPasses(ones, ones, ones, pieces=6), 32)
    assert 3 * 32 / simulate_schedule(ones, 2 * ones, 32).step_time == pytest.approx(32 / 39)
    assert 3 * 32 / step.step_time > 0.92
    assert step.peak.max() == step.peak_without.max() == 8
    assert step.peak[-1] > step.peak_without[-1] == 1
    # The first rank has no room, so its steady phase computes each weight gradient before the next forward.
    assert step.fills[0][-1] <= 6 * 8


def test_uneven_stages_do_not_wait_for_weight_gradients():
    work = np.array([1.0, 1.3, 0.8, 1.1])[:, None]
    step = simulate_fill(SplitPasses(work, work, work, pieces=4), 16)
    assert 3 * 1.3 * 16 / step.step_time > 0.95
    assert 3 * 1.3 * 16 / simulate_schedule(work, 2 * work, 16).step_time < 0.91


@quick
@given(pipelines(), st.integers(1, 3))
def test_memory_of_a_plan_is_enough(pipeline, layers_more):
    """For stages of different numbers of layers, each of which keeps as much as any other."""
    forward, _, _, micro_batches, _ = pipeline
    stages, chunks = forward.shape
    counts = tuple(tuple(1 + (stage + chunk) % (1 + layers_more) for chunk in range(chunks)) for stage in range(stages))
    plan = StagePlan.from_counts(counts)
    cost = LayerSeconds(np.ones(plan.layers), 2 * np.ones(plan.layers))
    step = simulate_fill(cost.split_passes(plan, 0.5), micro_batches)
    filled = Schedule(weight_share=0.5)
    room = stage_memory(plan, LayerMemory(np.zeros(plan.layers), activation=1.0), micro_batches, filled)
    assert (step.peak <= room * (1 + 1e-9)).all()
    assert step.step_time == cost.step_seconds(plan, micro_batches, schedule=filled)
    assert step.step_time <= cost.step_seconds(plan, micro_batches) * 1.05


def test_tensors_that_were_gathered_count():
    """Kept whole by four ranks, they are more than the activations: the same budget defers less."""
    ones = np.ones((4, 1))
    passes = [SplitPasses(ones, ones, ones, pieces=4, kept=kept_share(gathered_by=ranks)) for ranks in (1, 4)]
    own, gathered = (simulate_fill(each, 8) for each in passes)
    assert own.step_time < gathered.step_time < simulate_schedule(ones, 2 * ones, 8).step_time
    assert gathered.peak.max() <= 4 * (1 + 1e-9) + kept_share(gathered_by=4) - 1


@pytest.mark.parametrize(
    ("change", "spare", "message"),
    [
        ({"forward": np.ones(4)}, 0.0, r"give three arrays \[rank, chunk\]"),
        ({"weight_gradient": -np.ones((4, 1))}, 0.0, "-1.0 is among"),
        ({}, -0.5, "-0.5 is among"),
        ({"pieces": 0}, 0.0, "pieces=0 must be at least 1"),
    ],
)
def test_bad_input(change, spare, message):
    ones = {name: np.ones((4, 1)) for name in ("forward", "input_gradient", "weight_gradient")}
    with pytest.raises(ValueError, match=message):
        simulate_fill(SplitPasses(**(ones | change)), 8, spare=spare)
