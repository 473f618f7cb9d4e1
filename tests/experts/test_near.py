"""Replicas that keep tokens in their node: beyond even routing, and never at a predicted loss."""

import numpy as np
import pytest

from balancing.cluster import Cluster
from balancing.experts import ExpertShape, contiguous_homes, plan_replicas, traffic
from balancing.experts.cost import TransferWindow, layer_cost
from balancing.experts.planners.quota.near import near_slots
from balancing.experts.planners.quota.planner import QuotaPlanner
from benchmarks.experts.emulated_workload import Scale, made_up_loads
from benchmarks.experts.modelled import of_forced_balance
from benchmarks.experts.synthetic import sampled_load, zipf_popularity

SHAPE = ExpertShape(hidden=1024, ffn_hidden=2048, bytes_per_parameter=2)


def test_by_hand():
    """Two nodes of two ranks, an expert each. Most tokens leave node 0 for expert 3 (9 + 8), then node 1 for expert 0
    (5 + 5), then node 0 for expert 2 (2 + 2). Rank 1 of node 0 serves least."""
    load = np.array([[9, 1, 2, 9], [9, 1, 2, 8], [5, 1, 3, 9], [5, 0, 3, 9]])
    empty = np.full((4, 1), -1)
    one, three = near_slots(load, np.arange(4), [empty], ranks_per_node=2, numbers=(1, 3))
    assert one.tolist() == [[-1], [3], [-1], [-1]]
    assert three.tolist() == [[2], [3], [0], [-1]]
    taken = np.array([[-1], [3], [-1], [-1]])
    (after,) = near_slots(load, np.arange(4), [taken], ranks_per_node=2, numbers=(9,))
    assert after.tolist() == [[2], [3], [0], [1]], "as many as there are slots and tokens that leave"
    assert near_slots(load, np.arange(4), [np.zeros((4, 0), dtype=int)], ranks_per_node=2, numbers=(1,)) == []


@pytest.mark.parametrize("seed", range(24))
def test_the_predicted_cost_never_grows(seed, monkeypatch):
    """Against the same planner without these placements, over machines, loads and numbers of micro-batches."""
    draw = np.random.default_rng(seed)
    nodes, per_node = int(draw.integers(1, 5)), int(draw.choice([2, 4, 8]))
    cluster = Cluster.sheet(["h100-8x400g", "a800-4x200g"][seed % 2]).relabel(nodes, per_node)
    ranks, experts = nodes * per_node, nodes * per_node * int(draw.integers(1, 5))
    popularity = zipf_popularity(experts, ranks, float(draw.uniform(1, min(3.0, 0.9 * ranks))), draw)
    load = sampled_load(popularity, ranks, int(draw.integers(100, 60000)), draw)
    hidden, first = float(draw.choice([0.0, 1e-4, 2e-3])), bool(seed % 3 == 0)
    window = TransferWindow(hidden, first, int(draw.choice([1, 2, 8])))

    def planned():
        plan = plan_replicas(load, cluster, slots=int(seed % 3 + 1), shape=SHAPE, window=window, min_gain=0.0)
        return plan, layer_cost(traffic(load, plan), plan, cluster, SHAPE, window).total

    plan, cost = planned()
    assert planned()[0] == plan
    monkeypatch.setattr(QuotaPlanner, "_near", lambda self, counts, total, picks: [])
    assert cost <= planned()[1]


def test_tokens_stay_in_their_node_where_a_transfer_serves_many_micro_batches():
    """16 ranks on two nodes: more than the throughput of even routing with 8 micro-batches, and ranks stay balanced."""
    scale = Scale(16, 32, 0.1)
    loads = made_up_loads(scale, 4, 2, 2)
    assert of_forced_balance(loads, scale, "quota", 8) >= 1.03
    assert of_forced_balance(loads, scale, "quota", 2) >= 0.99


def test_where_all_ranks_share_a_node_nothing_changes(monkeypatch):
    cluster = Cluster.sheet("h100-8x400g").relabel(1, 8)
    draw = np.random.default_rng(0)
    load = sampled_load(zipf_popularity(16, 8, 2.0, draw), 8, 4096, draw)
    plan = plan_replicas(load, cluster, slots=2, shape=SHAPE, window=TransferWindow(1e-3, micro_batches=8))
    monkeypatch.setattr("balancing.experts.planners.quota.planner.near_slots", None)
    assert plan_replicas(load, cluster, slots=2, shape=SHAPE, window=TransferWindow(1e-3, micro_batches=8)) == plan
    assert contiguous_homes(16, 8).tolist() == plan.home.tolist()
