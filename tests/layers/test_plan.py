"""Plans of layers: comparison with brute force, and properties for any costs."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing.layers import (
    LayerMemory,
    LayerSeconds,
    Pipeline,
    StagePlan,
    in_flight,
    layer_moves,
    plan_partition,
    plan_stages,
    stage_memory,
)
from balancing.layers.plan import METHODS
from balancing.layers.planners.diffusion import neighbour_flows
from balancing.layers.reference import best_cut
from balancing.pipeline import Schedule, operations, simulate_schedule
from balancing.pipeline.layout import from_layout, to_layout
from benchmarks.baselines.layers import deepspeed_plan
from benchmarks.layers.traces import trace


def loads(plan: StagePlan, cost, embedding=0.0, head=0.0) -> np.ndarray:
    load = np.array([sum(cost[layer] for chunk in stage for layer in chunk) for stage in plan.chunks], dtype=float)
    load[0] += embedding
    load[-1] += head
    return load


def every_plan(layers: int, stages: int, virtual: int = 1, least: int = 1):
    """All possible plans."""
    for inner in itertools.combinations_with_replacement(range(layers + 1), stages * virtual - 1):
        bounds = (0, *inner, layers)
        if all(b - a >= least for a, b in itertools.pairwise(bounds)):
            yield StagePlan.from_bounds(bounds, stages)


def random_costs(seed: int, layers: int) -> np.ndarray:
    draw = np.random.default_rng(seed)
    kind = seed % 4
    cost = draw.lognormal(0, 0.7, layers) if kind else draw.integers(0, 4, layers).astype(float)
    if kind == 2:
        cost[: layers // 2] *= 0.3  # a frozen front
    if kind == 3:
        cost[draw.integers(layers)] *= 20  # a giant
    return cost


@pytest.mark.parametrize("seed", range(12))
def test_optimal_is_the_best_of_all(seed):
    layers, stages = 9 + seed % 2, 2 + seed % 4
    cost, head, least = random_costs(seed, layers), [0.0, 1.5][seed % 2], seed % 3 and 1
    memory = LayerMemory(np.random.default_rng(seed).uniform(1, 3, layers), 0.4, embedding=1, head=2)
    plans = list(every_plan(layers, stages, least=least))
    fullest = [stage_memory(plan, memory).max() for plan in plans]
    for limit in (None, float(np.quantile(fullest, 0.2))):
        allowed = [plan for plan, full in zip(plans, fullest, strict=True) if limit is None or full <= limit]
        best = min(loads(plan, cost, 0.5, head).max() for plan in allowed)
        if limit is None:
            beside = [0.5, *[0.0] * (stages - 2), head]
            slowest, cuts = best_cut(cost.tolist(), stages, fixed=beside, least=least)
            assert slowest == pytest.approx(best, rel=1e-12)
            assert loads(StagePlan.from_bounds(cuts, stages), cost, 0.5, head).max() == pytest.approx(best, rel=1e-12)
        found = plan_stages(cost, stages, embedding=0.5, head=head, memory=memory, memory_limit=limit, min_layers=least)
        assert loads(found, cost, 0.5, head).max() == pytest.approx(best, rel=1e-12)
        assert limit is None or stage_memory(found, memory).max() <= limit


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(12, 60), st.integers(2, 12))
def test_optimal_cuts_as_the_reference(seed, layers, stages):
    cost = random_costs(seed, layers)
    found = loads(plan_stages(cost, stages), cost).max()
    assert found == pytest.approx(best_cut(cost.tolist(), stages)[0], rel=1e-12, abs=1e-300)


@pytest.mark.parametrize("seed, virtual", [(0, 1), (1, 1), (2, 1), (3, 1), (0, 2), (3, 2)])
def test_no_layer_comes_after_multi_token_prediction(seed, virtual):
    """It is on the last but one stage, where it counts, in time and in bytes; the last stage has only the head."""
    layers, stages, mtp = 7, 3, 1.5
    cost = random_costs(seed, layers)
    memory = LayerMemory(np.random.default_rng(seed).uniform(1, 3, layers), 0.4, embedding=1, head=2, tail=4)
    current = from_layout("Et|" + "t|" * (stages * virtual - 3) + "t" * (layers - stages * virtual + 2) + "m|L", stages)

    def load(plan):
        return loads(plan, cost, 0.5, 1.0) + mtp * np.eye(stages)[-2]

    every = every_plan(layers, stages, virtual, least=0)
    plans = [
        replace(p, tail_layers=1, tail_chunk=current.tail_chunk) for p in every if not p.order[-1] and all(p.order[:-1])
    ]
    fullest = [stage_memory(plan, memory).max() for plan in plans]
    for limit in (None, float(np.quantile(fullest, 0.2))):
        allowed = [plan for plan, full in zip(plans, fullest, strict=True) if limit is None or full <= limit]
        seconds = LayerSeconds(cost, np.zeros(len(cost)), (0.5, 0.0), (1.0, 0.0), (mtp, 0.0))
        pipeline = Pipeline(stages, None, virtual)
        found = plan_partition(seconds, pipeline, memory=memory, memory_limit=limit, current=current)
        assert found.order[-1] == () and to_layout(found).endswith("m|L")
        best = min(load(plan).max() for plan in allowed)
        assert load(found).max() <= best * (1 + 1e-12 if virtual == 1 else 1.1)
        assert limit is None or stage_memory(found, memory).max() <= limit
    uniform = plan_stages(cost, stages, virtual=virtual, current=current, method="uniform")
    assert uniform.order[-1] == () and np.ptp([len(chunk) for chunk in uniform.order[:-1]]) <= 1
    if virtual == 1:
        with pytest.raises(ValueError, match="can have none"):
            plan_stages(cost, stages, current=current, method="diffusion")


@pytest.mark.parametrize("seed", range(6))
def test_of_the_best_plans_the_one_that_moves_least(seed):
    layers, stages = 9, 4
    cost, current = random_costs(seed, layers), plan_stages(random_costs(seed + 50, layers), stages)
    weight = np.random.default_rng(seed).integers(1, 9, layers).astype(float)
    best = min(loads(plan, cost).max() for plan in every_plan(layers, stages))
    ties = [plan for plan in every_plan(layers, stages) if loads(plan, cost).max() <= best * (1 + 1e-12)]
    found = plan_stages(cost, stages, memory=weight, current=current)

    def moved(plan):
        return sum(weight[move.layer] for move in layer_moves(current, plan))

    assert moved(found) == min(map(moved, ties))
    assert plan_stages(cost, stages, current=found) == found, "a plan that is the best already stays"


@pytest.mark.parametrize("seed", range(6))
def test_chunks_against_all_plans(seed):
    """With two chunks a stage the planner descends; on small models a step has to end close to the quickest of all."""
    layers, stages, micro_batches = 9, 3, 12
    cost = random_costs(seed, layers)
    seconds = LayerSeconds(cost, 2 * cost, head=(1.0, 2.0))
    memory = LayerMemory(np.ones(layers), 0.5)
    plans = list(every_plan(layers, stages, virtual=2))
    steps = np.array([seconds.simulate(plan, micro_batches).step_time for plan in plans])
    fullest = np.array([stage_memory(plan, memory).max() for plan in plans])
    limit = float(np.quantile(fullest, 0.3))
    for bound, close in ((None, 1.05), (limit, 1.11)):
        found = plan_stages(seconds.total, stages, virtual=2, head=3.0, memory=memory, memory_limit=bound)
        best = steps[fullest <= (np.inf if bound is None else bound)].min()
        assert seconds.simulate(found, micro_batches).step_time <= close * best
        assert bound is None or stage_memory(found, memory).max() <= bound
    assert (
        plan_stages(seconds.total, stages, virtual=2, head=3.0, memory=memory, memory_limit=limit, current=found)
        == found
    )


@pytest.mark.parametrize("virtual", [2, 4])
@pytest.mark.parametrize("name", ["mixture of experts", "early exit", "mixture of depths"])
def test_chunks_are_even_enough_for_the_interleaved_schedule(name, virtual):
    """Ranks of equal load whose chunks are unequal wait in every turn, which the load of ranks does not show."""
    cost = trace(name, 48, 3).costs[-1]
    whole = plan_stages(cost.total, 8, head=sum(cost.head))
    bound = 32 * cost.stage_loads(whole).max()  # a pipeline that never fills or drains
    plan = plan_stages(cost.total, 8, virtual=virtual, head=sum(cost.head))
    assert cost.simulate(plan, 32).step_time <= bound / 0.8


costs = st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1e3)), min_size=1, max_size=40)


@given(costs, st.integers(1, 12), st.sampled_from(METHODS), st.integers(1, 2), st.integers(0, 99), st.booleans())
@settings(max_examples=150)
def test_every_layer_stays_in_order_in_every_plan(cost, stages, method, virtual, head, again):
    virtual = virtual if method in ("optimal", "uniform") else 1
    if len(cost) < stages * virtual:
        with pytest.raises(ValueError, match=r"cannot fill \d+ stages .*; use at most \d+ stages"):
            plan_stages(cost, stages, virtual=virtual, method=method)
        return
    current = plan_stages(cost[::-1], stages, virtual=virtual) if again else None
    plan = plan_stages(cost, stages, virtual=virtual, head=float(head), method=method, current=current)
    assert (plan.stages, plan.virtual, plan.layers, plan.method) == (stages, virtual, len(cost), method)
    assert [layer for chunk in plan.order for layer in chunk] == list(range(len(cost)))
    assert min(len(chunk) for chunk in plan.order) >= 1
    assert plan == plan_stages(cost, stages, virtual=virtual, head=float(head), method=method, current=current)


@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=40), st.data())
@settings(max_examples=100)
def test_diffusion_keeps_what_its_docstring_promises(cost, data):
    stages = data.draw(st.integers(2, min(8, len(cost))))
    head = data.draw(st.floats(0, 20))
    plan = plan_stages(cost, stages, head=head, method="diffusion")
    load = loads(plan, cost, head=head)
    for left, right in itertools.pairwise(range(stages)):
        slow = left if load[left] > load[right] else right
        chunk = plan.chunks[slow][0]
        edge = cost[chunk[-1] if slow == left else chunk[0]]
        assert len(chunk) == 1 or abs(load[left] - load[right]) <= edge * (1 + 1e-6)
    free = loads(plan_stages(cost, stages, method="diffusion", min_layers=0), cost)
    assert np.abs(free - free.mean()).max() <= max(cost) * 1.01, "within one layer of the fixed point"


def test_flows_balance_loads_between_neighbours_alone():
    load = np.array([9.0, 0, 0, 3, 0, 6])
    carried = neighbour_flows(load)
    assert carried == pytest.approx(np.cumsum(load - load.mean())[:-1], abs=1e-3)


def test_diffusion_walks_down_a_staircase():
    """Stages of 8, 7, ..., 1 equal layers: neighbours differ by one layer, greedy exchange would stop here."""
    staircase = StagePlan.from_counts(tuple((count,) for count in range(8, 0, -1)))
    plan = plan_stages(np.ones(36), 8, method="diffusion", current=staircase)
    assert loads(plan, np.ones(36)).max() == 5
    assert {abs(move.source - move.target) for move in layer_moves(staircase, plan)} <= {1, 2}


def test_a_stage_keeps_its_layers_where_memory_ends():
    memory = LayerMemory(np.ones(12))
    plan = plan_stages([9] * 6 + [1] * 6, 2, method="diffusion", memory=memory, memory_limit=7)
    assert plan.counts == ((5,), (7,))


def test_hand_made_cases():
    assert plan_stages([1, 1, 1, 1], 2, head=2).counts == ((3,), (1,))
    assert plan_stages([1, 1, 1, 9, 1, 1], 3).chunks[1] == ((3,),), "one giant stands alone"
    assert plan_stages([0, 0, 0, 0], 2, embedding=0).counts == ((2,), (2,)), "no cost at all is spread evenly"
    assert plan_stages([1, 1], 3, head=9, min_layers=0).counts[2] == (0,), "the head alone"
    assert plan_stages(np.ones(10), 4, method="uniform").counts == ((3,), (3,), (2,), (2,))
    assert plan_stages([1e-6] * 24, 8).counts == ((3,),) * 8, "precision is relative"
    assert deepspeed_plan([1, 2, 3, 4, 5, 6], 3).counts == ((3,), (2,), (1,))


def test_in_flight_is_what_the_schedule_holds():
    own = [(4, 1, 9), (4, 1, 2), (3, 2, 9), (4, 2, 8), (4, 3, 4), (3, 2, 6)]
    grouped = [(3, 2, 8, 5), (4, 2, 12, 6), (3, 3, 10, 10), (2, 3, 40, 5)]
    sizes = [*((*each, None) for each in own), *grouped]
    for (stages, virtual, count, group), in_parts in itertools.product(sizes, (False, True)):
        schedule = Schedule(group, in_parts=in_parts)
        moments = in_flight(stages, virtual, count, schedule)
        draw = np.random.default_rng(stages + virtual)
        for stage, order in enumerate(operations(stages, count, chunks=virtual, schedule=schedule)):
            held, seen = np.zeros(virtual), []
            for operation in order:
                held[operation.chunk] += 1 if operation.kind == "forward" else -1
                seen.append(held.copy())
            for size in draw.uniform(0, 1, (5, virtual)):
                assert (moments[stage] @ size).max() == pytest.approx((np.array(seen) @ size).max())


def test_memory_that_cannot_be_met_says_how_much_is_missing():
    memory = LayerMemory(np.full(8, 10.0), 3.0)  # layers 1, 2, 2, 3: 22, 38, 32 and 39 bytes; 2 each: 44 on stage 0
    with pytest.raises(ValueError, match=r"memory_limit 20 bytes on 4 stages: a stage is at least 19 bytes short"):
        plan_stages(np.ones(8), 4, memory=memory, memory_limit=20)
    with pytest.raises(ValueError, match="the uniform plan does not fit memory_limit 40 bytes: stage 0 needs 4 bytes"):
        plan_stages(np.ones(8), 4, memory=memory, memory_limit=40, method="uniform")
    assert plan_stages(np.ones(8), 4, memory=memory, memory_limit=40).counts == ((1,), (2,), (2,), (3,))
    with pytest.raises(ValueError, match="bytes short; use more stages"):
        plan_stages(np.ones(8), 2, virtual=2, memory=memory, memory_limit=20)
    both = LayerMemory(np.ones(2), embedding=5, head=5)  # of one stage: 12 bytes
    assert plan_stages(np.ones(2), 1, memory=both, memory_limit=12).counts == ((2,),)
    with pytest.raises(ValueError, match="at least 1 bytes short"):
        plan_stages(np.ones(2), 1, memory=both, memory_limit=11)


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"cost": [[1.0]]}, "cost has shape"),
        ({"cost": [1, -1, 1, 1]}, "cost has -1.0 among its values"),
        ({"cost": [1, float("nan"), 1, 1]}, "cost has nan"),
        ({"head": -3.0}, "head has -3.0"),
        ({"stages": 0}, "stages=0 must be a whole number of at least 1"),
        ({"stages": 9}, "4 layers cannot fill 9 stages"),
        ({"method": "best"}, "unknown method 'best'; known: optimal, diffusion"),
        ({"method": "diffusion", "virtual": 2}, "plans one chunk a stage, not 2"),
        ({"memory_limit": 5.0}, "memory_limit needs memory"),
        ({"memory": [1.0], "memory_limit": 5.0}, "memory is of 1 layers, cost of 4"),
        ({"memory": [1.0] * 4, "memory_limit": [1.0] * 3}, "one for each stage"),
        ({"memory": [-1.0] * 4}, "static bytes have -1.0"),
        ({"current": StagePlan.from_counts(((1,), (1,)))}, "the current plan has 2 layers, cost has 4"),
    ],
)
def test_bad_input_is_named(bad, message):
    arguments = {"cost": [1.0] * 4, "stages": 2} | bad
    with pytest.raises(ValueError, match=message):
        plan_stages(arguments.pop("cost"), arguments.pop("stages"), **arguments)


def test_the_example_of_the_package():
    """The glossary of `balancing.layers`: 3 stages, 6 layers."""
    cost = [4, 2, 2, 2, 1, 1]
    before, after = (plan_stages(cost, 3, method=method) for method in ("uniform", "optimal"))
    assert [to_layout(plan) for plan in (before, after)] == ["Ett|tt|ttL", "Et|tt|tttL"]
    loads = np.array([[sum(cost[layer] for layer in layers) for (layers,) in plan.chunks] for plan in (before, after)])
    assert loads.tolist() == [[6, 4, 2], [4, 4, 4]]
    assert [simulate_schedule(load / 3, 2 * load / 3, 8).step_time for load in loads] == pytest.approx([50, 40])
    assert [(move.layer, move.source, move.target) for move in layer_moves(before, after)] == [(1, 0, 1), (3, 1, 2)]
