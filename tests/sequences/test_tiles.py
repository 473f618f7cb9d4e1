"""The model of tiles: what it says for one long sequence, by hand."""

from functools import partial

import pytest

from balancing.cluster import Cluster
from balancing.sequences import AttentionShape, plan_sequences, step_cost
from balancing.sequences.cost import kv_bytes
from benchmarks.sequences.tile_placement import place_tiles
from benchmarks.sequences.tiles import _exposed, tiled_seconds

SHAPE = AttentionShape(4096, 32, 32, 1, 11008)


def test_one_sequence_on_eight_nodes_by_hand():
    """Queries stay at home, cards are the busiest links, and nothing is computed.

    Node i holds blocks i and 15 - i of 16 and receives the keys of 14 - i others. Block i is needed by 7 other nodes,
    block 15 - i by i of them, and as many return its gradients: 14 blocks at most forward, 21 on each node backward."""
    cluster, length = Cluster.preset("a800-4x200g", nodes=8), 64 * 4096
    plan = plan_sequences([length], cluster, shape=SHAPE, method="zones")
    exposed, _ = _exposed(plan, [(0, 8)], cluster, kv_bytes(SHAPE), 0.0, partial(place_tiles, steps=0))
    cards = cluster.nics_per_node * cluster.nic_bandwidth
    inside = length * 7 / 8 * kv_bytes(SHAPE) / cluster.intra_node_bandwidth
    forward, backward = (blocks / 16 * length * kv_bytes(SHAPE) / cards for blocks in (14, 21))
    assert exposed == pytest.approx(max(forward, inside) + max(backward, 3 * inside))


@pytest.mark.parametrize("nodes", [3, 4])
def test_placed_tiles_are_even_and_counted(nodes):
    """What travels, counted again from the placement alone."""
    placed = place_tiles(nodes, steps=20_000)
    blocks = 2 * nodes
    assert sorted(placed.node) == [(q, k) for q in range(blocks) for k in range(q + 1)]
    areas = [sum(1 - (q == k) / 2 for (q, k), at in placed.node.items() if at == node) for node in range(nodes)]
    assert placed.uneven == max(areas) * nodes / sum(areas) <= 1.03
    moved = {}  # (pass, source, target) -> units
    for node in range(nodes):
        for side in (0, 1):
            for block in {tile[side] for tile, at in placed.node.items() if at == node}:
                owner = min(block, blocks - 1 - block)
                for at, (there, back) in enumerate([[(0.5, 0.5), (1.0, 0.5)], [(1.0, 0.0), (1.0, 1.0)]][side]):
                    for source, target, amount in ((owner, node, there), (node, owner, back)):
                        moved[at, source, target] = moved.get((at, source, target), 0) + amount / blocks
    for at, busiest in enumerate((placed.forward, placed.backward)):
        loads = [
            sum(amount for key, amount in moved.items() if key[0] == at and key[end] == node != key[3 - end])
            for end in (1, 2)
            for node in range(nodes)
        ]
        assert busiest == pytest.approx(max(loads))
    assert placed.forward < 1 - 1 / nodes and placed.backward < 2 * (1 - 1 / nodes), "less than a ring sends"


def test_a_step_is_never_longer_than_without_tiles():
    for nodes in (2, 8):
        cluster = Cluster.preset("a800-4x200g", nodes=nodes)
        plan = plan_sequences([nodes * 16384, *[2048] * 8 * nodes], cluster, shape=SHAPE, method="zones")
        seconds, number, rest = tiled_seconds(plan, cluster, SHAPE, partial(place_tiles, steps=2000))
        assert rest <= seconds <= step_cost(plan, cluster, SHAPE).total
        assert nodes > 2 or not number, "a ring over two nodes sends no more than tiles"
