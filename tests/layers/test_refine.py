"""Search of plans by simulated steps: never slower than where it starts, and within what is allowed."""

from dataclasses import replace

import numpy as np
import pytest

from balancing.layers import (
    LayerMemory,
    LayerSeconds,
    Pipeline,
    StagePlan,
    plan_partition,
    plan_pipeline,
    plan_stages,
    refine_plan,
    stage_memory,
)
from balancing.layers.planners.problem import uniform_bounds
from balancing.layers.planners.refine import _least_seconds
from balancing.pipeline import Schedule, simulate_steps


def test_refinement_never_slows_a_step_and_keeps_to_what_fits():
    draw = np.random.default_rng(3)
    better = 0
    for _ in range(8):
        forward = draw.lognormal(0, 0.5, 24)
        model = LayerSeconds(forward, forward * np.where(np.arange(24) < 12, 0, 2), head=(1.0, 2.0))  # a frozen front
        plan = plan_stages(model.total, 6, head=3.0)
        for fits in (lambda plan: True, lambda plan: max(plan.counts) <= (6,)):
            refined = refine_plan(plan, model, 8, transfer=0.1, fits=fits)
            gain = model.simulate(plan, 8, transfer=0.1).step_time / model.simulate(refined, 8, transfer=0.1).step_time
            assert gain >= 1 and (refined == plan or fits(refined))
            better += gain > 1.0001
    assert better, "no plan could be improved: the test does not test"


@pytest.mark.parametrize("virtual, behind", [(1, 0), (2, 0), (3, 0), (2, 2)])
def test_refinement_of_chunks_is_no_slower_than_either_start(virtual, behind):
    """From the planner's plan and from the plan in force; layers stay before multi-token prediction, chunks filled."""
    draw, better = np.random.default_rng(virtual), 0
    stages, layers = 4, 24
    for _ in range(6):
        forward = draw.lognormal(0, 0.5, layers)
        model = LayerSeconds(forward, forward * draw.uniform(0, 2, layers), head=(1.0, 2.0), tail=(0.5, 1.0))
        start = uniform_bounds(layers, stages * virtual, behind)
        current = replace(StagePlan.from_bounds(start, stages), tail_layers=1, tail_chunk=stages * virtual - 1 - behind)
        plan = plan_partition(model, Pipeline(stages, None, virtual), current=current)
        for in_parts in (False, True):
            schedule = {"transfer": 0.1, "schedule": Schedule(5 if virtual > 1 else None, in_parts=in_parts)}
            refined = refine_plan(plan, model, 10, current=current, **schedule)
            seconds = [model.simulate(each, 10, **schedule).step_time for each in (plan, current, refined)]
            assert seconds[2] <= (seconds[0] if virtual == 1 else min(seconds[:2])) * (1 + 1e-9)
            assert (refined.tail_layers, refined.tail_chunk, refined.behind) == (1, plan.tail_chunk, behind)
            assert min(map(len, refined.order[: stages * virtual - behind])) >= 1
            better += seconds[2] < min(seconds[:2]) * 0.999
    assert better, "no plan could be improved: the test does not test"


def test_what_refinement_skips_cannot_be_quicker():
    draw = np.random.default_rng(5)
    for ranks, chunks, count, options in (
        (1, 1, 3, {}),
        (5, 1, 4, {}),
        (3, 2, 6, {"schedule": Schedule(group=6)}),
        (4, 3, 8, {"schedule": Schedule(in_parts=True)}),
    ):
        forward, backward = draw.lognormal(0, 1, (2, 40, ranks, chunks)) * draw.integers(0, 2, (2, 40, ranks, chunks))
        least, steps = _least_seconds(forward, backward, count), simulate_steps(forward, backward, count, **options)
        assert (least <= steps * (1 + 1e-9)).all() and (least > 0.3 * steps).any()
    # Equal chunks: the last rank begins after the first chunks of the others, and then never waits.
    equal = np.ones((1, 4, 2))
    assert _least_seconds(equal, equal, 8) == simulate_steps(equal, equal, 8) == 8 * 4 + 3 * 2


def test_one_layer_a_chunk_stays():
    """No boundary can move, in any of the sizes; with empty chunks allowed they can."""
    cost = np.array([1.0, 1, 1, 1, 1, 5, 1, 1])
    model = LayerSeconds(cost, 2 * cost)
    for virtual in (1, 2, 4):
        plan = plan_stages(model.total, 8 // virtual, virtual=virtual, method="uniform")
        assert refine_plan(plan, model, 8, current=plan) == plan
    assert refine_plan(plan, model, 8, min_layers=0) != plan


def _in_a_run() -> list[tuple[float, float, float, float]]:
    """Step seconds of what a run plans, without and with a limit on memory, each beside the planner alone."""
    from types import SimpleNamespace

    from megatron.balanced.layers import planning

    schedule, draw, found = Schedule(group=6, in_parts=True), np.random.default_rng(0), []
    for _ in range(5):
        forward = draw.lognormal(0, 0.5, 24)
        cost = LayerSeconds(forward, forward * np.where(np.arange(24) < 12, 0, 2))
        current = plan_stages(np.ones(24), 4, virtual=2, method="uniform")
        planner = object.__new__(planning.LayerPlanner)
        planner._micro_batches = 12
        planner._model = SimpleNamespace(fine_grained_activation_offloading=False)
        planner._config = SimpleNamespace(planner="optimal")
        planner._mover = SimpleNamespace(plan=current, gather=lambda own: [own])
        planner._schedule = schedule
        alone = plan_partition(cost, Pipeline(4, 12, 2), current=current)
        memory = LayerMemory(np.ones(24), 0.1)
        room = stage_memory(current, memory, 12, schedule)
        pipeline = Pipeline(4, 12, 2, schedule)
        within = plan_partition(cost, pipeline, current=current, memory=memory, memory_limit=room)
        refined = plan_pipeline(cost, pipeline, current=current, memory=memory, memory_limit=room)
        assert (stage_memory(refined, memory, 12, schedule) <= room * (1 + 1e-9)).all()
        plans = (planner._plan(cost, np.zeros(4), np.inf), alone, refined, within)
        found.append(tuple(cost.simulate(plan, 12, schedule=schedule).step_time for plan in plans))
    return found


def test_plans_of_a_run_are_refined_by_its_own_schedule(pool):
    steps = np.array(pool.run(1, _in_a_run)[0])
    assert (steps[:, 0] <= steps[:, 1]).all() and (steps[:, 0] < 0.99 * steps[:, 1]).any()
    assert (steps[:, 2] <= steps[:, 3]).all() and (steps[:, 2] < 0.99 * steps[:, 3]).any()
