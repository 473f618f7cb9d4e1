"""Attention that is balanced where linear layers keep the layout that a loop has."""

from dataclasses import replace

import numpy as np
import pytest

from balancing.cluster import Cluster
from balancing.sequences import (
    AttentionShape,
    SequencePlan,
    Shard,
    plan_attention,
    plan_sequences,
    remap_traffic,
    step_cost,
)
from balancing.sequences.planners.minimal_reshard import shed_tails, zigzag, zigzag_of_rows
from balancing.sequences.sequence_plan import zigzag_areas
from tests.support.sequence_plans import nodes_of

SHAPE = AttentionShape(hidden=4096, heads=32, kv_heads=8, layers=32, ffn_hidden=14336)


def _drawn(seed: int, ranks: int, multiple: int = 1) -> tuple[tuple[int, ...], ...]:
    draw = np.random.default_rng(seed)
    return tuple(
        tuple((multiple * np.maximum(draw.lognormal(6, 1.5, draw.integers(1, 9)).astype(int), 1)).tolist())
        for _ in range(ranks)
    )


@pytest.mark.parametrize("ways", [1, 2, 4])
@pytest.mark.parametrize("seed", range(8))
def test_what_stays_is_balanced_and_few_tokens_travel(seed, ways):
    ranks = 8
    lengths = _drawn(seed, ranks // ways, 2 * ways)
    flat = [length for of_rank in lengths for length in of_rank]
    linear = zigzag(lengths, ways)
    shards = shed_tails(linear, flat, nodes_of(ranks, 2))
    plan = SequencePlan(tuple(flat), ranks, "stay", tuple(shards), tuple(linear), ("gather",) * len(flat))
    given = SequencePlan(tuple(flat), ranks, "given", tuple(linear), tuple(linear), ("gather",) * len(flat))
    assert plan.area.max() <= 1.02 * plan.area.mean() or plan.area.max() <= plan.area.mean() + max(flat)
    # A token has at most as many pairs as its document has tokens, so at least so many must travel.
    excess = np.maximum(given.area - given.area.mean(), 0).sum()
    moved = remap_traffic(plan).tokens.sum() if plan.remapped else 0
    assert excess / max(flat) * 0.9 - ranks <= moved
    assert moved <= 0.6 * sum(flat)


@pytest.mark.parametrize("ways", [2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_packed_rows_are_cut_as_a_whole(seed, ways):
    """Every token once, as much area as Megatron-LM's ranks have, in two runs of the row."""
    draw, size = np.random.default_rng(seed), 2 * ways * 64
    lengths = []
    for _ in range(3):
        cuts = np.unique([0, *draw.integers(1, size, draw.integers(0, 12)), size])
        lengths.append(tuple(np.diff(cuts).tolist()))
    flat = tuple(length for of_rank in lengths for length in of_rank)
    shards = sorted(zigzag_of_rows(tuple(lengths), ways), key=lambda shard: (shard.rank, *shard))
    plan = SequencePlan(flat, 3 * ways, "given", tuple(shards), tuple(shards), ("gather",) * len(flat))
    expected = np.concatenate([zigzag_areas(of_rank, ways) for of_rank in lengths])
    assert plan.area.tolist() == expected.tolist() and {*plan.linear_tokens.tolist()} == {size // ways}
    begins = np.concatenate([np.cumsum([0, *of_rank])[:-1] + at * size for at, of_rank in enumerate(lengths)])
    for rank in range(3 * ways):
        row, way = divmod(rank, ways)
        held = [np.arange(*(begins[one.sequence] + [one.start, one.stop])) for one in shards if one.rank == rank]
        pieces = row * size + np.arange(size).reshape(2 * ways, -1)[[way, 2 * ways - 1 - way]]
        assert np.concatenate(held).tolist() == pieces.ravel().tolist()
    with pytest.raises(ValueError, match=f"7 packed tokens do not cut into {2 * ways} pieces"):
        zigzag_of_rows(((7,),), ways)


def test_a_balanced_layout_stays_as_it_is():
    lengths = ((64, 32), (32, 64), (64, 32), (32, 64))
    linear = tuple(zigzag(lengths, 1))
    plan = plan_attention([n for of_rank in lengths for n in of_rank], linear, nodes_of(4, 1), shape=SHAPE)
    assert plan.method == "given" and not plan.remapped


def test_the_plan_is_the_cheapest_that_there_is():
    lengths, ranks = _drawn(3, 8), 8
    flat, linear = [length for of_rank in lengths for length in of_rank], zigzag(lengths, 1)
    cluster = Cluster.preset("h100-8x400g").relabel(nodes=1, ranks_per_node=ranks)
    plan = plan_attention(flat, linear, cluster, shape=SHAPE)
    assert plan.linear == tuple(linear)
    zones = plan_attention(flat, linear, cluster, shape=SHAPE, method="zones")
    assert zones.method == "zones" and zones.linear == tuple(linear)
    for other in (zones, replace(plan_sequences(flat, cluster, shape=SHAPE), linear=tuple(linear))):
        assert step_cost(plan, cluster, SHAPE).total <= step_cost(other, cluster, SHAPE).total


def test_zigzag_is_the_layout_of_transformer_engine():
    assert zigzag(((8, 4), (4,)), 2) == [
        Shard(0, 0, 2, 0), Shard(0, 6, 8, 0), Shard(0, 2, 4, 1), Shard(0, 4, 6, 1),
        Shard(1, 0, 1, 0), Shard(1, 3, 4, 0), Shard(1, 1, 2, 1), Shard(1, 2, 3, 1),
        Shard(2, 0, 1, 2), Shard(2, 3, 4, 2), Shard(2, 1, 2, 3), Shard(2, 2, 3, 3),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="pad each sequence to a multiple of 4"):
        zigzag(((6,),), 2)


def test_a_layout_without_some_tokens_is_refused():
    with pytest.raises(ValueError, match="linear layout"):
        plan_attention([8, 4], [Shard(0, 0, 8, 0), Shard(1, 0, 3, 1)], nodes_of(2, 1), shape=SHAPE)
