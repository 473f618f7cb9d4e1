"""Late copies: they bring every rank to the goal with few copies, and none are made that are not needed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from balancing.cluster import Cluster
from balancing.experts import (
    ExpertShape,
    ReplicaPlacement,
    Splitter,
    add_late_copies,
    late_tokens,
    plan_replicas,
    split_tokens,
    traffic,
)
from tests.experts.test_split import cases

GOAL = 1.04


@st.composite
def late_cases(draw):
    load, drawn = draw(cases())
    placement = ReplicaPlacement(drawn.home, drawn.slot_expert, "level", drawn.ranks_per_node)
    return load, placement, draw(st.integers(0, 2)), draw(st.sampled_from([0, 1, 20, 5000]))


@settings(max_examples=80)
@given(late_cases())
def test_late_copies_serve_every_token_and_never_make_a_rank_busier(case):
    load, placement, slots, least = case
    late = add_late_copies(load, placement, slots=slots, goal=GOAL, least=least)
    assert late == add_late_copies(load.copy(), late, slots=slots, goal=GOAL, least=least), "not deterministic"
    alone, split = traffic(load, placement).sum(0), split_tokens(load, late)
    assert np.array_equal(split.sum(2), load) and split.min() >= 0
    held = late.log2phys >= 0
    assert (split.sum(0)[~held] == 0).all()
    if not late.late_copies:
        assert late is placement and np.array_equal(Splitter(placement)(load), Splitter(late)(load))
        return
    # A ReplicaPlacement refuses an expert that is twice on a rank.
    assert late.late.shape == (placement.num_ranks, slots) and late.planned == placement
    assert split.sum((0, 1)).max() + max(least, 1) <= alone.max()
    assert alone.max() > GOAL * alone.mean() - 1 and alone.max() > alone.mean() + least - 1


@settings(max_examples=50)
@given(late_cases())
def test_a_placement_with_empty_late_slots_splits_as_without(case):
    load, placement, slots, _ = case
    ranks = placement.num_ranks
    empty = placement.with_late(np.full((ranks, slots), -1))
    assert (empty.chains, empty.late_copies) == (placement.chains, 0)
    by_rank = Splitter(empty)(load).reshape(ranks, ranks, -1)
    assert np.array_equal(by_rank[..., : by_rank.shape[2] - slots].reshape(ranks, -1), Splitter(placement)(load))


def optimum(totals: np.ndarray, placement: ReplicaPlacement) -> float:
    """Tokens of the busiest rank in the best split, by linear programming, fractions of tokens allowed."""
    expert, rank = np.nonzero(placement.log2phys >= 0)
    count, ranks = len(expert), placement.num_ranks
    served, loads = np.zeros((len(totals), count + 1)), np.zeros((ranks, count + 1))
    served[expert, np.arange(count)] = loads[rank, np.arange(count)] = 1
    loads[:, -1] = -1
    goal = np.append(np.zeros(count), 1)
    return float(linprog(goal, loads, np.zeros(ranks), served, totals).fun)


def burst(ranks: int, experts: int, part: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Two loads [source_rank, expert]: heavy-tailed popularity, and one in which `part` of the tokens goes to a few
    experts that were not hot before."""
    popularity = rng.pareto(1.5, experts) + 0.1
    hot = rng.permutation(experts)[: max(2, experts // 16)]
    fresh = np.zeros(experts)
    fresh[hot] = rng.dirichlet(np.ones(len(hot)))
    before = popularity / popularity.sum()
    now = (1 - part) * before + part * fresh
    before, now = (np.stack([rng.multinomial(32768, each) for _ in range(ranks)]) for each in (before, now))
    return before, now


def planned(before: np.ndarray, slots: int = 2) -> ReplicaPlacement:
    ranks = len(before)
    return plan_replicas(before, Cluster.sheet("h100-8x400g").relabel(-(-ranks // 8), min(8, ranks)), slots=slots)


def test_the_split_over_late_copies_is_the_best_within_a_hundredth():
    over = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        before, now = burst(8 + 8 * (seed % 2), 64, 0.1 + 0.05 * (seed % 5), rng)
        late = add_late_copies(now, planned(before), goal=GOAL)
        busiest = traffic(now, late).sum(0).max()
        over.append(busiest / max(optimum(now.sum(0), late), now.sum() / len(now)) - 1)
    assert np.mean(over) < 0.01 and max(over) < 0.03, over


@pytest.mark.parametrize("ranks", [8, 16, 32])
@pytest.mark.parametrize("part", [0.1, 0.3, 0.6])
def test_late_copies_even_out_loads_that_moved(ranks, part):
    """Mean at most 1.02, and at most 1.06 in each of them, whatever part of the tokens has moved to other experts."""
    left = []
    for seed in range(10):
        before, now = burst(ranks, 2 * ranks * (1 + seed % 2), part, np.random.default_rng(seed))
        placement = planned(before)
        late = add_late_copies(now, placement)
        tokens = traffic(now, late).sum(0)
        assert tokens.sum() == now.sum()
        left.append(tokens.max() / tokens.mean())
    assert np.mean(left) < 1.02 and max(left) < 1.06, left


def test_by_hand():
    """The example of `balancing.experts.late`."""
    placement = ReplicaPlacement([0, 1, 2], [[-1], [0], [0]])
    load = np.array([[5, 30, 10]] * 3)
    assert traffic(load, placement).sum(0).tolist() == [15, 90, 30]
    late = add_late_copies(load, placement)
    assert late.late.tolist() == [[1], [-1], [1]] and late.slot_expert[:, :1].tolist() == [[-1], [0], [0]]
    assert traffic(load, late).sum(0).tolist() == [45, 45, 45]
    assert late.chains == {0: (0, 1, 2), 1: (1, 0, 2)}
    assert add_late_copies(load, placement, least=46) is placement


def test_what_a_copy_must_save():
    """Two transfers of 6 hidden x ffn bytes against 18 hidden x ffn FLOPs a token."""
    cluster = Cluster.sheet("h100-8x400g")
    shape = ExpertShape(hidden=2048, ffn_hidden=1408, bytes_per_parameter=2)
    assert late_tokens(cluster, shape) == np.ceil(12 / 18 * cluster.flops / cluster.intra_node_bandwidth)
    assert late_tokens(cluster, shape, same_node=False) > late_tokens(cluster, shape)


@pytest.mark.parametrize("wrong", [{"goal": 0.99}, {"goal": np.nan}, {"slots": -1}, {"least": -1}])
def test_bad_values(wrong):
    placement = ReplicaPlacement([0, 1], [[-1], [-1]])
    with pytest.raises(ValueError, match="at least"):
        add_late_copies(np.ones((2, 2), dtype=int), placement, **wrong)
    with pytest.raises(ValueError, match="'level', not 'own'"):
        add_late_copies(np.ones((2, 2), dtype=int), ReplicaPlacement([0, 1], [[-1], [-1]], "own"))
