"""The split of tokens over instances: balanced, and local where possible."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing.experts import ReplicaPlacement, Splitter, contiguous_homes, split_tokens, traffic
from balancing.experts.reference import quotas
from balancing.experts.split.placed_split import SplitTables, kernels_split, place_all

quick = settings(max_examples=50)


@st.composite
def cases(draw):
    """A random placement and a load for it."""
    ranks, per_rank, slots = draw(st.integers(2, 7)), draw(st.integers(1, 3)), draw(st.integers(0, 3))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    home = contiguous_homes(ranks * per_rank, ranks)
    placed = np.full((ranks, slots), -1)
    for rank in range(ranks):
        others = generator.permutation(np.flatnonzero(home != rank))[:slots]
        placed[rank, : len(others)] = np.where(generator.random(len(others)) < 0.8, others, -1)
    split = draw(st.sampled_from(["level", "own", "even"]))
    placement = ReplicaPlacement(home, placed, split, draw(st.integers(1, ranks)))
    scale = draw(st.sampled_from([2, 50, 100_000]))
    load = generator.integers(0, scale, (ranks, len(home))) * (generator.random((ranks, len(home))) < 0.7)
    return load, placement


@settings(max_examples=25)
@given(cases(), st.integers(1, 3))
def test_quotas_are_those_of_the_reference(case, sweeps):
    load, drawn = case
    load = load % 60
    placement = ReplicaPlacement(drawn.home, drawn.slot_expert, "level", drawn.ranks_per_node)
    by_rank = split_tokens(load, placement, sweeps=sweeps).sum(0)
    for (expert, rank), tokens in quotas(load.sum(0).tolist(), placement, sweeps).items():
        assert by_rank[expert, rank] == tokens, (expert, rank)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("ranks", [6, 16, 64, 128])
def test_on_a_gpu_nothing_waits_for_the_device(ranks):
    generator, home = np.random.default_rng(0), contiguous_homes(4 * ranks, ranks)
    placed = np.stack([generator.permutation(np.flatnonzero(home != rank))[:2] for rank in range(ranks)])
    placed[1:, 0] = 0  # one expert is on all ranks
    placed[placed[:, 0] == placed[:, 1], 1] = -1
    for split in ("level", "even"):
        placement = ReplicaPlacement(home, placed, split, 8 if ranks > 8 else 4)
        for most in (5000, 2**24):
            load = generator.integers(0, most, (ranks, len(home)))
            on_device = torch.from_numpy(load).cuda()
            kernels_split(placement, on_device.device)  # kernels are compiled
            torch.cuda.set_sync_debug_mode("error")
            try:
                (placed,) = place_all([SplitTables(placement, on_device.device)], on_device.device)
                found = placed.split(on_device).served
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert np.array_equal(found.cpu().numpy(), Splitter(placement)(load))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_more_ranks_than_the_kernels_take_are_split_on_the_host():
    generator, home = np.random.default_rng(0), contiguous_homes(320, 160)
    placement = ReplicaPlacement(home, (np.arange(160)[:, None] + 1) % 160 * 2, "level", 8)
    load = generator.integers(0, 5000, (160, 320))
    on_device = torch.from_numpy(load).cuda()
    (placed,) = place_all([SplitTables(placement, on_device.device)], on_device.device)
    assert np.array_equal(placed.split(on_device).served.cpu().numpy(), Splitter(placement)(load))


@quick
@given(cases())
def test_the_compact_form_is_the_split(case):
    load, placement = case
    compact, split = Splitter(placement)(load), split_tokens(load, placement)
    for physical, expert in enumerate(placement.phys2log):
        rank = physical // (placement.homes_per_rank + placement.slots)
        assert np.array_equal(compact[:, physical], split[:, expert, rank] if expert >= 0 else np.zeros(len(load)))


@quick
@given(cases())
def test_tokens_stay_where_their_instance_has_room(case):
    """Of one expert, no rank sends tokens away while its own instance serves others; and the same of nodes."""
    load, placement = case
    split = split_tokens(load, placement)
    if placement.split == "own":
        return
    ranks = np.arange(len(load))
    own = split[ranks, :, ranks]
    sent, received = load - own, split.sum(0).T - own
    held = placement.log2phys.T >= 0
    assert not ((sent > 0) & (received > 0) & held).any()
    node = ranks // placement.ranks_per_node
    inside = node[:, None] == node[None, :]
    for number in set(node.tolist()):
        members = node == number
        away = (split * ~inside[:, None, :])[members].sum((0, 2))
        taken = (split * ~inside[:, None, :])[:, :, members].sum((0, 2))
        assert not ((away > 0) & (taken > 0)).any()


def test_what_must_cross_nodes_spreads_over_ranks():
    """Rank 2's tokens could fill up one of the two instances in its node, and all others would cross to the other."""
    placement = ReplicaPlacement(np.arange(6), [[-1], [0], [-1], [-1], [-1], [-1]], ranks_per_node=3)
    load = np.zeros((6, 6), dtype=int)
    load[:, 0] = [0, 0, 90, 30, 30, 30]
    sent = traffic(load, placement)
    assert sent[2, :2].tolist() == [45, 45]
    assert sent[3:, :2].sum(0).tolist() == [45, 45]


def test_counts_whose_proportions_would_overflow_are_refused():
    placement = ReplicaPlacement([0, 1], [[-1], [0]])
    for counts in (np.full((2, 2), 2**31), np.full((2, 2), 2**62), np.full((2, 2), 2**63, dtype=np.uint64)):
        with pytest.raises(ValueError, match="more than 2147483648 tokens"):
            split_tokens(counts, placement)
    most = np.array([[2**31 - 7, 3], [7, 2**31 - 3]])
    split = split_tokens(most, placement)
    assert np.array_equal(split.sum(2), most) and split.sum((0, 1)).tolist() == [2**31, 2**31]
    # No proportion of tokens wraps, also between nodes.
    wide = ReplicaPlacement([0, 1, 2, 3], [[-1], [0], [0], [0]], ranks_per_node=2)
    most = np.full((4, 4), 2**29)
    split = split_tokens(most, wide)
    assert np.array_equal(split.sum(2), most) and split.min() >= 0 and np.ptp(split.sum((0, 1))) <= 1


def test_a_replicated_expert_is_served_at_home_everywhere():
    """All ranks have an instance and the same number of tokens: no token needs to be sent."""
    placement = ReplicaPlacement(np.arange(4), [[-1], [0], [0], [0]])
    load = np.zeros((4, 4), dtype=int)
    load[:, 0] = 100
    assert np.array_equal(traffic(load, placement), 100 * np.eye(4, dtype=int))


def test_by_hand():
    """Expert 0 has 90 tokens and is on both ranks; rank 1 also serves the 40 of expert 1: 65 and 25 balance."""
    placement = ReplicaPlacement([0, 1], [[-1], [0]])
    load = np.array([[50, 40], [40, 0]])
    split = split_tokens(load, placement)
    assert split.sum((0, 1)).tolist() == [65, 65]
    assert split[:, 0].sum(0).tolist() == [65, 25]
    assert split[1, 0].tolist() == [15, 25], "rank 1 keeps as much as its replica may serve"


def test_the_example_of_the_package():
    """The glossary of `balancing.experts`: 3 ranks, 3 experts, one slot a rank, expert 0 is hot."""
    placement = ReplicaPlacement([0, 1, 2], [[-1], [0], [0]])
    load = np.array([[30, 10, 5]] * 3)
    assert placement.phys2log.tolist() == [0, -1, 1, 0, 2, 0]
    alone = traffic(load, ReplicaPlacement([0, 1, 2], [[-1]] * 3))
    assert alone.sum(0).tolist() == [90, 30, 15] and alone.sum() - alone.trace() == 90
    sent = traffic(load, placement)
    assert sent.sum(0).tolist() == [45, 45, 45] and sent.sum() - sent.trace() == 45
    assert split_tokens(load, placement)[:, 0].sum(0).tolist() == [45, 15, 30]


def test_even_shares_differ_by_a_token_at_most():
    placement = ReplicaPlacement(np.arange(4), [[-1], [0], [0], [-1]], "even")
    load = np.zeros((4, 4), dtype=int)
    load[:, 0] = [100, 0, 0, 1]
    assert split_tokens(load, placement)[:, 0].sum(0).tolist() == [34, 34, 33, 0]


def test_more_sweeps_are_never_worse_on_a_chain():
    """Expert i on ranks i and i + 1, everything on the first: water has to flow through all ranks."""
    ranks = 8
    placement = ReplicaPlacement(np.arange(ranks), [[-1]] + [[rank - 1] for rank in range(1, ranks)])
    load = np.full((ranks, ranks), 10)
    load[:, 0] = 1000
    fullest = [split_tokens(load, placement, sweeps=sweeps).sum((0, 1)).max() for sweeps in (1, 2, 4, 16, 200)]
    assert fullest == sorted(fullest, reverse=True)
    # The hot expert fits two ranks only, whatever else moves on.
    assert fullest[-1] == 1000 * ranks // 2


def test_many_ranks_and_large_counts():
    generator = np.random.default_rng(0)
    home = contiguous_homes(512, 256)
    placed = np.stack([generator.permutation(np.flatnonzero(home != rank))[:4] for rank in range(256)])
    placement = ReplicaPlacement(home, placed, ranks_per_node=8)
    load = generator.integers(0, 2**23, (256, 512))
    compact = Splitter(placement)(load)
    assert compact.min() >= 0 and compact.sum() == load.sum()


@pytest.mark.parametrize(
    ("load", "named"),
    [
        (np.ones((3, 4), dtype=int), "shape"),
        (np.ones((2, 4)), "whole numbers"),
        (np.full((2, 4), -1), "not negative"),
    ],
)
def test_bad_loads(load, named):
    placement = ReplicaPlacement([0, 0, 1, 1], [[-1], [-1]])
    with pytest.raises(ValueError, match=named):
        split_tokens(load, placement)


def test_no_sweeps():
    with pytest.raises(ValueError, match="sweeps=0"):
        Splitter(ReplicaPlacement([0, 1], [[-1], [-1]]), sweeps=0)
