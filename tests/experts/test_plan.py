"""Placements of all planners: properties that hold for any load, and the balance they reach."""

from itertools import combinations, groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing.cluster import Cluster
from balancing.experts import (
    ExpertShape,
    ReplicaPlacement,
    TransferWindow,
    contiguous_homes,
    plan_replicas_layers,
    split_tokens,
    traffic,
)
from balancing.experts.plan import CALM
from balancing.experts.plan import METHODS as OWN
from benchmarks.baselines.experts import METHODS, plan_replicas
from benchmarks.experts.synthetic import drifted, sampled_load, zipf_popularity

quick = settings(max_examples=60)
H200 = Cluster.sheet("h200-8x400g", nodes=8)
SHAPE = ExpertShape(4096, 1536, 2)


def machine(ranks, per_node=None):
    """As many nodes as the ranks need."""
    per_node = per_node or ranks
    return H200.relabel(-(-ranks // per_node), per_node)


def largest_over_mean(load, placement):
    tokens = traffic(load, placement).sum(0)
    return tokens.max() / tokens.mean()


def optimum(total, placement):
    """Lower bound of the busiest rank's tokens: over all sets of ranks, the mean of what no other rank can serve."""
    held = [set(placement.ranks(expert)) for expert in range(placement.experts)]
    densest = 0.0
    for size in range(1, placement.num_ranks + 1):
        for ranks in combinations(range(placement.num_ranks), size):
            bound = sum(int(tokens) for tokens, own in zip(total, held, strict=True) if own <= set(ranks))
            densest = max(densest, bound / size)
    return densest


@st.composite
def loads(draw, most_ranks=6):
    """A load [source_rank, expert]: even, uneven, or hostile."""
    ranks, per_rank = draw(st.integers(1, most_ranks)), draw(st.integers(1, 4))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    experts = ranks * per_rank
    kind = draw(st.sampled_from(["random", "skewed", "one expert", "an idle rank", "few", "none", "cold experts"]))
    load = generator.integers(0, 2000, (ranks, experts))
    if kind == "skewed":
        load = (load * np.arange(1, experts + 1.0) ** -1.5).astype(np.int64)
    elif kind == "one expert":
        load[:, np.arange(experts) != generator.integers(experts)] = 0
    elif kind == "an idle rank":
        load[generator.integers(ranks)] = 0
    elif kind == "few":
        load = generator.integers(0, 3, (ranks, experts))
    elif kind == "none":
        load[:] = 0
    elif kind == "cold experts":
        load[:, generator.random(experts) < 0.7] = 0
    return load


@st.composite
def homes(draw, load):
    """Contiguous blocks, or any other even distribution."""
    blocks = contiguous_homes(load.shape[1], len(load))
    return draw(st.one_of(st.none(), st.permutations(blocks.tolist())))


@quick
@given(st.data(), loads(), st.sampled_from(METHODS), st.integers(0, 3), st.integers(1, 6), st.booleans())
def test_every_plan_keeps_homes_and_slots_and_every_token(data, load, method, slots, per_node, costs):
    ranks, experts = load.shape
    home = data.draw(homes(load))
    options = {"slots": slots, "home": home, "method": method, "min_gain": data.draw(st.sampled_from([0.0, 0.02]))}
    options |= {"shape": SHAPE, "window": TransferWindow(1e-4)} if costs else {}
    placement = plan_replicas(load, machine(ranks, min(per_node, ranks)), **options)
    assert placement == plan_replicas(load.copy(), machine(ranks, min(per_node, ranks)), **options)
    assert placement.slot_expert.shape == (ranks, slots)
    expected = contiguous_homes(experts, ranks) if home is None else home
    for expert in range(experts):
        held = placement.ranks(expert)
        assert held[0] == expected[expert]
        assert len(set(held)) == len(held)
        chain = placement.chains.get(expert, held)
        assert chain[0] == held[0] and sorted(chain) == sorted(held)
    if not load.any() or ranks == 1:
        assert placement.replicas == 0 or method == "eplb"

    split = split_tokens(load, placement)
    assert split.shape == (ranks, experts, ranks)
    assert split.min() >= 0
    assert np.array_equal(split.sum(2), load)
    held = placement.log2phys >= 0
    assert not split[:, ~held].any(), "a token went to a rank that does not hold its expert"
    assert np.array_equal(split, split_tokens(load, placement))
    assert np.array_equal(traffic(load, placement), split.sum(1))


@quick
@given(loads(), st.integers(0, 3), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_the_split_is_as_level_as_the_placement_allows(load, slots, per_node, seed):
    """Over any placement, not only good ones, and on a load it was not made for."""
    ranks, experts = load.shape
    generator, home = np.random.default_rng(seed), contiguous_homes(experts, ranks)
    placed = np.full((ranks, slots), -1)
    for rank in range(ranks):
        others = generator.permutation(np.flatnonzero(home != rank))[: generator.integers(0, slots + 1)]
        placed[rank, : len(others)] = others
    placement = ReplicaPlacement(home, placed, ranks_per_node=min(per_node, ranks))
    fullest = split_tokens(load, placement, sweeps=300).sum((0, 1)).max()
    best = optimum(load.sum(0), placement)
    # Whole tokens: an instance may be off by less than one, and a rank has a few.
    assert best - 1e-9 <= fullest <= best + placement.homes_per_rank + slots
    assert fullest <= traffic(load, ReplicaPlacement(home, np.full((ranks, 0), -1))).sum(0).max()


@quick
@given(loads(), st.integers(1, 3))
def test_quota_as_shipped_is_near_the_optimum_of_its_placement(load, slots):
    """With the number of sweeps that training uses."""
    placement = plan_replicas(load, machine(len(load)), slots=slots)
    fullest = traffic(load, placement).sum(0).max()
    assert fullest <= 1.03 * optimum(load.sum(0), placement) + placement.homes_per_rank + slots


@pytest.mark.parametrize(("experts", "ranks"), [(32, 8), (128, 16), (256, 64)])
@pytest.mark.parametrize("imbalance", [1.0, 1.3, 2, 4])
def test_quota_levels_what_was_predicted_and_what_drifted(experts, ranks, imbalance):
    generator = np.random.default_rng(experts + ranks)
    popularity = zipf_popularity(experts, ranks, imbalance, generator)
    load = sampled_load(popularity, ranks, 16384, generator)
    placement = plan_replicas(load, machine(ranks, 8), slots=2, min_gain=0.0)
    assert largest_over_mean(load, placement) <= 1.01
    drift = [sampled_load(drifted(popularity, 0.03, generator), ranks, 16384, generator) for _ in range(5)]
    assert np.mean([largest_over_mean(each, placement) for each in drift]) <= 1.015
    if imbalance > 1.1:
        unmoved = plan_replicas(load, machine(ranks, 8), slots=2, method="none")
        assert largest_over_mean(load, unmoved) == pytest.approx(imbalance, rel=0.1)


def test_one_slot_still_levels_a_prediction():
    generator = np.random.default_rng(3)
    for imbalance in (1.3, 3, 6):
        load = sampled_load(zipf_popularity(32, 8, imbalance, generator), 8, 16384, generator)
        assert largest_over_mean(load, plan_replicas(load, machine(8), slots=1)) <= 1.05


def test_planners_rank_as_they_should_on_a_hot_load():
    """Planners in the order of the balance that they reach: none, FasterMoE's, Pro-Prophet's, EPLB's, ours."""
    generator, after = np.random.default_rng(0), {method: [] for method in METHODS}
    for _ in range(10):
        load = sampled_load(zipf_popularity(64, 16, 4, generator), 16, 16384, generator)
        for method in METHODS:
            after[method].append(largest_over_mean(load, plan_replicas(load, machine(16, 8), slots=2, method=method)))
    mean = {method: np.mean(values) for method, values in after.items()}
    assert mean["none"] > mean["shadow"] > mean["prophet"] > mean["quota"]
    assert mean["none"] > mean["eplb"] > mean["quota"]
    assert mean["quota"] <= 1.01


def test_layers_at_once_are_the_layers_one_by_one():
    generator = np.random.default_rng(5)
    load = np.stack(
        [sampled_load(zipf_popularity(32, 8, 1 + layer, generator), 8, 999, generator) for layer in range(6)]
    )
    for method in OWN:
        together = plan_replicas_layers(load, machine(8), slots=2, method=method)
        assert together == tuple(plan_replicas(each, machine(8), slots=2, method=method) for each in load)


def test_a_prediction_may_be_fractional():
    load = np.full((2, 4), 10.5)
    load[:, 0] = 99.25
    assert plan_replicas(load, machine(2), slots=1).replicas == 2


@pytest.mark.parametrize("method", METHODS)
def test_zero_slots_are_legal(method):
    load = np.random.default_rng(0).integers(0, 99, (4, 8))
    placement = plan_replicas(load, machine(4), slots=0, method=method)
    assert placement.replicas == 0 and placement.phys2log.tolist() == list(range(8))
    assert np.array_equal(split_tokens(load, placement).sum(2), load)


class TestPhysicalNumbers:
    """Physical number = rank * (homes + slots) + local, as a token dispatcher counts."""

    placement = ReplicaPlacement([0, 0, 1, 1, 2, 2], [[5, -1], [-1, 0], [0, 3]], ranks_per_node=2)

    def test_tables(self):
        assert self.placement.phys2log.tolist() == [0, 1, 5, -1, 2, 3, -1, 0, 4, 5, 0, 3]
        assert self.placement.log2phys[0].tolist() == [0, 7, 10]
        assert self.placement.log2phys[4].tolist() == [-1, -1, 8]

    def test_who_holds_what(self):
        assert self.placement.ranks(0) == (0, 1, 2)
        assert self.placement.ranks(5) == (2, 0)
        assert self.placement.slots_of(1) == (-1, 0)
        assert [tuple(copy) for copy in self.placement.copies()] == [
            (5, 2, 0, 0),
            (0, 0, 1, 1),
            (0, 0, 2, 0),
            (3, 1, 2, 1),
        ]

    def test_a_chain_stays_in_the_node_first(self):
        placement = ReplicaPlacement(np.arange(6), [[3], [3], [-1], [-1], [3], [3]], ranks_per_node=2)
        assert placement.chains[3] == (3, 0, 1, 4, 5)
        assert ReplicaPlacement(np.arange(6), [[3], [3], [3], [-1], [3], [3]], ranks_per_node=2).chains[3][:2] == (3, 2)

    @quick
    @given(st.data())
    def test_chains_visit_each_node_once(self, data):
        nodes, per_node = data.draw(st.sampled_from([(2, 4), (3, 4), (2, 8), (4, 2)]))
        nics = data.draw(st.sampled_from([0, 1, per_node // 2, per_node]))
        ranks, generator = nodes * per_node, np.random.default_rng(data.draw(st.integers(0, 99)))
        home, slots = np.repeat(np.arange(ranks), 2), np.full((ranks, 2), -1)
        for rank in range(ranks):
            hot = generator.choice(np.flatnonzero(home != rank)[:8], generator.integers(0, 3), replace=False)
            slots[rank, : len(hot)] = hot
        placement = ReplicaPlacement(home, slots, ranks_per_node=per_node, nics_per_node=nics)
        again = ReplicaPlacement(home, slots, ranks_per_node=per_node, nics_per_node=nics)
        assert list(placement.chains.items()) == list(again.chains.items())
        assert [*placement.chains] == sorted(set(slots[slots >= 0]))
        for expert, chain in placement.chains.items():
            assert chain[0] == home[expert] and sorted(chain[1:]) == np.flatnonzero((slots == expert).any(1)).tolist()
            visited = [node for node, _ in groupby(rank // per_node for rank in chain)]
            assert len(visited) == len(set(visited))
        assert len(placement.hops) == placement.replicas

    def test_what_crosses_nodes_is_spread_over_nics(self):
        """Experts 0 to 3 of node 0 have replicas on all its ranks and on all of node 1: one leaves and enters a NIC."""
        slots = [[*(expert for expert in range(4) if expert != rank), -1][:4] for rank in range(4)] + [[0, 1, 2, 3]] * 4
        for nics, most in ((4, 1), (0, 1), (2, 2), (1, 4)):
            placement = ReplicaPlacement(np.arange(8), slots, ranks_per_node=4, nics_per_node=nics)
            nic = np.arange(8) if nics == 0 else np.arange(8) * nics // 4
            _, source, rank = placement.hops[placement.hops[:, 1] // 4 != placement.hops[:, 2] // 4].T
            assert len(source) == 4
            assert np.bincount(nic[source]).max() == np.bincount(nic[rank]).max() == most

    def test_homes_that_are_not_blocks(self):
        placement = ReplicaPlacement([1, 0, 1, 0], [[2], [-1]])
        assert placement.phys2log.tolist() == [1, 3, 2, 0, 2, -1]

    def test_a_hash_tells_plans_apart(self):
        same = ReplicaPlacement(np.array([0, 0, 1, 1, 2, 2], dtype=np.int32), self.placement.slot_expert, "level", 2)
        assert (
            same == self.placement and hash(same) == hash(self.placement) and same.digest() == self.placement.digest()
        )
        others = [
            ReplicaPlacement(self.placement.home, self.placement.slot_expert, "even", 2),
            ReplicaPlacement(self.placement.home, self.placement.slot_expert, "level", 3),
            ReplicaPlacement(self.placement.home, self.placement.slot_expert[:, :1], "level", 2),
            ReplicaPlacement(self.placement.home, self.placement.slot_expert[:, ::-1], "level", 2),
        ]
        assert len({plan.digest() for plan in [self.placement, *others]}) == 5

    def test_a_plan_cannot_be_changed(self):
        with pytest.raises(ValueError):
            self.placement.slot_expert[0, 0] = 3
        with pytest.raises(AttributeError):
            self.placement.home = None

    @pytest.mark.parametrize(
        ("home", "slots", "named"),
        [
            ([0, 0, 1, 1], [[0], [-1]], "expert 0 is twice on rank 0"),
            ([0, 0, 1, 1], [[2, 2], [-1, -1]], "expert 2 is twice on rank 0"),
            ([0, 0, 1, 1], [[4], [-1]], "names expert 4"),
            ([0, 0, 1, 1], [[-2], [-1]], "names expert -2"),
            ([0, 0, 0, 1], [[-1], [-1]], "rank 0 is home to 3"),
            ([0, 0, 1, 2], [[-1], [-1]], "names rank 2"),
            ([0, 0, 1], [[-1], [-1]], "3 experts do not divide"),
            ([0, 0, 1, 1], [[0.5], [-1]], "whole numbers"),
        ],
    )
    def test_nonsense_is_refused(self, home, slots, named):
        with pytest.raises(ValueError, match=named):
            ReplicaPlacement(home, slots)


@pytest.mark.parametrize(
    ("load", "options", "named"),
    [
        (np.ones((4, 6), dtype=int), {}, "6 experts do not divide"),
        (np.ones((4, 8), dtype=int), {"slots": -1}, "slots=-1"),
        (np.ones((4, 8), dtype=int), {"slots": 1.5}, "slots=1.5"),
        (np.ones((4, 8), dtype=int), {"method": "best"}, "unknown method 'best'"),
        (np.ones((4, 8), dtype=int), {"home": [0, 1]}, "home has shape"),
        (np.ones((4, 8), dtype=int), {"home": [0] * 8}, "rank 0 is home to 8"),
        (np.ones(8, dtype=int), {}, "source_rank, expert"),
        (np.full((4, 8), -1), {}, "not negative"),
        (np.full((4, 8), np.nan), {}, "finite"),
        (np.full((4, 8), "a"), {}, "must be numbers"),
        (np.ones((64, 64), dtype=int), {}, "does not fit a cluster of 4"),
    ],
)
def test_bad_input(load, options, named):
    with pytest.raises(ValueError, match=named):
        plan_replicas(load, machine(4), **{"slots": 1, **options})


def test_a_placement_stays_while_the_load_is_calm():
    """At a drift of 0.02 it stays nearly always, and nothing is lost; a load that jumps is planned anew."""
    rng, cluster, stayed = np.random.default_rng(3), machine(16, 8), 0
    popularity = zipf_popularity(64, 16, 2.0, rng)
    placement = plan_replicas(sampled_load(popularity, 16, 8192, rng), cluster, slots=2)
    for _ in range(20):
        popularity = drifted(popularity, 0.02, rng)
        load = sampled_load(popularity, 16, 8192, rng)
        planned = plan_replicas(load, cluster, slots=2, drift=0.02, keep=placement)
        stayed += planned is placement
        placement = planned
        assert largest_over_mean(load, placement) <= CALM + 0.005
    assert stayed >= 10
    burst = np.zeros_like(load)
    burst[:, ::16] = 1000
    assert plan_replicas(burst, cluster, slots=2, keep=placement) == plan_replicas(burst, cluster, slots=2)
    even = np.full_like(load, 1000)
    alone = plan_replicas(even, cluster, slots=2, keep=placement)
    assert alone.replicas == 0, "replicas that gain nothing do not stay"
    assert plan_replicas(even, cluster, slots=2, keep=alone) is alone
    assert plan_replicas(even, machine(16, 4), slots=2, keep=alone) != alone, "other nodes"
