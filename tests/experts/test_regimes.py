"""Benchmarks of regimes and of public workloads: the bound holds, plans are near the best, workloads are as named."""

import itertools

import numpy as np
import pytest

from balancing.experts import ReplicaPlacement, layer_cost, plan_replicas, traffic
from balancing.experts.cost import TransferWindow
from balancing.experts.planners.quota.estimate import CostEstimate
from benchmarks.experts.emulated_workload import SHAPE, Scale, made_up_loads
from benchmarks.experts.modelled import bound_of_forced_balance, of_forced_balance
from benchmarks.experts.regimes import Cell, main
from benchmarks.experts.synthetic import sampled_load, zipf_popularity
from benchmarks.experts.workloads import WORKLOADS, compare, draw


@pytest.mark.parametrize("cell", [(1, 1), (1, 4), (2, 2), (3, 1)])
def test_no_plan_is_above_the_bound(cell):
    layers, count = cell
    scale = Scale(8, 32, 0.1)
    loads = made_up_loads(scale, layers, count, 1)
    bound = bound_of_forced_balance(loads, scale, count)
    for method in ("none", "quota", "eplb"):
        assert of_forced_balance(loads, scale, method, count) <= bound
    assert bound < 1.2


def _of_exact_search(micro_batches, first, seed):
    """Modelled throughput of a plan over that of the best placement: 2 nodes of 2 ranks, 8 experts, one slot."""
    scale, rng = Scale(4, 8, 0.1), np.random.default_rng(seed)
    load = sampled_load(zipf_popularity(8, 4, 2.0, rng), 4, 16384, rng)
    window = TransferWindow(scale.attention_seconds, first, micro_batches)
    plan = plan_replicas(load, scale.cluster, slots=1, shape=SHAPE, window=window)

    def seconds(placement):
        cost = layer_cost(traffic(load, placement), placement, scale.cluster, SHAPE, window).total
        return cost + 3 * scale.attention_seconds

    node, away = (plan.ranks_per_node, plan.nics_per_node), [[-1, *np.flatnonzero(plan.home != at)] for at in range(4)]
    slots = np.array([*itertools.product(*away)])[:, :, None]
    estimates = CostEstimate(load, plan.home, scale.cluster, SHAPE, window)(slots).total
    own = best = seconds(plan)
    for at in np.argsort(estimates):
        if estimates[at] / 1.2 + 3 * scale.attention_seconds >= best:  # as far as estimates are off
            break
        best = min(best, seconds(ReplicaPlacement(plan.home, slots[at], "level", *node)))
    return best / own


@pytest.mark.parametrize("first", [True, False])
def test_plans_are_near_those_of_an_exact_search(first):
    found = [_of_exact_search(count, first, seed) for count in (1, 4) for seed in (0, 1)]
    assert max(found) <= 1 and np.mean(found) >= 0.99


def test_a_cell_says_where_another_way_is_better():
    shares = {"none": 0.5, "whole": 0.95, "in parts": 0.9, "chosen": 0.945}
    assert Cell(2, 2, {}, shares).kept
    assert not Cell(2, 2, {}, shares | {"whole": 0.96}).kept


def test_bad_cells_are_one_line(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--cells", "2x"])
    assert stopped.value.code == 2
    assert "'2x' is not layers x micro-batches, such as 2x4,4x1" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_workloads_follow_from_name_seed_and_step(workload):
    load = draw(workload, 8, 64, 0, 3)
    assert (load == draw(workload, 8, 64, 0, 3)).all() and (load != draw(workload, 8, 64, 1, 3)).any()
    served = load.sum(0).reshape(8, 8).sum(1)
    hot = served.max() / served.mean()
    assert (hot > 2.5) == (workload[:2] in ("W1", "W2", "W6"))
    assert (1.9 < hot < 2.1) == (workload in ("Zipf", "lognormal"))
    assert (served.min() == 0) == (workload[:2] == "W5")
    assert (load.sum(1).max() > 1.5 * load.sum(1).min()) == (workload[:2] == "W4")


def test_a_rotating_hotspot_costs_staleness_alone():
    found = compare("W6 rotating hotspot", 8, 64, 4)
    assert found["known"][0] < 1.01 < 2 < found["quota"][0] <= found["none"][0]
    assert compare("W7 burst", 8, 64, 8)["known"][1] < 1.02


@pytest.mark.parametrize("workload", ["W1 hot expert set", "Zipf", "lognormal"])
def test_no_planner_leaves_more_than_none_where_the_hot_set_stays(workload):
    found = compare(workload, 8, 64, 2)
    assert found["quota"][0] < 1.01 and found["none"][2] == 0 < found["quota"][2]
    assert all(found["quota"][0] <= found[peer][0] <= found["none"][0] for peer in ("shadow", "prophet", "eplb"))
