"""The model of tiles: what it says for one long sequence, by hand."""

import math

import pytest

from balancing.cluster import Cluster
from balancing.sequences import AttentionShape, plan_sequences, step_cost
from balancing.sequences.cost import kv_bytes
from benchmarks.sequences.tiles import _exposed, tiled_seconds

SHAPE = AttentionShape(4096, 32, 32, 1, 11008)


def test_one_sequence_on_eight_nodes_by_hand():
    """Cards are the busiest links. Forward 2 s of a node's tile come in, backward 3.5 s, and nothing is computed."""
    cluster, length = Cluster.preset("a800-4x200g", nodes=8), 64 * 4096
    plan = plan_sequences([length], cluster, shape=SHAPE, method="zones")
    exposed, _ = _exposed(plan, [(0, 8)], cluster, kv_bytes(SHAPE), 0.0)
    side, cards = length / math.sqrt(16), cluster.nics_per_node * cluster.nic_bandwidth
    inside = side * 7 / 8 * kv_bytes(SHAPE) / cluster.intra_node_bandwidth
    forward, backward = ((across * side * kv_bytes(SHAPE) / cards) for across in (2.0, 3.5))
    assert exposed == pytest.approx(max(forward, inside) + max(backward, 3 * inside))


def test_a_step_is_never_longer_than_without_tiles():
    for nodes in (2, 8):
        cluster = Cluster.preset("a800-4x200g", nodes=nodes)
        plan = plan_sequences([nodes * 16384, *[2048] * 8 * nodes], cluster, shape=SHAPE, method="zones")
        seconds, number, rest = tiled_seconds(plan, cluster, SHAPE)
        assert rest <= seconds <= step_cost(plan, cluster, SHAPE).total
        assert nodes > 2 or not number, "a ring over two nodes sends no more than tiles"
