"""Groups of a large domain: equally many micro-batches in each, and all ranks as even as under one plan."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing.cluster import Cluster
from balancing.sequences import AttentionShape, causal_area, plan_sequences
from balancing.sequences.planners.groups import deal_areas, number_of_groups
from balancing_tools.whatif.lengths import DISTRIBUTIONS, draw_batch

SHAPE = AttentionShape(4096, 32, 8, 32, 14336)


def area_of_ranks(samples: list[tuple[int, ...]], ranks: int, groups: int, method: str) -> np.ndarray:
    """Area of every rank, where each group has a plan of its own; SequencePlan checks that plan."""
    area = np.array([causal_area(sample) for sample in samples])
    dealt, found = deal_areas(area, groups), []
    assert (np.bincount(dealt, minlength=groups) == len(samples) // groups).all()
    per_node = min(8, ranks // groups)
    cluster = Cluster.sheet("h100-8x400g").relabel(ranks // groups // per_node, per_node)  # which balances area
    for group in range(groups):
        lengths = [length for at in np.flatnonzero(dealt == group).tolist() for length in samples[at]]
        plan = plan_sequences(lengths, cluster, shape=SHAPE, method=method)
        assert int(plan.linear_tokens.max()) == -(-sum(lengths) // plan.ranks)
        found.append(plan.area)
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("context", "distribution"),
    [
        *((1, distribution) for distribution in DISTRIBUTIONS),
        *(pytest.param(4, distribution, marks=pytest.mark.exhaustive) for distribution in DISTRIBUTIONS),
    ],
)
def test_groups_are_as_even_as_one_plan(context, distribution):
    """At most 5 % over the mean, or within 1 % of one plan over all ranks."""
    random, ranks = np.random.default_rng(0), 256 * context
    samples = [draw_batch(distribution, 8192 * context, random) for _ in range(ranks // context)]
    groups = number_of_groups(len(samples))
    assert groups == 8
    fullest = {}
    for number in (1, groups):
        area = area_of_ranks(samples, ranks, number, "chunks")
        assert area.sum() == causal_area([length for sample in samples for length in sample])
        fullest[number] = area.max() / area.mean()
    assert fullest[groups] <= max(1.05, 1.01 * fullest[1]), fullest


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_long_samples_are_dealt_evenly(distribution):
    """A sample may be one document of 128k tokens, with many times the area of others."""
    random = np.random.default_rng(1)
    area = np.array([causal_area(draw_batch(distribution, 131072, random)) for _ in range(512)])
    groups = number_of_groups(512)
    total = np.bincount(deal_areas(area, groups), area, groups)
    assert groups == 16 and total.max() / total.mean() <= 1.01


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 3000), max_size=8), min_size=8, max_size=8), st.sampled_from((1, 2, 4)),
    st.sampled_from(("chunks", "zones")),
)  # fmt: skip
def test_every_group_of_ragged_samples_is_planned(cuts, groups, method):
    """Every token is in one plan, and groups differ by less than the largest sample."""
    samples = []
    for own in cuts:
        ends = sorted({end for end in np.cumsum(own).tolist() if end < 4096} | {4096})
        samples.append(tuple(np.diff([0, *ends]).tolist()))
    area = area_of_ranks(samples, 16, groups, method).reshape(groups, -1).sum(1)
    assert area.sum() == sum(map(causal_area, samples))
    assert area.max() - area.min() <= max(map(causal_area, samples))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 10**9), min_size=12, max_size=12), st.sampled_from((1, 2, 3, 4, 6, 12)))
def test_groups_have_equally_many_and_equal_areas(area, groups):
    dealt = deal_areas(np.array(area), groups)
    assert (np.bincount(dealt, minlength=groups) == 12 // groups).all()
    total = np.bincount(dealt, area, groups)
    assert total.max() - total.min() <= max(area)
    assert (dealt == deal_areas(np.array(area), groups)).all()


def test_what_does_not_divide_is_one_line():
    with pytest.raises(ValueError, match="7 micro-batches do not divide into 2 equal groups"):
        deal_areas(np.ones(7), 2)


def test_numbers_of_groups():
    """Equal groups of 32 micro-batches, or somewhat more."""
    assert [number_of_groups(members) for members in (1, 32, 63, 64, 96, 100, 1024)] == [1, 1, 1, 2, 3, 2, 32]
    assert number_of_groups(1031) == 1, "a prime number of micro-batches is not cut into single ones"
    for members in range(1, 3000):
        number = number_of_groups(members)
        assert members % number == 0 and (number == 1 or members // number >= 32)


@pytest.mark.parametrize("backend, in_order", [("gloo", False), ("cpu:gloo", False), ("nccl", True), ("fake", True),
                                               ("cpu:gloo,cuda:nccl", True), ("cuda:nccl,cpu:gloo", True)])  # fmt: skip
def test_messages_run_in_order_over_nccl_in_whatever_order_backends_are_named(monkeypatch, backend, in_order):
    from balancing.sequences.engine import transport

    monkeypatch.setattr(transport, "connect", lambda process_group, peers=None: None)
    for name, found in {"get_backend": backend, "get_rank": 0, "get_process_group_ranks": [0]}.items():
        monkeypatch.setattr(transport.dist, name, lambda group=None, found=found: found)
    assert transport.Transport(object()).in_order is in_order
