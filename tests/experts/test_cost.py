"""The cost model: the paper's equations by hand, links of two speeds, and the load from which a replica pays."""

import math
from typing import ClassVar

import numpy as np
import pytest

from balancing.cluster import Cluster
from balancing.cluster.links import exchange_seconds
from balancing.experts import (
    ExpertShape,
    ReplicaPlacement,
    break_even_tokens,
    contiguous_homes,
    layer_cost,
    plan_replicas,
    traffic,
)
from balancing.experts.cost import TransferWindow, copy_seconds
from balancing.experts.planners.prophet import paper_seconds
from balancing.experts.planners.quota.estimate import CostEstimate
from benchmarks.experts.synthetic import sampled_load, zipf_popularity

SHAPE = ExpertShape(hidden=1000, ffn_hidden=500, bytes_per_parameter=2)
# NVLink 4 and InfiniBand at their data-sheet rates, and what an H200 reaches in bf16.
H200 = Cluster(2, 8, 8, 450e9, 50e9, 790e12, 141e9)


def nodes(count, per_node, nics=1, inside=100.0, across=10.0):
    """Slow links with round numbers."""
    return Cluster(count, per_node, nics, inside, across, 1e9, 1e9)


def test_an_expert_has_two_or_three_matrices():
    assert SHAPE.parameters == 3 * 1000 * 500
    assert ExpertShape(1000, 500, 2, gated=False).parameters == 2 * 1000 * 500
    assert SHAPE.weight_bytes == 3e6
    # Multiply and add for each parameter.
    assert SHAPE.forward_seconds(nodes(1, 2)) == pytest.approx(2 * 1.5e6 / 1e9)


class TestBreakEven:
    """Figures known for H200: 2 bytes and 2 FLOP a parameter forward; 8 bytes and 6 FLOP with backward."""

    def tokens(self, shape=SHAPE, **options):
        return break_even_tokens(H200, shape, **options)

    def test_forward_only_over_nvlink(self):
        assert self.tokens(same_node=True, backward=False) == pytest.approx(1750, rel=0.01)

    def test_training_over_nvlink(self):
        """Weights are sent twice, gradients once in float32."""
        assert self.tokens(same_node=True) == pytest.approx(2340, rel=0.01)

    def test_between_nodes(self):
        assert self.tokens(same_node=False, backward=False) == pytest.approx(16_000, rel=0.02)
        assert self.tokens(same_node=False) == pytest.approx(21_000, rel=0.01)

    def test_it_does_not_depend_on_the_size_of_the_expert(self):
        large = ExpertShape(7168, 2048, 2, gated=False)
        assert self.tokens(large, same_node=True) == pytest.approx(self.tokens(same_node=True))

    def test_hidden_copies_pay_at_once(self):
        copy = 8 * SHAPE.parameters / H200.intra_node_bandwidth
        assert self.tokens(same_node=True, hidden_under=copy / 3) == 0
        assert self.tokens(same_node=True, hidden_under=copy / 6) == pytest.approx(2340 / 2, rel=0.01)

    def test_copies_that_serve_several_micro_batches(self):
        assert self.tokens(same_node=True, micro_batches=8) == pytest.approx(2340 / 8, rel=0.01)

    def test_a_rank_with_two_nics_copies_twice_as_fast(self):
        two = Cluster(2, 8, 16, 450e9, 50e9, 790e12, 141e9)
        assert break_even_tokens(two, SHAPE, same_node=False) == pytest.approx(self.tokens(same_node=False) / 2)


class TestExchange:
    def test_one_node_is_equation_1(self):
        """The busiest receiver: rank 0 gets 30 + 20 bytes at 100 a second."""
        table = np.array([[99, 10, 0], [30, 99, 0], [20, 5, 99]])
        assert exchange_seconds(table, nodes(1, 3)) == pytest.approx(50 / 100)

    def test_a_sender_can_be_the_busiest(self):
        table = np.array([[0, 40, 40], [0, 0, 0], [0, 0, 0]])
        assert exchange_seconds(table, nodes(1, 3)) == pytest.approx(80 / 100)

    def test_ranks_share_their_nic(self):
        """Two nodes of two: each rank sends 10 bytes to the other node, 20 through the one NIC, at 10 a second."""
        table = np.zeros((4, 4))
        table[[0, 1], [2, 3]] = 10
        assert exchange_seconds(table, nodes(2, 2)) == pytest.approx(2.0)
        assert exchange_seconds(table, nodes(2, 2, nics=2)) == pytest.approx(1.0)
        assert exchange_seconds(table, nodes(2, 2, nics=4)) == pytest.approx(0.5)

    def test_links_and_nics_work_at_once(self):
        table = np.zeros((4, 4))
        table[0, 1], table[0, 2] = 300, 10
        assert exchange_seconds(table, nodes(2, 2)) == pytest.approx(3.0)

    def test_nothing_takes_no_time(self):
        assert exchange_seconds(np.eye(4) * 1e9, nodes(2, 2)) == 0
        assert exchange_seconds(np.eye(2) * 1e9, Cluster(2, 1, 1, math.inf, 10.0, 1e9, 1e9)) == 0

    def test_more_ranks_than_the_cluster(self):
        with pytest.raises(ValueError, match="8 ranks do not fit a cluster of 4"):
            exchange_seconds(np.zeros((8, 8)), nodes(2, 2))


class TestTransfers:
    """Expert 0 of rank 0 on ranks 1, 2 and 3, in two nodes of two."""

    placement = ReplicaPlacement(np.arange(4), [[-1], [0], [0], [0]], ranks_per_node=2)

    def test_handing_on_enters_a_node_once(self):
        assert copy_seconds(self.placement, nodes(2, 2)) == pytest.approx(1 / 10)

    def test_one_node_takes_the_time_of_one_copy(self):
        assert copy_seconds(self.placement, nodes(1, 4)) == pytest.approx(1 / 100)

    def test_gradients_are_float32(self):
        cost = layer_cost(np.zeros((4, 4), dtype=int), self.placement, nodes(2, 2), SHAPE)
        assert cost.trans == pytest.approx(SHAPE.weight_bytes / 10) and cost.agg == pytest.approx(2 * cost.trans)


class TestEquations:
    """Four devices; s = 2 experts to all but n = 1, so 2 (4 - 1) = 6."""

    given: ClassVar = {
        "received": np.array([6, 2, 0, 1]),
        "computed": np.array([10, 4, 3, 3]),
        "copies": 6,
        "bandwidth": 5.0,
        "throughput": 2.0,
        "input_bytes": 10.0,
        "parameter_bytes": 20.0,
        "gradient_bytes": 40.0,
    }

    def test_equation_6(self):
        all_to_all, forward, trans, agg = 6 * 10 / 5, 10 / 2, 6 * 20 / (4 * 5), 6 * 40 / (4 * 5)
        assert paper_seconds(**self.given) == pytest.approx(4 * all_to_all + 3 * forward + trans + agg)

    def test_equation_8(self):
        """Trans of 6 s under 5 + 0.5 s, Agg of 12 s under 10 + 1 s."""
        assert paper_seconds(**self.given, hidden_under=0.5) == pytest.approx(4 * 12 + 3 * 5 + 0.5 + 1)
        assert paper_seconds(**self.given, hidden_under=9) == pytest.approx(4 * 12 + 3 * 5)

    def test_one_node_of_ours_is_the_papers(self):
        load = np.array([[30, 2, 3], [25, 10, 2], [20, 3, 10]])
        cluster, placement = nodes(1, 3), ReplicaPlacement(np.arange(3), np.full((3, 1), -1))
        moved = traffic(load, placement)
        paper = paper_seconds(
            moved.sum(0) - np.diag(moved),
            moved.sum(0),
            0,
            bandwidth=100.0,
            throughput=1 / SHAPE.forward_seconds(cluster),
            input_bytes=SHAPE.hidden * 2,
            parameter_bytes=SHAPE.weight_bytes,
            gradient_bytes=4 * SHAPE.parameters,
        )
        assert layer_cost(moved, placement, cluster, SHAPE).total == pytest.approx(paper)

    def test_what_hides_and_what_sticks_out(self):
        placement = ReplicaPlacement(np.arange(2), [[-1], [0]])
        cluster, tokens = nodes(1, 2, inside=1e6), np.array([[100, 0], [0, 100]])
        forward = 100 * 3e6 / 1e9
        trans, agg = 3e6 / 1e6, 6e6 / 1e6
        exposed = layer_cost(tokens, placement, cluster, SHAPE)
        assert exposed.exposed == pytest.approx(trans + agg)
        assert exposed.total == pytest.approx(3 * forward + trans + agg)
        hidden = layer_cost(tokens, placement, cluster, SHAPE, TransferWindow(hidden_under=1.0))
        assert hidden.trans_exposed == pytest.approx(trans - forward - 1.0)
        assert hidden.agg_exposed == pytest.approx(agg - 2 * forward - 2.0)
        long = layer_cost(tokens, placement, cluster, SHAPE, TransferWindow(hidden_under=3.0))
        assert long.exposed == 0
        assert long.slowed == 0, "no token is sent"
        first = layer_cost(tokens, placement, cluster, SHAPE, TransferWindow(hidden_under=1.0, first=True))
        assert (first.trans_exposed, first.agg_exposed) == (pytest.approx(trans - 1.0), pytest.approx(agg - 2.0))
        shared = layer_cost(tokens, placement, cluster, SHAPE, TransferWindow(micro_batches=4))
        assert shared.total == pytest.approx(3 * forward + (trans + agg) / 4)


def test_hidden_transfers_hold_up_tokens():
    """All-to-alls take half of the time: a transfer of 1 s takes 4/3 s and shares the link for 2/3 s of them."""
    placement = ReplicaPlacement(np.arange(2), [[-1], [0]])
    cluster, tokens = nodes(1, 2, inside=9e6), np.array([[50, 50], [50, 50]])
    cost = layer_cost(tokens, placement, cluster, SHAPE, TransferWindow(hidden_under=10.0))
    exchanging = 4 * cost.all_to_all
    window = TransferWindow(hidden_under=exchanging / 3 - cost.forward, micro_batches=2)
    even = layer_cost(tokens, placement, cluster, SHAPE, window)
    assert (even.trans + even.agg, even.exposed) == (pytest.approx(1.0), pytest.approx((1.0 - exchanging) / 2))
    assert even.slowed == pytest.approx(1 / 3)
    assert even.total == pytest.approx(exchanging + 3 * even.forward + even.exposed + 1 / 6)


@pytest.mark.parametrize("nics", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [{}, {"hidden_under": 0.0}, {"hidden_under": 1e-2, "micro_batches": 4}, {"hidden_under": 1e-2, "first": True}],
)
def test_the_estimate_is_near_the_cost(nics, options):
    """Over placements that are good, bad and empty; where nothing can be split, it is the cost."""
    generator = np.random.default_rng(nics)
    for ranks, per_node in ((4, 4), (8, 4), (6, 4), (8, 1)):
        cluster = nodes(-(-ranks // per_node), per_node, nics, inside=1e9, across=1e8)
        load = sampled_load(zipf_popularity(2 * ranks, ranks, 2.0, generator), ranks, 999, generator)
        home = generator.permutation(contiguous_homes(2 * ranks, ranks))
        odd = np.array([[generator.choice(np.flatnonzero(home != rank)), -1] for rank in range(ranks)])
        good, none = (plan_replicas(load, cluster, slots=2, home=home, method=each) for each in ("quota", "none"))
        placements = good, none, ReplicaPlacement(home, odd, ranks_per_node=per_node)
        slots = np.stack([placement.slot_expert for placement in placements])
        window = TransferWindow(**options)
        costs = [layer_cost(traffic(load, each), each, cluster, SHAPE, window).total for each in placements]
        estimates = CostEstimate(load, home, cluster, SHAPE, window)(slots).total
        assert estimates == pytest.approx(costs, rel=0.2) and estimates[1] == pytest.approx(costs[1])


def test_no_tokens_under_nothing_take_no_time():
    placement = ReplicaPlacement(np.arange(2), [[-1], [-1]])
    cost = layer_cost(np.zeros((2, 2), dtype=int), placement, nodes(1, 2), SHAPE, TransferWindow(hidden_under=0.0))
    assert cost.total == 0


def test_a_size_that_is_none():
    with pytest.raises(ValueError, match="ffn_hidden=0 must be positive"):
        ExpertShape(1000, 0, 2)
