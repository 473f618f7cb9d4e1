"""Each planner by hand: the baselines and the default planner with a cost model."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancing.cluster import Cluster
from balancing.experts import (
    ExpertShape,
    ReplicaPlacement,
    contiguous_homes,
    layer_cost,
    plan_replicas_layers,
    split_tokens,
    traffic,
)
from balancing.experts.cost import TransferWindow
from balancing.experts.load_history import drifted_loads
from balancing.experts.planners.prophet import prophet_slots
from balancing.experts.planners.quota.pack import pack_replicas
from balancing.experts.planners.quota.spread import fill_slots
from benchmarks.baselines.experts import plan_replicas
from benchmarks.experts.emulated_workload import SHAPE as EMULATED
from benchmarks.experts.emulated_workload import Scale, made_up_loads
from benchmarks.experts.synthetic import drifted, sampled_load, zipf_popularity
from tests.experts.test_plan import SHAPE, largest_over_mean, machine, quick

EXPOSED = TransferWindow()  # nothing overlaps transfers, and each serves one micro-batch


def prophet(load: np.ndarray, **options: float) -> ReplicaPlacement:
    """Pro-Prophet's placement with one expert and one slot a rank."""
    home = np.arange(len(load))
    return ReplicaPlacement(home, prophet_slots(load, home, machine(len(load)), 1, **options), "own", len(load))


class TestProphet:
    def test_replicas_serve_their_own_rank_only(self):
        load = sampled_load(zipf_popularity(16, 8, 3, np.random.default_rng(1)), 8, 4096, np.random.default_rng(1))
        for method in ("prophet", "shadow"):
            placement = plan_replicas(load, machine(8), slots=2, method=method)
            assert placement.replicas > 0
            split = split_tokens(load, placement)
            for copy in placement.copies():
                assert split[copy.rank, copy.expert, copy.rank] == load[copy.rank, copy.expert]
                assert split[np.arange(8) != copy.rank, copy.expert, copy.rank].sum() == 0

    def test_by_hand(self):
        """Three devices, one expert each, loads 60, 15, 15. Device 2 has the fewest tokens for expert 0 and stays out.

        Device 1 keeps its own 25 then: 35, 40, 15. Now device 1 is the heaviest; of its expert's 15 tokens device 2 has
        3 and device 0 has 2, so device 2 gets it and keeps those 3: 35, 37, 18. Device 1's expert is used, so it ends.
        """
        load = np.array([[25, 2, 3], [25, 10, 2], [10, 3, 10]])
        placement = prophet(load, excluded=1, alpha=0.1)
        assert placement.ranks(0) == (0, 1)
        assert placement.ranks(1) == (1, 2)
        assert traffic(load, placement).sum(0).tolist() == [35, 37, 18]
        everywhere = prophet(load, excluded=0, alpha=0.1)
        assert everywhere.ranks(0) == (0, 1, 2)
        assert everywhere.ranks(1) == (1, 0), "device 2's only slot is taken"
        assert traffic(load, everywhere).sum(0).tolist() == [27, 38, 25]

    def test_alpha_is_when_it_stops(self):
        """Loads 40 and 10; with expert 0 on both 20 and 30; with expert 1 on both too 25 and 25."""
        load = np.array([[20, 5], [20, 5]])
        for alpha, replicas in ((1.3, 0), (0.5, 1), (0.1, 2)):
            assert prophet(load, alpha=alpha).replicas == replicas

    def test_a_planner_that_knows_the_scheduler_replicates_more(self):
        """Eq. 8 against Eq. 6: where transfers are as long as the compute they can hide under, only the first pays."""
        load = sampled_load(zipf_popularity(16, 8, 2, np.random.default_rng(2)), 8, 1500, np.random.default_rng(2))
        exposed = plan_replicas(load, machine(8), slots=2, shape=SHAPE, window=EXPOSED, method="prophet")
        hidden = plan_replicas(load, machine(8), slots=2, shape=SHAPE, method="prophet", window=TransferWindow(1e-3))
        assert exposed.replicas < hidden.replicas
        assert largest_over_mean(load, hidden) < largest_over_mean(load, exposed)

    def test_bad_options(self):
        load = np.ones((4, 4), dtype=int)
        with pytest.raises(ValueError, match="excluded=3 must lie between 0 and 2"):
            prophet(load, excluded=3)
        with pytest.raises(ValueError, match="alpha=-1"):
            prophet(load, alpha=-1)


class TestShadow:
    def test_by_hand(self):
        """Expert 0 everywhere: from 120 tokens to 70. Expert 1 too: to 44. With expert 2, rank 3 would have 45: no."""
        load = np.array([[30, 10, 1, 1]] * 4)
        placement = plan_replicas(load, machine(4), slots=3, method="shadow")
        assert placement.ranks(0) == (0, 1, 2, 3) and placement.ranks(1) == (1, 0, 2, 3)
        assert placement.replicas == 6
        assert traffic(load, placement).sum(0).tolist() == [40, 40, 44, 44]

    def test_slots_bound_it(self):
        load = np.array([[30, 30], [30, 30], [1, 1], [1, 1]]).repeat(2, axis=1)
        assert plan_replicas(load, machine(4), slots=1, method="shadow").replicas <= 3


class TestEplb:
    def test_by_hand(self):
        """Totals 240, 120, 80, 40. Replicas by load per instance: expert 0 (120 each), 0 (80), 1 (60), 0 (60). Packed
        heaviest first: those of expert 0 on ranks 3, 1 and 2, that of expert 1 in the only slot left, on rank 0."""
        load = np.array([[60, 30, 20, 10]] * 4)
        placement = plan_replicas(load, machine(4), slots=1, method="eplb")
        assert placement.ranks(0) == (0, 1, 2, 3) and placement.ranks(1) == (1, 0)
        assert traffic(load, placement).sum(0).tolist() == [120, 120, 140, 100]

    def test_instances_are_used_evenly(self):
        load = np.zeros((4, 4), dtype=int)
        load[:, 0] = 1001
        placement = plan_replicas(load, machine(4), slots=1, method="eplb")
        assert placement.ranks(0) == (0, 1, 2, 3)
        assert sorted(split_tokens(load, placement)[:, 0].sum(0)) == [1001] * 4
        assert placement.split == "even"


class TestCosts:
    def hot(self, tokens, ranks=8):
        generator = np.random.default_rng(7)
        return sampled_load(zipf_popularity(4 * ranks, ranks, 3, generator), ranks, tokens, generator)

    def test_a_level_load_gets_no_replica(self):
        load = np.full((8, 32), 500)
        assert plan_replicas(load, machine(8), slots=2, shape=SHAPE, window=EXPOSED).replicas == 0

    @pytest.mark.parametrize("costs", [{"hidden_under": 1e-3, "micro_batches": 4}, {"hidden_under": 1e-4}, {}])
    def test_a_level_load_that_will_drift_gets_replicas(self, costs):
        """They are planned from the even load, and none would be the cheapest under it."""
        cluster, window, figures = Cluster.sheet("h200-8x400g").relabel(8, 8), TransferWindow(**costs), []
        options = {"slots": 2, "shape": ExpertShape(2048, 1408, 2), "window": window}
        even = np.full(256, 1 / 256)
        for seed in range(1, 5):
            draw = np.random.default_rng(seed)
            load = sampled_load(even, 64, 65536, draw)
            none, full = plan_replicas(load, cluster, **options), plan_replicas(load, cluster, drift=0.2, **options)
            assert none.replicas == 0 and full.replicas == 128
            now = sampled_load(drifted(even, 0.2, draw), 64, 65536, draw)
            cost = [layer_cost(traffic(now, p), p, cluster, options["shape"], window).total for p in (none, full)]
            figures.append([largest_over_mean(now, none), largest_over_mean(now, full), cost[1] / cost[0]])
        before, after, cost = np.mean(figures, axis=0)
        assert before > 1.5 and after < 1.3 and cost < 0.85

    def test_the_smallest_drift_does_not_pay_for_exposed_transfers(self):
        """Full slots would cost 8 % of the layer, and save less than 1 %."""
        cluster, load = Cluster.sheet("h200-8x400g").relabel(8, 8), np.full((64, 256), 256)
        options = {"slots": 2, "shape": ExpertShape(2048, 1408, 2), "window": EXPOSED}
        assert plan_replicas(load, cluster, drift=0.002, **options).replicas == 0

    @pytest.mark.parametrize("seed", range(16))
    def test_a_known_drift_never_costs_more(self, seed):
        """By exact splits of the loads that stand for the drift, on few ranks, where transfers are hardly hidden."""
        draw = np.random.default_rng(seed)
        cluster = Cluster.sheet("a800-4x200g").relabel(int(draw.integers(1, 3)), 4)
        costs = {"hidden_under": [None, 1e-4, 1e-3][seed % 3], "first": seed % 2 == 0, "micro_batches": 1 + seed % 4}
        options = {"slots": 2, "shape": SHAPE, "window": TransferWindow(**costs), "min_gain": 0.0}
        ranks, drift = cluster.world_size, float(draw.uniform(0.01, 0.2))
        load = sampled_load(zipf_popularity(32, ranks, float(draw.uniform(1, 1.5)), draw), ranks, 8192, draw)
        known, unknown = (
            sum(
                layer_cost(traffic(now, plan), plan, cluster, SHAPE, TransferWindow(**costs)).total
                for now in drifted_loads(load, drift)
            )
            for plan in (plan_replicas(load, cluster, drift=drift, **options), plan_replicas(load, cluster, **options))
        )
        assert known <= unknown * (1 + 1e-9)

    def test_the_gain_after_a_drift_counts(self):
        load = np.full((8, 32), 500)
        for options in ({}, {"shape": SHAPE, "window": TransferWindow(5e-3)}):
            assert plan_replicas(load, machine(8), slots=2, **options).replicas == 0
            assert plan_replicas(load, machine(8), slots=2, drift=0.2, **options).replicas == 16
        assert plan_replicas(load, machine(8), slots=2, drift=0.2, min_gain=0.9).replicas == 0

    def test_the_size_of_an_expert_alone_is_refused(self):
        for options in ({"shape": SHAPE}, {"window": EXPOSED}):
            with pytest.raises(
                ValueError, match="shape, the size of an expert, and window, what overlaps its transfers"
            ):
                plan_replicas(self.hot(500), machine(8), slots=2, **options)

    @pytest.mark.parametrize("drift", [-0.1, 1.1, float("nan")])
    def test_a_drift_out_of_range(self, drift):
        with pytest.raises(ValueError, match=r"drift=.* is a fraction of all tokens"):
            plan_replicas(np.full((8, 32), 500), machine(8), slots=2, drift=drift)

    def test_exposed_copies_need_many_tokens(self):
        few, many = self.hot(500), self.hot(200_000)
        assert plan_replicas(few, machine(8), slots=2, shape=SHAPE, window=EXPOSED).replicas == 0
        exposed = plan_replicas(many, machine(8), slots=2, shape=SHAPE, window=EXPOSED)
        assert 0 < exposed.replicas <= 16
        assert largest_over_mean(many, exposed) < 1.1

    def test_hidden_copies_fill_all_slots(self):
        assert (
            plan_replicas(self.hot(500), machine(8), slots=2, shape=SHAPE, window=TransferWindow(5e-3)).replicas == 16
        )

    def test_no_experts_hide_what_the_first_layer_needs(self):
        loads = np.stack([self.hot(2000)] * 2)
        window = TransferWindow(3e-4)
        first, second = plan_replicas_layers(
            loads, machine(8), slots=2, shape=SHAPE, window=replace(window, first=True)
        )
        assert first.replicas < second.replicas
        assert second == plan_replicas(loads[1], machine(8), slots=2, shape=SHAPE, window=window)

    def test_slots_that_cost_nothing_are_used(self):
        """Between slow NICs few copies pay; within nodes more of them cost nothing, and help when the load drifts."""
        cluster = Cluster(2, 4, 4, 200e9, 1e8, 250e12, 80e9)
        costs = {"shape": SHAPE, "window": TransferWindow(1e-3, first=True, micro_batches=4)}
        placement = plan_replicas(self.hot(4000), cluster, slots=2, **costs)
        _, source, rank = placement.hops.T
        assert placement.replicas == 16 and (source // 4 == rank // 4).sum() >= 14

    @quick
    @given(st.data())
    def test_filled_from_the_node(self, data):
        ranks, per_node = data.draw(st.sampled_from([(4, 2), (6, 3), (5, 2), (4, 4)]))
        generator = np.random.default_rng(data.draw(st.integers(0, 99)))
        home = generator.permutation(np.repeat(np.arange(ranks), 3))
        slots = np.full((ranks, 3), -1)
        for rank in range(ranks):
            some = generator.choice(np.flatnonzero(home != rank), generator.integers(0, 4), replace=False)
            slots[rank, : len(some)] = some
        totals = generator.integers(0, 5, len(home)).astype(float)
        filled = fill_slots(slots, totals, home, per_node)
        before, after = (ReplicaPlacement(home, each, ranks_per_node=per_node) for each in (slots, filled))
        assert (filled[slots >= 0] == slots[slots >= 0]).all()
        for rank, slot in zip(*np.nonzero(filled != slots), strict=True):
            expert = int(filled[rank, slot])
            assert totals[expert] > 0 and rank // per_node in {each // per_node for each in before.ranks(expert)}
        for rank in range(ranks):  # a slot stays empty only where the rank has all there is in its node
            held = {expert for expert in range(len(home)) if rank in after.ranks(expert)}
            there = {
                expert
                for expert in range(len(home))
                if rank // per_node in {r // per_node for r in after.ranks(expert)}
            }
            assert -1 not in filled[rank] or all(totals[expert] == 0 for expert in there - held)

    def test_a_copy_that_serves_many_micro_batches_pays_sooner(self):
        load = self.hot(3000)
        once = plan_replicas(load, machine(8), slots=2, shape=SHAPE, window=EXPOSED)
        often = plan_replicas(load, machine(8), slots=2, shape=SHAPE, window=TransferWindow(micro_batches=64))
        assert once.replicas < often.replicas

    def test_what_is_imbalanced_within_nodes_is_balanced_within_nodes(self):
        load = np.full((16, 64), 5000)
        for node in (0, 1):  # each has a hot expert, which only its own ranks send to
            load[:, 32 * node] = 0
            load[8 * node : 8 * node + 8, 32 * node] = 120_000
        placement = plan_replicas(load, machine(16, 8), slots=1, shape=SHAPE, window=EXPOSED)
        copies = list(placement.copies())
        assert copies and all(copy.source // 8 == copy.rank // 8 for copy in copies)

    def test_more_copies_stay_inside_than_chance_would_have(self):
        load = self.hot(4096, ranks=32)
        copies = list(plan_replicas(load, machine(32, 8), slots=2).copies())
        inside = np.mean([copy.source // 8 == copy.rank // 8 for copy in copies])
        assert inside > 0.4  # 7 of 31 other ranks are in the node: 0.23


def test_as_many_copies_as_are_hidden_are_taken():
    """With one micro-batch all copies together take too long to send: how many do not must be found."""
    scale, home = Scale(16, 32, 0.24), contiguous_homes(32, 16)
    seen = made_up_loads(scale, 4, 1, 3).before.mean(3)  # [step, source rank, layer, expert]
    for number, load in enumerate(np.rint(seen * scale.tokens).astype(np.int64).swapaxes(1, 2).reshape(12, 16, 32)):
        window = TransferWindow(scale.attention_seconds, first=not number % 4)

        def seconds(placement, load=load, window=window):
            sent = traffic(load, placement)
            return layer_cost(sent, placement, scale.cluster, EMULATED, window).total

        copies = pack_replicas(load.sum(0).astype(float), home, 16, 2, ranks_per_node=8)
        fewer = []
        for end in range(len(copies) + 1):
            slots = [[expert for expert, at in copies[:end] if at == rank] for rank in range(16)]
            full = np.array([[*held, -1, -1][:2] for held in slots])
            fewer.append(seconds(ReplicaPlacement(home, full, "level", 8, scale.cluster.nics_per_node)))
        found = plan_replicas(load, scale.cluster, slots=2, shape=EMULATED, window=window)
        assert seconds(found) <= 1.03 * min(fewer), number


def test_packed_replicas_stay_in_their_node_if_they_are_to():
    load = sampled_load(zipf_popularity(32, 8, 3, np.random.default_rng(1)), 8, 4096, np.random.default_rng(1)).sum(0)
    home = contiguous_homes(32, 8)
    anywhere, inside = (
        np.array(pack_replicas(load.astype(float), home, 8, 2, ranks_per_node=4, inside=only)) for only in (False, True)
    )
    assert (home[inside[:, 0]] // 4 == inside[:, 1] // 4).all() and len(inside)
    assert (home[anywhere[:, 0]] // 4 != anywhere[:, 1] // 4).any()
