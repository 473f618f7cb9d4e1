"""Benchmarks of regimes and of public workloads: the bound holds, plans are near the best, workloads are as named."""

import numpy as np
import pytest

from benchmarks.experts.beyond_even import of_forced_balance
from benchmarks.experts.emulated_workload import Scale, made_up_loads
from benchmarks.experts.regimes import bound_of_forced_balance, of_exact_search
from benchmarks.experts.workloads import WORKLOADS, draw


@pytest.mark.parametrize("cell", [(1, 1), (1, 4), (2, 2), (3, 1)])
def test_no_plan_is_above_the_bound(cell):
    layers, count = cell
    scale = Scale(8, 32, 0.1)
    loads = made_up_loads(scale, layers, count, 1)
    bound = bound_of_forced_balance(loads, scale, count)
    for method in ("none", "quota", "eplb"):
        assert of_forced_balance(loads, scale, method, count) <= bound
    assert bound < 1.2


@pytest.mark.parametrize("first", [True, False])
def test_plans_are_near_those_of_an_exact_search(first):
    found = [of_exact_search(count, first=first, imbalance=2.0, seed=seed) for count in (1, 4) for seed in (0, 1)]
    assert max(found) <= 1 and np.mean(found) >= 0.99


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
