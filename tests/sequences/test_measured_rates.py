"""Plans with measured rates: tokens stay equal, time is balanced, calls and the host cost what the table says."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing.cluster import Cluster
from balancing.cluster.presets import H100
from balancing.cluster.rates import TILE, causal_pairs
from balancing.kernels.pairs import pair_flops
from balancing.sequences import (
    AttentionShape,
    compile_rank,
    limit_seconds,
    plan_attention,
    plan_sequences,
    step_cost,
)
from balancing.sequences.cost import (
    attention_rank_seconds,
    attention_seconds,
    attention_work,
    extra_pairs,
    kv_bytes,
    least_turn,
    linear_seconds,
    whole_seconds,
)
from balancing.sequences.engine.program import Compute
from balancing.sequences.micro_batches import document_seconds
from balancing.sequences.plan import METHODS
from balancing.sequences.planners.dealing import deal, piece_area
from balancing.sequences.rounds import TurnTokens, plan_rounds, turn_tokens
from balancing.sequences.sequence_plan import in_window
from benchmarks.sequences.lengths import DISTRIBUTIONS, draw_batch

GQA = AttentionShape(hidden=4096, heads=32, kv_heads=4, layers=32, ffn_hidden=14336)
WINDOWED = replace(GQA, window=128, windowed_layers=16)
QUIET = {"launch_seconds": 0.0, "message_seconds": 0.0, "host_seconds": 0.0}
# The host of an H100 machine takes longer than the device here; these are for costs of the device alone.
FREE_HOST = replace(H100, operation_seconds=0.0, post_seconds=0.0)


def nodes_of(nodes: int, ranks: int, nics: int = 1) -> Cluster:
    return Cluster(nodes, ranks, nics, 1.6e11, 2.4e10, 7.9e14, 8e10, **QUIET, rates=FREE_HOST)


LENGTHS = st.lists(st.one_of(st.integers(1, 40), st.integers(1, 900), st.integers(1, 30000)), min_size=1, max_size=30)
CLUSTERS = st.builds(nodes_of, st.integers(1, 3), st.integers(1, 6), st.integers(1, 4))


@settings(max_examples=80)
@given(LENGTHS, CLUSTERS, st.sampled_from(METHODS), st.sampled_from((GQA, WINDOWED)))
def test_every_plan_has_equal_tokens_and_takes_the_limit_at_least(lengths, cluster, method, shape):
    """`SequencePlan` checks that it holds every token once."""
    plan = plan_sequences(lengths, cluster, shape=shape, method=method)
    assert np.ptp(plan.linear_tokens) <= 1
    if method == "chunks":
        assert not plan.remapped
    cost, limit = step_cost(plan, cluster, shape), limit_seconds(lengths, cluster, shape)
    assert np.isfinite(cost.total) and cost.total >= limit * (1 - 1e-9)
    assert plan.digest == plan_sequences(list(lengths), cluster, shape=shape, method=method).digest


@pytest.mark.parametrize("ranks", [8, 16])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_time_is_balanced_in_place_of_area(distribution, ranks):
    cluster = replace(Cluster.preset("h200-8x400g", nodes=ranks // 8), rates=FREE_HOST, **QUIET)
    for seed in range(2):
        batch = draw_batch(distribution, 4096 * ranks, np.random.default_rng(seed))
        timed = plan_sequences(batch, cluster, shape=GQA)
        level = plan_sequences(batch, replace(cluster, rates=None), shape=GQA)
        assert np.ptp(timed.tokens) == 0
        costs = [step_cost(plan, cluster, GQA).total for plan in (timed, level)]
        assert costs[0] <= costs[1] * (1 + 1e-12), "a plan by area is quicker"
        assert timed.area.max() <= 1.5 * timed.area.mean()


def test_time_is_more_even_than_with_equal_areas():
    """Over all distributions, and by much where documents are short and some ranks hold many of them."""
    before, after = [], []
    cluster = nodes_of(1, 8)
    for distribution in ("wikipedia", "lognormal", "prolong", "packed"):
        batch = draw_batch(distribution, 4096 * 8, np.random.default_rng(1))
        for found, rates in ((after, FREE_HOST), (before, None)):
            plan = plan_sequences(batch, replace(cluster, rates=rates), shape=GQA)
            seconds = plan.area + extra_pairs(plan, cluster, GQA)
            found.append(float(seconds.max() / seconds.mean()))
    assert np.mean(after) - 1 < 0.7 * (np.mean(before) - 1) and max(after) < max(before)


@pytest.mark.parametrize("method", ["chunks", "gather"])
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("distribution", ["packed", "prolong", "mix"])
def test_rows_and_pieces_are_those_of_the_calls_of_a_program(distribution, nodes, method):
    """On one node but for turns that bring no key of a document. On two a rank may have turns of both kinds, and the
    model counts more."""
    cluster = nodes_of(nodes, 8)
    batch = draw_batch(distribution, 4096 * 8 * nodes, np.random.default_rng(1))
    plan = plan_sequences(batch, cluster, shape=GQA, method=method)
    # Where rows cost nothing, so that no keys are waited for.
    plan = replace(plan, cluster=replace(cluster, rates=None))
    work = attention_work(plan, sum(plan_rounds(plan, cluster, TurnTokens(1, 1))))
    rows, pieces = np.zeros(plan.ranks), np.zeros(plan.ranks)
    for rank in range(plan.ranks):
        program = compile_rank(plan, rank).program
        for step in program.forward:
            if isinstance(step, Compute) and step.call is not None:
                queries = program.calls[step.call].pieces.queries
                rows[rank] += sum(-(-each // TILE) * TILE for each in queries)
                pieces[rank] += len(queries)
    if nodes == 1:
        assert (work.queries >= 0.95 * rows).all() and (work.queries <= 1.1 * rows).all()
        assert 0.95 <= work.pieces.sum() / pieces.sum() <= 1.2
    else:
        assert 0.95 <= work.queries.sum() / rows.sum() <= 1.35


def test_a_document_takes_the_time_of_its_curve():
    cluster = nodes_of(1, 1)
    flops = pair_flops(GQA.heads, GQA.head_size)
    for tokens in (128, 1024, 8192, 32768):
        found = whole_seconds([tokens], cluster, GQA)[0] / GQA.layers
        kernel = dict(H100.attention)["fa2"]
        measured = sum(
            causal_pairs(tokens, tokens) * flops * more / point.flops
            for way, more in ((kernel.forward, 1.0), (kernel.backward, 2.5))
            for point in way
            if point.keys == tokens
        )
        assert found == pytest.approx(measured, rel=0.1)
    plan = plan_sequences([5000, 300, 128], cluster, shape=GQA)
    alone = whole_seconds([5000, 300, 128], cluster, GQA).sum()
    assert step_cost(plan, cluster, GQA).attention == pytest.approx(alone)
    documents = document_seconds([5000, 300], cluster, GQA) - np.array([5000, 300]) * linear_seconds(1, cluster, GQA)
    assert documents == pytest.approx(whole_seconds([5000, 300], cluster, GQA))
    assert attention_seconds(1e9, cluster, GQA) < whole_seconds([44721], cluster, GQA)[0], "long pieces are quickest"


def test_more_rounds_cost_rows_and_the_host():
    plain = nodes_of(1, 8)
    plan = plan_sequences([40000], plain, shape=GQA, method="gather")
    few, many = np.full(8, 1), np.full(8, 8)
    seconds = [sum(attention_rank_seconds(attention_work(plan, rounds), plain, GQA)).max() for rounds in (few, many)]
    assert seconds[1] > 1.1 * seconds[0]
    slow = replace(plain, rates=replace(H100, operation_seconds=1e-3), message_seconds=1e-6)
    assert turn_tokens(replace(plain, message_seconds=1e-6), 1024).intra < turn_tokens(slow, 1024).intra
    assert turn_tokens(plain, 1024) == TurnTokens(1, 1)
    turn = least_turn(plan, plain, GQA).intra * kv_bytes(GQA) / plain.intra_node_bandwidth
    assert least_turn(in_window(plan, 512), plain, GQA) == TurnTokens(1, 1), "each query is computed once"
    forward = [attention_rank_seconds(attention_work(plan, rounds), plain, GQA)[0].max() for rounds in (few, many)]
    assert turn == pytest.approx((forward[1] - forward[0]) / 7, rel=0.01), "the rows of a turn, and nothing else here"
    posts = replace(plain, rates=replace(FREE_HOST, post_seconds=1e-3))
    free, host = step_cost(plan, plain, GQA), step_cost(plan, slow, GQA)
    assert free.host == 0 and host.host > 0 and host.total == max(host.device, host.host)
    assert step_cost(plan, posts, GQA).host == pytest.approx(step_cost(plan, posts, GQA).host // 1e-3 * 1e-3)
    assert step_cost(plan, posts, GQA).host > 0


def test_given_tokens_stay_where_moving_them_costs_the_host_more_than_it_evens():
    """With a slow host the given layout is kept; with a free one attention is balanced."""
    lengths = [3000, 1000, 900, 800]
    linear = plan_sequences(lengths, nodes_of(1, 4), shape=GQA, method="ring").attention
    whole = tuple(linear[0]._replace(sequence=at, start=0, stop=length, rank=at) for at, length in enumerate(lengths))
    slow = replace(nodes_of(1, 4), rates=replace(H100, operation_seconds=10e-3))
    assert plan_attention(lengths, whole, slow, shape=GQA).method == "given"
    assert plan_attention(lengths, whole, nodes_of(1, 4), shape=GQA).method != "given"


def test_short_documents_take_longer_than_a_long_one_of_as_many_tiles():
    """136 documents of one tile, and one of 16 rows with 136 tiles."""
    cluster = nodes_of(1, 1)
    for rates, least, most in ((FREE_HOST, 2.0, 4.0), (None, 1 - 1e-9, 1 + 1e-9)):
        short, long = (whole_seconds(each, replace(cluster, rates=rates), GQA).sum() for each in ([128] * 136, [2048]))
        assert least <= short / long <= most


@settings(max_examples=60)
@given(LENGTHS, st.integers(1, 8), st.randoms(use_true_random=False))
def test_dealing_with_extra_area_loses_no_token(lengths, buckets, random):
    total = sum(lengths)
    quotas = [total // buckets + (at < total % buckets) for at in range(buckets)]
    mean = sum(piece_area((0, 0, length)) for length in lengths) / buckets
    extra = [random.uniform(-0.25, 0.25) * mean for _ in quotas]
    dealt = deal([(number, 0, length) for number, length in enumerate(lengths)], quotas, 512, extra=extra)
    assert [sum(stop - start for _, start, stop in own) for own in dealt] == quotas
    held = sorted(piece for own in dealt for piece in own)
    for number, length in enumerate(lengths):
        own = [piece[1:] for piece in held if piece[0] == number]
        assert own[0][0] == 0 and own[-1][1] == length
        assert all(first[1] == second[0] for first, second in pairwise(own))
