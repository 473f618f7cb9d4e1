"""Experts with measured rates: rows of a group against the rate, and the host's time to start the products of each."""

from dataclasses import replace

import numpy as np
import pytest

from balancing.cluster import Cluster
from balancing.cluster.presets import H100
from balancing.experts import ExpertShape, break_even_tokens, layer_cost, plan_replicas, traffic
from balancing.experts.cost import TransferWindow
from balancing.experts.placement import ReplicaPlacement, contiguous_homes
from balancing.experts.planners.quota.estimate import CostEstimate
from benchmarks.experts.synthetic import sampled_load, zipf_popularity

SHAPE = ExpertShape(4096, 14336, 2)
FREE_HOST = replace(H100, gemm="torch")


def machine(ranks: int, gemm: str = "torch") -> Cluster:
    return Cluster.preset("h100-8x400g").with_gemm(gemm).relabel(1, ranks)


def test_a_ranks_experts_take_their_rows_and_more_for_each():
    cluster = machine(8)
    grouped = cluster.rates.grouped
    flops = 2 * SHAPE.parameters
    for rows, measured in dict(H100.products)["torch"].rows:
        assert SHAPE.rank_seconds(rows, 1, cluster) == pytest.approx(rows * flops / measured, rel=0.1)
        assert SHAPE.rank_seconds(8 * rows, 8, cluster) == pytest.approx(8 * rows * flops / measured, rel=0.1)
    assert SHAPE.rank_seconds(0, 1, cluster) == pytest.approx(grouped.group * SHAPE.forward_seconds(cluster))
    sheet = replace(cluster, rates=None)
    assert SHAPE.rank_seconds(100, 5, sheet) == 100 * SHAPE.forward_seconds(sheet) == 100 * flops / sheet.flops


def test_fine_experts_wait_for_the_host():
    """16 and 18 experts of Qwen3-30B by Transformer Engine and one by one, forward and backward, 32k rows."""
    fine = ExpertShape(2048, 768, 2)
    for gemm, measured in (("te", (4.67e-3, 5.19e-3)), ("sequential", (5.56e-3, 5.73e-3))):
        for experts, seconds in zip((16, 18), measured, strict=True):
            assert 3 * fine.rank_seconds(32768, experts, machine(8, gemm)) == pytest.approx(seconds, rel=0.1)
    assert 3 * fine.rank_seconds(32768, 16, machine(8)) == pytest.approx(1.889e-3, rel=0.1), "one product of all groups"


def test_a_replica_costs_the_rank_that_holds_it():
    cluster, homes = machine(4), contiguous_homes(8, 4)
    load = np.full((4, 8), 1000)
    slots = np.full((4, 1), -1)
    none = ReplicaPlacement(homes, slots, ranks_per_node=4)
    slots[3, 0] = 0
    one = ReplicaPlacement(homes, slots, ranks_per_node=4)
    even = np.full((4, 4), 2000)
    before, after = (layer_cost(even, placement, cluster, SHAPE).forward for placement in (none, one))
    assert after - before == pytest.approx(cluster.rates.grouped.group * SHAPE.forward_seconds(cluster))
    window = TransferWindow()
    estimate = CostEstimate(load, homes, cluster, SHAPE, window)(np.full((1, 4, 1), -1))
    exact = layer_cost(traffic(load, none), none, cluster, SHAPE, window)
    assert estimate.forward[0] == pytest.approx(exact.forward), "without replicas the estimate is exact"


def test_the_least_rows_of_a_replica_come_from_the_table():
    """Where a transfer is hidden, a replica must serve as many rows as one more group costs."""
    cluster = machine(8)
    hidden = break_even_tokens(cluster, SHAPE, same_node=True, hidden_under=1.0)
    assert hidden == pytest.approx(cluster.rates.grouped.group) and 500 < hidden < 1500
    assert break_even_tokens(replace(cluster, rates=None), SHAPE, same_node=True, hidden_under=1.0) == 0


def test_few_rows_get_no_replicas_and_many_do():
    """Transfers are hidden, so that with one rate few rows get replicas as well."""
    homes = 4
    popularity = zipf_popularity(homes * 8, 8, 2.0, np.random.default_rng(1))
    options = {"slots": 2, "shape": SHAPE, "window": TransferWindow(1.0)}
    found = {}
    for tokens in (200, 60_000):
        load = sampled_load(popularity, 8, tokens, np.random.default_rng(2))
        for rates in (FREE_HOST, None):
            plan = plan_replicas(load, replace(machine(8), rates=rates), **options)
            found[tokens, rates is None] = plan.replicas
    assert found[200, False] < found[200, True] and found[60_000, False] > 0


def test_a_busy_host_gets_no_replicas():
    """Where the host takes longer than the products, more groups make a layer slower."""
    load = sampled_load(zipf_popularity(128, 8, 2.0, np.random.default_rng(1)), 8, 4096, np.random.default_rng(2))
    options = {"slots": 2, "shape": ExpertShape(2048, 768, 2), "window": TransferWindow(1.0)}
    assert plan_replicas(load, machine(8, "te"), **options).replicas == 0
    assert plan_replicas(load, replace(machine(8), rates=None), **options).replicas > 0


def test_products_that_nobody_measured_leave_the_rates_as_they_are():
    cluster = Cluster.preset("h100-8x400g")
    assert cluster.rates.gemm == "te" and cluster.with_gemm("unknown") == cluster
    sheet = replace(cluster, rates=None)
    assert sheet.with_gemm("torch") == sheet
    with pytest.raises(ValueError, match="has no entry in rates"):
        replace(H100, gemm="unknown")
