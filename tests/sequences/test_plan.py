"""Plans of sequences: no token is lost, ranks are balanced, costs are right, bad input is refused."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from balancing.cluster import Cluster
from balancing.sequences import (
    AttentionShape,
    SequencePlan,
    Shard,
    causal_area,
    compile_rank,
    kv_traffic,
    limit_seconds,
    plan_sequences,
    step_cost,
)
from balancing.sequences.cost import TILE, attention_seconds, hidden_tokens, kv_bytes, least_turn, tile_area
from balancing.sequences.engine.program import Compute, Wait
from balancing.sequences.planners.chunks import _evened
from balancing.sequences.planners.dealing import joined, piece_area
from balancing.sequences.rounds import TurnTokens, number_of_turns, plan_rounds, turn_tokens, what_is_asked
from balancing.sequences.sequence_plan import in_window
from balancing.sequences.traffic import TokenTraffic, plan_links, traffic_seconds
from benchmarks.baselines import sequences as baselines
from benchmarks.sequences.bound import least_crossing
from benchmarks.sequences.lengths import DISTRIBUTIONS, draw_batch, draw_lengths

MHA = AttentionShape(hidden=4096, heads=32, kv_heads=32, layers=32, ffn_hidden=11008)
GQA = AttentionShape(hidden=4096, heads=32, kv_heads=4, layers=32, ffn_hidden=11008)
# Every second layer with a window, as in GPT-OSS, and all of them.
WINDOWED, ALL_WINDOWED = (replace(GQA, window=128, windowed_layers=layers) for layers in (16, 32))
OWN = ("chunks", "zones", "ring", "gather")


NO_LATENCY = {"launch_seconds": 0.0, "message_seconds": 0.0, "host_seconds": 0.0}


def nodes_of(nodes: int, ranks: int, nics: int = 1) -> Cluster:
    return Cluster(nodes, ranks, nics, 1.6e11, 2.4e10, 2.5e14, 8e10, **NO_LATENCY)


def a800(ranks: int) -> Cluster:
    return replace(Cluster.sheet("a800-4x200g", nodes=ranks // 8), **NO_LATENCY)


def fullest(values: np.ndarray) -> float:
    return float(values.max() / values.mean())


LENGTHS = st.lists(st.one_of(st.integers(1, 40), st.integers(1, 900), st.integers(1, 30000)), min_size=1, max_size=40)
CLUSTERS = st.builds(nodes_of, st.integers(1, 4), st.integers(1, 6), st.integers(1, 8))


@settings(max_examples=120)
@given(
    LENGTHS,
    CLUSTERS,
    st.sampled_from(OWN),
    st.sampled_from((MHA, GQA, WINDOWED, ALL_WINDOWED)),
    st.sampled_from((1, 64, 512)),
    st.booleans(),
)
@example([1], nodes_of(2, 4), "chunks", MHA, 512, False)  # fewer tokens than ranks
@example([1, 1, 1], nodes_of(2, 4), "zones", MHA, 512, True)
@example([30000], nodes_of(2, 4), "zones", MHA, 512, True)  # one document longer than a node's capacity
@example([1] * 1000, nodes_of(2, 3), "chunks", GQA, 512, False)
@example([997] * 13, nodes_of(3, 5), "chunks", GQA, 512, True)
@example([3], nodes_of(4, 2, 8), "zones", MHA, 512, False)  # routing speeds up keys on a ring more than gradients
def test_every_plan_of_ragged_batches(lengths, cluster, method, shape, chunk, tight):
    """Validation in SequencePlan holds every token exactly once; linear layers get equal tokens; the capacity holds."""
    mean = -(-sum(lengths) // cluster.world_size)
    plan = plan_sequences(
        lengths, cluster, shape=shape, method=method, chunk=chunk, token_capacity=mean if tight else None
    )
    assert plan.lengths == tuple(lengths) and plan.ranks == cluster.world_size
    assert plan.linear_tokens.max() - plan.linear_tokens.min() <= 1
    assert not tight or plan.tokens.max() <= mean
    for sequence, exchange in enumerate(plan.exchange):
        assert (exchange == "local") == (len(plan.ring(sequence)) == 1)
    if method in ("chunks", "ring", "gather"):
        assert not plan.remapped
    cost = step_cost(plan, cluster, shape)
    assert cost.total >= limit_seconds(lengths, cluster, shape) * (1 - 1e-9)
    direct = step_cost(plan, cluster, shape, routed=False)
    assert cost.exchange <= direct.exchange and cost.remap <= direct.remap, "the quicker way is not taken"


@settings(max_examples=60)
@given(LENGTHS, CLUSTERS, st.sampled_from(OWN), st.randoms(use_true_random=False))
@example([1, 130, 211, 123], nodes_of(3, 1), "chunks", Random(1))  # the longest sequence has the number of a node
def test_order_of_a_batch_does_not_matter(lengths, cluster, method, random):
    """The same batch in another order: each rank has as many tokens and as much area as before."""
    order = list(range(len(lengths)))
    random.shuffle(order)
    plans = [
        plan_sequences(batch, cluster, shape=MHA, method=method)
        for batch in (lengths, [lengths[at] for at in order], list(lengths))
    ]
    assert plans[0].digest == plans[2].digest
    assert plans[0].area.tolist() == plans[1].area.tolist()
    assert plans[0].tokens.tolist() == plans[1].tokens.tolist()


@pytest.mark.parametrize("ranks", [16, 64])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_balance_at_4k_tokens_a_rank(distribution, ranks):
    cluster = a800(ranks)
    received = {"chunks": 0, "ring": 0}
    for seed in range(4 if ranks == 16 else 2):
        batch = draw_batch(distribution, 4096 * ranks, np.random.default_rng(seed))
        chunks = plan_sequences(batch, cluster, shape=GQA, method="chunks")
        assert np.ptp(chunks.tokens) == 0 and not chunks.remapped
        assert fullest(chunks.area) <= 1.01
        zones = plan_sequences(batch, cluster, shape=GQA, method="zones")
        assert fullest(zones.area) <= 1.20 and np.ptp(zones.linear_tokens) == 0
        if ranks == 16:
            ring = plan_sequences(batch, cluster, shape=GQA, method="ring")
            assert fullest(ring.area) <= 1.02
            received["ring"] += kv_traffic(ring).tokens.sum()
            received["chunks"] += kv_traffic(chunks).tokens.sum()
    if ranks == 16 and distribution not in ("web", "mix"):  # there one document is the whole batch now and then
        assert received["chunks"] <= received["ring"] / 2


@settings(max_examples=60)
@given(LENGTHS, CLUSTERS, st.sampled_from(("chunks", "gather")))
def test_no_plan_moves_fewer_tokens_between_nodes_than_the_bound(lengths, cluster, method):
    plan = plan_sequences(lengths, cluster, shape=MHA, method=method)
    sent, received = plan_links(plan, cluster).far.reshape(2, cluster.nodes, -1).sum(2)
    area = plan.area.reshape(cluster.nodes, -1).sum(1)
    forward, backward = least_crossing(lengths, cluster.nodes, float(area.max()))
    rounding = cluster.ranks_per_node * len(lengths)  # nodes hold a token a rank more or less than their share
    assert max(sent.max(), received.max()) >= forward - rounding
    assert (sent + received).max() >= backward - 2 * rounding


def test_nodes_send_and_receive_equally_much():
    """One document of 42k tokens and short ones on four nodes: with its beginning on one node, that node sends three
    times its tokens."""
    lengths = draw_batch("packed", 65536, np.random.default_rng(0))
    plan = plan_sequences(lengths, nodes_of(4, 4, 2), shape=MHA)
    far = plan_links(plan, nodes_of(4, 4, 2)).far.reshape(2, 4, -1).sum(2)
    forward, backward = least_crossing(lengths, 4, float(causal_area(lengths)) / 4)
    assert far.sum(0).max() <= 1.2 * backward
    assert far.max() <= 1.5 * forward


def test_documents_shorter_than_a_node_stay_whole():
    """At 64 ranks no document needs two nodes; cut at the ends of the longest, a tenth of all tokens crosses nodes."""
    lengths = draw_batch("lognormal", 64 * 4096, np.random.default_rng(0))
    plan = plan_sequences(lengths, a800(64), shape=MHA)
    assert plan_links(plan, a800(64)).far[0].sum() <= 0.03 * sum(lengths)
    assert fullest(plan.area) <= 1.01


def test_ends_are_exchanged_for_beginnings_until_nodes_have_even_areas():
    nodes = [[(0, 0, 900)], [(1, 0, 500), (2, 0, 400)], [(3, 0, 450), (4, 0, 450)]]
    mean = sum(piece_area(piece) for pieces in nodes for piece in pieces) / 3
    evened = _evened(nodes, 1.01 * mean)
    assert max(sum(map(piece_area, pieces)) for pieces in evened) <= 1.01 * mean
    assert [sum(stop - start for _, start, stop in pieces) for pieces in evened] == [900] * 3
    found, given = (joined([piece for pieces in of_nodes for piece in pieces]) for of_nodes in (evened, nodes))
    assert found == given


def test_cuts_are_aligned_where_the_area_allows():
    """Ends of a long sequence are taken in round numbers, but never at the price of balance."""
    lengths, cluster = [60000] + [1000] * 4, nodes_of(1, 4)
    for chunk in (128, 16384):
        plan = plan_sequences(lengths, cluster, shape=MHA, method="chunks", chunk=chunk)
        ends = [shard.tokens for shard in plan.attention if shard.sequence == 0 and shard.start > 30000]
        assert len(ends) == 3 and all(tokens % 16 == 0 for tokens in ends)
        assert fullest(plan.area) <= 1.01


def test_short_sequences_stay_whole_in_zones():
    """Zone 0 on a rank, zone 1 in a node, zone 2 over nodes."""
    cluster = a800(16)
    plan = plan_sequences([40000] + [9000] * 2 + [500] * 30, cluster, shape=MHA, method="zones")
    spread = [{cluster.node(rank) for rank in plan.ring(sequence)} for sequence in range(33)]
    assert plan.exchange[3:] == ("local",) * 30
    assert len(spread[0]) == 2 and len(plan.ring(0)) == 16
    assert [len(nodes) for nodes in spread[1:3]] == [1, 1] and plan.remapped


def test_traffic_of_rings_and_gathered_sequences():
    """Against the definition: round by round on a ring, token by token where gathered."""
    lengths, cluster = (5, 70, 301, 17, 1), nodes_of(2, 3)
    for method in ("ring", "gather", "chunks", "zones"):
        plan = plan_sequences(lengths, cluster, shape=MHA, method=method)
        expected = np.zeros((6, 6), dtype=int)
        for sequence, length in enumerate(lengths):
            own = [shard for shard in plan.attention if shard.sequence == sequence]
            holder = np.concatenate([[shard.rank] * shard.tokens for shard in sorted(own)])
            ring = plan.ring(sequence)
            for at, rank in enumerate(ring):
                after = ring[(at + 1) % len(ring)]
                if plan.exchange[sequence] == "ring" and after != rank:
                    expected[rank, after] += length - (holder == after).sum()
                if plan.exchange[sequence] == "gather":
                    sees = max(shard.stop for shard in own if shard.rank == rank)
                    np.add.at(expected[:, rank], holder[:sees][holder[:sees] != rank], 1)
        assert (kv_traffic(plan).table(6) == expected).all()
        assert sum(kv_traffic(plan).between(cluster)) == expected.sum()


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("method", ["gather", "chunks", "zones"])
def test_gathered_keys_are_counted_once_a_node(method, window):
    """Against what programs send: each token once into a node, and copies to the other ranks that need it."""
    lengths = (5, 1070, 301, 17, 1)
    for nodes, ranks in ((2, 3), (6, 1), (1, 6)):
        cluster = nodes_of(nodes * ranks, nodes)
        plan = plan_sequences(lengths, cluster, shape=MHA, method=method)
        plan = plan if window is None else in_window(plan, window)
        links, sent = plan_links(plan, cluster), np.zeros((2, plan.ranks))
        for rank in range(plan.ranks):
            for group, messages in compile_rank(plan, rank).program.messages.items():
                for message in messages.sends if not group.kind.endswith("return") else ():
                    sent[int(not cluster.same_node(rank, message.peer)), rank] += message.tokens
        assert links.far[0] == pytest.approx(sent[1]), "what leaves a rank's node is counted exactly"
        assert links.far.sum(1) == pytest.approx(sent[1].sum())
        assert links.near[0].sum() == pytest.approx(links.near[1].sum())
        assert (links.needed == kv_traffic(plan).table(plan.ranks).sum(0)).all()
        # Copies are counted as if all ranks of a node received a share that they need.
        assert abs(links.near[0].sum() - sent[0].sum()) <= 0.25 * sent[1].sum()


@pytest.mark.parametrize("window", [None, 0, 127, 128, 200, 500])
def test_tiles_are_those_that_queries_touch(window):
    """From the tile of the first query's first key to that of the last query's own, row by row of tiles."""
    shards = (Shard(0, 0, 1, 0), Shard(0, 1, 300, 1), Shard(0, 300, 1000, 0))
    plan = SequencePlan((1000,), 2, "test", shards, shards, ("gather",), window=window)
    expected = np.zeros(2)
    for shard in shards:
        for first in range(shard.start, shard.stop, TILE):
            begin = 0 if window is None else max(0, first - window) // TILE
            expected[shard.rank] += (-(-min(first + TILE, shard.stop) // TILE) - begin) * TILE**2
    assert tile_area(plan).tolist() == expected.tolist()
    assert (tile_area(plan) >= plan.area).all()
    if window is None:
        assert tile_area(SequencePlan((1000,), 2, "test", shards, shards, ("ring",))).sum() >= expected.sum()


@pytest.mark.parametrize("ranks", [16, 64])
def test_windowed_layers_are_level_and_send_little(ranks):
    """Where every second layer has a window of 128, as in GPT-OSS: equal tokens are nearly equal areas."""
    batch = draw_batch("prolong", 4096 * ranks, np.random.default_rng(0))
    plan = plan_sequences(batch, a800(ranks), shape=WINDOWED, method="chunks")
    windowed = in_window(plan, 128)
    assert fullest(windowed.area) <= 1.06
    assert kv_traffic(windowed).tokens.sum() <= 0.07 * kv_traffic(plan).tokens.sum()
    assert windowed.linear == plan.linear and not windowed.remapped
    assert in_window(plan, max(batch) - 1) is plan, "such a window hides nothing"


def test_cost_of_windowed_layers_is_in_plans():
    """Half of the layers cost what their windows do."""
    cluster = a800(16)
    batch = draw_batch("prolong", 4096 * 16, np.random.default_rng(0))
    plan = plan_sequences(batch, cluster, shape=WINDOWED, method="chunks")
    costs = [step_cost(plan, cluster, replace(WINDOWED, windowed_layers=n)) for n in (1, 16, 32)]
    whole, none = step_cost(plan, cluster, GQA), replace(WINDOWED, windowed_layers=0, window=None)
    assert step_cost(plan, cluster, none) == whole
    assert whole.attention > costs[0].attention > costs[1].attention > costs[2].attention
    assert whole.exchange > costs[0].exchange > costs[1].exchange > costs[2].exchange
    assert costs[1].attention == pytest.approx((whole.attention + costs[2].attention) / 2)
    pairs = [causal_area(batch), causal_area(batch, 128)]
    limits = [limit_seconds(batch, cluster, shape) for shape in (GQA, WINDOWED)]
    saved = attention_seconds((pairs[0] - pairs[1]) / 2, cluster, GQA) / 16
    assert limits[0] - limits[1] == pytest.approx(saved)


def test_wrong_windows_are_refused():
    shards = (Shard(0, 0, 5, 0), Shard(0, 5, 9, 1))
    for exchange, window in (("ring", 3), ("gather", -1)):
        with pytest.raises(ValueError, match=f"window={window}"):
            SequencePlan((9,), 2, "test", shards, shards, (exchange,), window=window)
    for wrong in ({"windowed_layers": 4}, {"window": 4}, {"window": 4, "windowed_layers": 33}):
        with pytest.raises(ValueError, match="windowed_layers"):
            replace(GQA, **wrong)


def test_seconds_of_links():
    """By hand: two nodes of two ranks that share a NIC, 8 GB/s inside and 1 GB/s between."""
    cluster = Cluster(2, 2, 1, 8e9, 1e9, 1e12, 1e9)
    inside = TokenTraffic(*(np.array(x) for x in ([0, 0], [1, 1], [3, 1])))
    assert traffic_seconds(inside, 1e9, cluster) == pytest.approx(0.5)
    across = TokenTraffic(*(np.array(x) for x in ([0, 1], [2, 3], [3, 1])))
    assert traffic_seconds(across, 1e9, cluster) == pytest.approx(4.0)
    two = Cluster(2, 2, 2, 8e9, 1e9, 1e12, 1e9)
    assert traffic_seconds(across, 1e9, two, routed=False) == pytest.approx(3.0)
    assert traffic_seconds(across, 1e9, two, routed=True) == pytest.approx(2.0)
    assert traffic_seconds(across, 1e9, two) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="rank 3 of the plan is not in a cluster of 2"):
        traffic_seconds(across, 1.0, nodes_of(1, 2))


def test_costs_of_models():
    """Grouped queries make fewer bytes; the crossing of ring compute and transfer is where both take equally long."""
    cluster = a800(16)
    plan = plan_sequences([8192] * 8, cluster, shape=MHA, method="ring")
    many, few = step_cost(plan, cluster, MHA), step_cost(plan, cluster, GQA)
    assert few.exchange == pytest.approx(many.exchange / 8) and few.attention == many.attention
    assert few.exposed < many.exposed
    tokens = hidden_tokens(cluster, MHA, cluster.nic_bandwidth)
    compute = 2 * tokens**2 * 4096 / (cluster.flops * 0.6)
    assert compute == pytest.approx(2 * tokens * 4096 * 2 / cluster.nic_bandwidth)
    assert hidden_tokens(cluster, GQA, cluster.nic_bandwidth) == pytest.approx(tokens / 8)
    zones = plan_sequences([30000, *[900] * 40], cluster, shape=MHA, method="zones")
    assert zones.remapped and step_cost(zones, cluster, MHA).remap > 0
    bare = step_cost(zones, cluster, MHA, remapped=False)
    assert bare.remap == 0 and bare.linear > step_cost(zones, cluster, MHA).linear


def test_a_ring_goes_at_the_pace_of_its_largest_share():
    """Four nodes of one rank and one NIC: three rounds forward, three backward, and three of gradients, which are wider
    inside a node."""
    cluster = nodes_of(4, 1)

    def exchange(*shares: int, width: float | None = 2.0) -> float:
        ends = np.cumsum(shares).tolist()
        places = enumerate(zip([0, *ends[:-1]], ends, strict=True))
        shards = tuple(Shard(0, start, stop, rank) for rank, (start, stop) in places)
        plan = SequencePlan((ends[-1],), 4, "ring", shards, shards, ("ring",))
        return step_cost(plan, cluster, MHA, gradient_width=width).exchange

    block = 1000 * 16384 / cluster.nic_bandwidth * MHA.layers
    assert exchange(1000, 1000, 1000, 1000) == pytest.approx(3 * 4 * block)
    for width in (1.0, None):
        assert exchange(1000, 1000, 1000, 1000, width=width) == pytest.approx(3 * 3 * block)
    plan = plan_sequences([4000], nodes_of(1, 4), shape=MHA, method="ring")
    inside = 1000 * 16384 / nodes_of(1, 4).intra_node_bandwidth * MHA.layers
    assert step_cost(plan, nodes_of(1, 4), MHA).exchange == pytest.approx(3 * 4 * inside)
    assert exchange(400, 2000, 600, 1000) == pytest.approx(3 * 4 * 2 * block)


H200 = {8: Cluster.sheet("h200-8x400g"), 16: Cluster.sheet("h200-8x400g", nodes=2)}
MODEL = AttentionShape(4096, 32, 4, 32, 14336)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_chunks_is_as_good_as_any_planner(distribution):
    """Within 2 % of the quickest on average, within 4 % on any batch."""
    for cluster, shape in ((a800(16), MHA), (H200[16], MODEL), (H200[8], MODEL)):
        found = []
        for number in range(2):
            batch = draw_batch(distribution, 4096 * cluster.world_size, np.random.default_rng(number))
            plans = {method: plan_sequences(batch, cluster, shape=shape, method=method) for method in OWN}
            costs = {method: step_cost(plan, cluster, shape).total for method, plan in plans.items()}
            found.append(costs["chunks"] / min(costs.values()))
        assert np.mean(found) <= 1.02 and max(found) <= 1.04


@pytest.mark.parametrize(("method", "window"), [*((each, None) for each in OWN), ("chunks", 128)])
def test_rounds_of_the_model_are_those_of_the_program(method, window):
    for ranks, cluster in H200.items():
        batch = draw_batch("packed", 4096 * ranks, np.random.default_rng(2))
        plan = plan_sequences(batch, cluster, shape=MODEL, method=method)
        plan = plan if window is None else in_window(plan, window)
        copies = bool(plan_links(plan, cluster).copies.any())
        rounds = sum(plan_rounds(plan, cluster, least_turn(plan, cluster, MODEL), copies))
        found = []
        for rank in range(ranks):
            program = compile_rank(plan, rank).program
            waits = [step.group for step in program.forward if isinstance(step, Wait)]
            found.append(sum(bool(program.messages[group].receives) for group in waits))
            computes = [step for step in program.forward if isinstance(step, Compute)]
            assert len(computes) <= found[-1] + 2
        # A rank that needs no copies, or keys of some turns alone, has fewer.
        assert all(came <= most for came, most in zip(found, rounds, strict=True))
        assert max(found) == max(rounds)


def test_launches_messages_and_the_host_cost_time():
    """By hand: a ring of four ranks has three rounds; the host counts where it takes longer than the device."""
    quiet = nodes_of(1, 4)
    plan = plan_sequences([200_000], quiet, shape=MHA, method="ring")
    asked = what_is_asked(plan, quiet, plan_links(plan, quiet), TurnTokens(1, 1))
    assert asked.rounds == 3 and asked.messages == (6, 12)
    free = step_cost(plan, quiet, MHA)
    assert free.launch == free.host == 0
    launched = step_cost(plan, replace(quiet, launch_seconds=1e-3), MHA)
    assert launched.total - free.total == pytest.approx(MHA.layers * sum(asked.launches) * 1e-3)
    late = step_cost(plan, replace(quiet, message_seconds=1e-3), MHA)
    assert late.exchange - free.exchange == pytest.approx(MHA.layers * 9 * 1e-3)
    slow = step_cost(plan, replace(quiet, host_seconds=1.0), MHA)
    assert slow.total == slow.host > MHA.layers * (sum(asked.launches) + sum(asked.messages))
    assert step_cost(plan, replace(quiet, host_seconds=1e-9), MHA).total == free.total


def test_turns_are_sized_in_bytes():
    cluster = replace(H200[16], host_seconds=0.0)
    least = turn_tokens(cluster, kv_bytes(MODEL))
    rates = np.array([cluster.intra_node_bandwidth, cluster.nic_bandwidth])
    seconds = np.array(least) * kv_bytes(MODEL) / rates
    assert seconds == pytest.approx(8 * cluster.message_seconds, rel=0.01), "latency is an eighth of a turn"
    slow = [turn_tokens(replace(cluster, host_seconds=host), kv_bytes(MODEL)) for host in (4e-5, 8e-5)]
    seconds = np.array(slow) * kv_bytes(MODEL) / rates
    assert (seconds > 2e-4).all() and seconds[1] - seconds[0] == pytest.approx(5 * 4e-5, rel=0.01), "5 operations"
    rows = turn_tokens(cluster, kv_bytes(MODEL), rows=1e-3)
    assert np.array(rows) * kv_bytes(MODEL) / rates == pytest.approx(1e-3 + 4 * cluster.launch_seconds, rel=0.01)
    assert turn_tokens(cluster, kv_bytes(MHA)).inter == pytest.approx(least.inter / 8, rel=0.01)
    assert number_of_turns([0, 99, 100, 250, 10_000], 100).tolist() == [1, 1, 1, 2, 8]
    assert turn_tokens(replace(cluster, **NO_LATENCY), 1024) == TurnTokens(1, 1)
    alone = replace(cluster, nodes=1, nic_bandwidth=float("inf"))
    assert turn_tokens(alone, 2048).intra == least.intra
    assert turn_tokens(replace(alone, **NO_LATENCY), 2048) == TurnTokens(1, 1), "nor does a link that is not there cost"


def test_a_host_that_runs_ahead_costs_no_turns():
    """By hand: with eight turns on both levels the host starts 266 operations of attention, five of a turn forward."""
    cluster = replace(nodes_of(2, 8), host_seconds=4e-5)
    most = 266 * 4e-5
    link = cluster.nic_bandwidth * len(cluster.nics(0)) / 1024
    for device, share in ((0.0, 1.0), (most / 2, 1.0), (most, 1.0), (most / 0.75, 0.5), (2 * most, 0.0), (1.0, 0.0)):
        assert turn_tokens(cluster, 1024, device=device).inter == max(1, int(share * 5 * 4e-5 * link)), device
    alone = replace(cluster, nodes=1)  # 138 operations
    assert turn_tokens(alone, 1024, device=276 * 4e-5).intra == 1 < turn_tokens(alone, 1024, device=200 * 4e-5).intra
    few, many = ([tokens] * 16 for tokens in (256, 32768))
    plans = [plan_sequences(batch, cluster, shape=MHA, method="gather") for batch in (few, many)]
    slow, quick = (least_turn(plan, cluster, MHA).inter for plan in plans)
    assert slow > 100 and quick == 1


def test_hybrid_of_the_installed_megatron():
    pytest.importorskip("megatron.core.pipeline_parallel.hybrid_cp_schedule")
    batch = draw_batch("prolong", 4096 * 16, np.random.default_rng(0))
    plan = baselines.plan_sequences(batch, a800(16), shape=MHA, method="hybrid")
    sizes = {len(plan.ring(sequence)) for sequence in range(len(batch))}
    assert sizes <= {1, 2, 4, 8, 16} and len(sizes) > 1
    assert np.ptp(plan.linear_tokens) == 0


def test_one_rank_is_local():
    for method in OWN:
        plan = plan_sequences([5, 1, 900], nodes_of(1, 1), shape=MHA, method=method)
        assert plan.exchange == ("local",) * 3 and not plan.remapped
        assert plan.shards(0) == (Shard(0, 0, 5, 0), Shard(1, 0, 1, 0), Shard(2, 0, 900, 0))


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([], {}, "no sequences to plan"),
        ([5, 0], {}, "sequence 1 has length 0"),
        ([-3], {}, "sequence 0 has length -3"),
        ([2.5], {}, "length 2.5; lengths are whole numbers"),
        ([True], {}, "length True"),
        ([9], {"method": "chunk"}, r"unknown method 'chunk' \(did you mean 'chunks'\?\); known: chunks, zones"),
        ([9], {"chunk": 0}, "chunk=0 must be at least 1"),
        ([9], {"token_capacity": 0}, "token_capacity=0 must be at least 1"),
        ([900, 9], {"token_capacity": 100}, r"sequence 0 has 900 tokens, more than all 4 .* it takes 225 for this seq"),
        ([99, 99, 99], {"token_capacity": 50}, "token_capacity=50 is below the mean: 297 tokens on 4 ranks take 75"),
    ],
)
def test_bad_input(lengths, options, message):
    with pytest.raises(ValueError, match=message):
        plan_sequences(lengths, nodes_of(2, 2), shape=MHA, **options)


def test_numpy_lengths_and_bad_batches():
    assert plan_sequences(np.array([4, 5]), nodes_of(1, 2), shape=MHA).lengths == (4, 5)
    with pytest.raises(ValueError, match="unknown distribution 'x'; known: prolong"):
        draw_lengths("x", 1, np.random.default_rng(0))
    with pytest.raises(ValueError, match="each at least 1"):
        draw_batch([3, 0], 10, np.random.default_rng(0))
    with pytest.raises(ValueError, match="tokens=0"):
        draw_batch([3], 0, np.random.default_rng(0))
    assert sum(draw_batch([3], 10, np.random.default_rng(0))) == 10


def test_published_percentiles_come_back():
    drawn = draw_lengths("prolong", 40000, np.random.default_rng(0))
    assert np.percentile(drawn, [25, 50, 75, 99]) == pytest.approx([1237, 1914, 3467, 16273], rel=0.05)
    mix = draw_lengths("mix", 40000, np.random.default_rng(0))
    assert mix[mix == 65536].sum() / mix.sum() == pytest.approx(0.6, abs=0.08)


def test_the_example_of_the_package():
    """The glossary of `balancing.sequences`: 3 ranks, documents of 10, 3 and 2 tokens."""
    shape = AttentionShape(hidden=4096, heads=32, kv_heads=8, layers=32, ffn_hidden=14336)
    plan = plan_sequences([10, 3, 2], Cluster.preset("h200-8x400g").relabel(1, 3), shape=shape)
    assert [tuple(shard) for shard in plan.attention] == [
        (0, 0, 1, 0), (0, 8, 10, 0), (2, 0, 2, 0), (0, 6, 8, 1), (1, 0, 3, 1), (0, 1, 6, 2),
    ]  # fmt: skip
    assert plan.area.tolist() == [23, 21, 20] and plan.linear_tokens.tolist() == [5, 5, 5]
    traffic = kv_traffic(plan)
    sent = zip(traffic.source.tolist(), traffic.target.tolist(), traffic.tokens.tolist(), strict=True)
    assert sorted(sent) == [(0, 1, 1), (0, 2, 1), (1, 0, 2), (2, 0, 5), (2, 1, 5)]
