"""What peers move, by hand: all-gather in two levels, heads and a ring; and what a ring exposes."""

import pytest

from balancing.cluster import Cluster
from balancing.sequences import AttentionShape, plan_sequences, step_cost
from balancing.sequences.cost import attention_seconds, kv_bytes, linear_seconds, tile_area
from benchmarks.sequences.peers import all_gather_seconds, heads_and_ring

SHAPE = AttentionShape(4096, 32, 4, 2, 11008)
# Two nodes of 8 ranks with 4 network cards each; launches, messages and the host cost nothing.
CLUSTER = Cluster(
    2, 8, 4, 200e9, 25e9, 300e12, 80e9, launch_seconds=0.0, message_seconds=0.0, host_seconds=0.0
)  # fmt: skip


def test_an_all_gather_enters_a_node_once_over_all_cards():
    lengths = (16384, 49152)
    plan = plan_sequences(lengths, CLUSTER, shape=SHAPE, method="gather")
    compute = attention_seconds(float(tile_area(plan).max()), CLUSTER, SHAPE) + linear_seconds(4096, CLUSTER, SHAPE)
    for two_level, share in ((True, 1 / 2), (False, 15 / 16)):
        network = 65536 * share * kv_bytes(SHAPE) / (4 * 25e9)
        seconds = all_gather_seconds(lengths, CLUSTER, SHAPE, plan, two_level=two_level)
        assert seconds == pytest.approx(compute + SHAPE.layers * 3 * network)  # keys twice, gradients once


def test_heads_are_exchanged_among_as_many_ranks_as_there_are_key_value_heads():
    found = heads_and_ring((65536,), CLUSTER, SHAPE)
    assert (found.together, found.plan.ranks, found.cluster.ranks_per_node) == (4, 4, 2)
    assert set(found.plan.exchange) == {"ring"} and found.plan.tokens.tolist() == [16384] * 4
    sent = 4096 * 3 / 4 * 2 * (32 + 4) * 256 / 200e9  # q, k, v and the output, of 128 numbers in bf16, for 3 of 4 ranks
    assert found.exchange == pytest.approx(SHAPE.layers * 2 * sent)
    assert found.seconds(SHAPE) > found.exchange + linear_seconds(4096, CLUSTER, SHAPE)


def test_a_ring_that_is_hidden_exposes_its_last_gradients_alone():
    """One round of them of 15, as wide as keys between nodes."""
    plan = plan_sequences([65536], CLUSTER, shape=SHAPE, method="ring")
    cost = step_cost(plan, CLUSTER, SHAPE, routed=False, gradient_width=1.0)
    one_round = 4096 * kv_bytes(SHAPE) / 25e9
    assert cost.exchange == pytest.approx(SHAPE.layers * 3 * 15 * one_round)
    assert cost.exposed == pytest.approx(SHAPE.layers * one_round)
