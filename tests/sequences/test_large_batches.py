"""Batches near 2^31 tokens, whose areas are near 2^63: exact on the host and in the kernels, or refused in one line."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from balancing.cluster import Cluster
from balancing.kernels.base import piece_ends
from balancing.kernels.pairs import MOST_TOKENS
from balancing.sequences import AttentionShape, SequencePlan, Shard, causal_area, plan_sequences
from balancing.sequences.micro_batches import document_seconds, plan_micro_batches
from balancing.sequences.plan import METHODS, plan_attention
from balancing.sequences.planners.groups import deal_areas
from balancing.sequences.planners.micro_batch_packing import whole_costs
from balancing.sequences.sequence_plan import zigzag_areas

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # of a NumPy number that wraps

CLUSTER = Cluster.preset("h200-8x400g").relabel(2, 4)
SHAPE = AttentionShape(4096, 32, 8, 32, 11008)
BATCHES: dict[str, list[int]] = {
    "one": [MOST_TOKENS],
    "one long": [MOST_TOKENS - 5000, *[500] * 10],
    "mixed": [MOST_TOKENS // 2, MOST_TOKENS // 4, *[MOST_TOKENS // 64] * 16],
}


def _area(shards: Any, rank: int) -> int:
    """In Python's integers, which have no end."""
    pairs = (
        (int(stop) * (int(stop) + 1), int(start) * (int(start) + 1)) for _, start, stop, of in shards if of == rank
    )
    return sum(last - first for last, first in pairs) // 2


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("method", METHODS)
def test_plans_near_the_limit_are_exact_and_even(batch, method):
    lengths = BATCHES[batch]
    plan = plan_sequences(lengths, CLUSTER, shape=SHAPE, method=method, chunk=2**19)
    areas = [_area(plan.attention, rank) for rank in range(plan.ranks)]
    assert plan.area.tolist() == areas
    assert sum(areas) == causal_area(lengths) == sum(length * (length + 1) // 2 for length in lengths)
    assert plan.tokens.sum() == plan.linear_tokens.sum() == sum(lengths)
    assert max(areas) / (sum(areas) / plan.ranks) < 1.02


@pytest.mark.parametrize("batch", BATCHES)
def test_tokens_that_stay_are_planned_exactly(batch):
    lengths, ranks, linear, at = BATCHES[batch], CLUSTER.world_size, [], 0
    of_rank = -(-sum(lengths) // ranks)
    for sequence, length in enumerate(lengths):
        start = 0
        while start < length:
            stop = min(length, start + of_rank - at % of_rank)
            linear.append(Shard(sequence, start, stop, at // of_rank))
            start, at = stop, at + stop - start
    plan = plan_attention(lengths, linear, CLUSTER, shape=SHAPE)
    assert plan.area.tolist() == [_area(plan.attention, rank) for rank in range(ranks)]
    assert plan.area.max() / plan.area.mean() < 1.02


def test_areas_near_the_limit_are_exact():
    assert causal_area([MOST_TOKENS]) == MOST_TOKENS * (MOST_TOKENS + 1) // 2
    window = MOST_TOKENS // 2
    assert causal_area([MOST_TOKENS], window) == sum(
        (window * (window + 1) // 2, (MOST_TOKENS - window) * (window + 1))
    )
    total = 2**31 - 8
    chunks = [total // 8 * number for number in range(9)]
    whole = [begin * (begin + 1) // 2 for begin in chunks]
    pairs = np.diff(np.array(whole, dtype=object)).tolist()
    assert zigzag_areas(np.array([total]), 4).tolist() == [pairs[rank] + pairs[7 - rank] for rank in range(4)]


def _made(lengths: list[int]) -> None:
    whole = tuple(Shard(sequence, 0, length, 0) for sequence, length in enumerate(lengths))
    SequencePlan(tuple(lengths), 1, "own", whole, whole, ("local",) * len(lengths))


ENTRANCES: dict[str, Callable[[list[int]], Any]] = {
    "plan": lambda lengths: plan_sequences(lengths, CLUSTER, shape=SHAPE),
    "plan of one rank": lambda lengths: plan_sequences(lengths, CLUSTER.relabel(1, 1), shape=SHAPE),
    "plan of the user": _made,
    "micro-batches": lambda lengths: plan_micro_batches(lengths, 1, CLUSTER, shape=SHAPE),
    "seconds": lambda lengths: document_seconds(lengths, CLUSTER, SHAPE),
    "area": causal_area,
    "area of an array": lambda lengths: causal_area(np.array(lengths, dtype=np.uint64)),
    "zigzag": lambda lengths: zigzag_areas(lengths, 2),
}


@pytest.mark.parametrize("lengths", [[6_000_000_000, 10], [MOST_TOKENS, 1], [2**63, 2**63], [2**61] * 4])
@pytest.mark.parametrize("entrance", ENTRANCES)
def test_larger_batches_are_refused(entrance, lengths):
    with pytest.raises(
        ValueError, match=rf"a batch of {sum(lengths)} tokens is more than the {MOST_TOKENS}"
    ) as refused:
        ENTRANCES[entrance](lengths)
    assert "\n" not in str(refused.value)


def test_ends_of_pieces_fit_the_kernels_tables():
    assert piece_ends([MOST_TOKENS - 1, 1]).tolist() == [0, MOST_TOKENS - 1, MOST_TOKENS]
    with pytest.raises(ValueError, match=f"has {MOST_TOKENS + 1} rows, and kernels take {MOST_TOKENS}"):
        piece_ends([MOST_TOKENS, 1])


def test_sums_of_many_large_areas_and_costs_do_not_wrap():
    areas = np.full(64, 2**61)
    assert np.bincount(deal_areas(areas, 4)).tolist() == [16] * 4
    areas[::2] -= np.arange(32) * 2**50
    total = np.bincount(deal_areas(areas, 4), areas.astype(float), 4)
    assert total.max() <= 1.001 * total.mean()
    few = whole_costs([1.0, 0.5])
    assert few.tolist() == [2**40, 2**39]
    many = whole_costs(np.ones(2**23))
    assert many[0] > 2**37 and many.sum() == many[0] * float(len(many))
