"""The attention engine against attention of each document alone: output and gradients, in float64."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from balancing.cluster import Cluster
from balancing.sequences import compile_rank, linear_layout
from balancing.sequences.reference import attention
from balancing.sequences.sequence_plan import SequencePlan, Shard, in_window
from tests.support.pool import Pool
from tests.support.sequence_plans import in_many_turns, made_for, nodes_of, random_plan, zigzag_plan

Case = tuple[SequencePlan, Cluster | None, str | int, int, int]  # plan, cluster, routing, heads, kv_heads
SIZE = 4  # of heads of queries and keys, and of values unless a test says otherwise
SCALE = 0.37


class Kind(NamedTuple):
    """Of attention: with a sink a head, with a window, with values of this size."""

    sinks: bool = False
    window: int | None = None
    values: int = SIZE


def _inputs(plan: SequencePlan, heads: int, kv_heads: int, values: int = SIZE) -> tuple[np.ndarray, ...]:
    """q, k, v and the output's gradient [token, heads, size], documents behind one another."""
    draw = np.random.default_rng(sum(plan.lengths))
    shapes = ((heads, SIZE), (kv_heads, SIZE), (kv_heads, values), (heads, values))
    return tuple(draw.standard_normal((sum(plan.lengths), *shape)) for shape in shapes)


def _tokens(plan: SequencePlan, rank: int) -> np.ndarray:
    """The token numbers of a rank's linear layout."""
    first = np.concatenate(([0], np.cumsum(plan.lengths)))
    shards = plan.shards(rank, linear=True)
    return np.concatenate([np.zeros(0, int)] + [np.arange(s.start, s.stop) + first[s.sequence] for s in shards])


PLAIN = Kind()


def _sink(heads: int) -> np.ndarray:
    """Scores of a sink of each head, small and large."""
    return np.linspace(-2.0, 3.0, heads)


def _on_rank(
    cases: list[Case], twice: bool = False, dtype: str = "float64", kind: Kind = PLAIN, in_order: bool = False
) -> list[list[np.ndarray]]:
    import torch
    import torch.distributed as dist

    from balancing.sequences import SequenceAttention
    from balancing.sequences.engine import gather

    gather.TILE = 8  # or short sequences would come in one turn
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = []
    for plan, cluster, routing, heads, kv_heads in cases:
        own = _tokens(plan, rank)
        inputs = _inputs(plan, heads, kv_heads, kind.values)
        *qkv, grad = (torch.from_numpy(x[own]).to(getattr(torch, dtype)) for x in inputs)
        leaves = [x.requires_grad_() for x in (*qkv, *([torch.from_numpy(_sink(heads))] if kind.sinks else []))]
        for _ in range(1 + twice):
            mine = made_for(plan, cluster, heads=heads, kv_heads=kv_heads, value_size=kind.values)
            mine = mine if kind.window is None else in_window(mine, kind.window)
            attention = SequenceAttention(mine, program=compile_rank(mine, rank, routing=routing))
            attention.transport.in_order |= in_order
            out = attention(*qkv, softmax_scale=SCALE, sink=leaves[3] if kind.sinks else None)
            found.append([x.detach().double().numpy() for x in (out, *torch.autograd.grad(out, leaves, grad))])
            assert out.dtype is qkv[0].dtype
    dist.destroy_process_group()
    return found


def _alone(plan: SequencePlan, heads: int, kv_heads: int, kind: Kind) -> list[np.ndarray]:
    """Output and gradients by the reference."""
    import torch

    *qkv, grad = (torch.from_numpy(x) for x in _inputs(plan, heads, kv_heads, kind.values))
    leaves = [x.requires_grad_() for x in (*qkv, *([torch.from_numpy(_sink(heads))] if kind.sinks else []))]
    out = attention(*leaves[:3], plan, scale=SCALE, window=kind.window, sink=leaves[3] if kind.sinks else None)
    return [x.detach().numpy() for x in (out, *torch.autograd.grad(out, leaves, grad))]


@pytest.mark.parametrize("sinks, window", [(False, None), (True, None), (False, 7)])
def test_the_reference_is_attention_of_each_document_alone(sinks, window):
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    plan = random_plan(RAGGED[0], 4, 1)
    q, k, v, _ = (torch.from_numpy(x) for x in _inputs(plan, 4, 2))
    sink = torch.from_numpy(_sink(4)) if sinks else None
    found, start = attention(q, k, v, plan, scale=SCALE, window=window, sink=sink), 0
    for length in plan.lengths:
        rows, apart = slice(start, start + length), torch.arange(length)[:, None] - torch.arange(length)
        seen = (apart >= 0) & (apart <= (window or length))
        qkv, seen = [x[rows].transpose(0, 1) for x in (q, k, v)], seen.expand(4, -1, -1).to(q.dtype).log()
        if sinks:  # a key that is all zeros, with the sink as its mask and no value
            qkv = [qkv[0], *(torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in qkv[1:])]
            seen = torch.cat((seen, sink[:, None, None].expand(-1, length, 1)), -1)
        alone = scaled_dot_product_attention(*qkv, attn_mask=seen, scale=SCALE, enable_gqa=True).transpose(0, 1)
        torch.testing.assert_close(found[rows], alone, rtol=0, atol=1e-13)
        start += length


def _check(
    pool: Pool,
    ranks: int,
    cases: list[Case],
    dtype: str = "float64",
    tolerance: float = 1e-10,
    kind: Kind = PLAIN,
    in_order: bool = False,
) -> None:
    by_rank = pool.run(ranks, _on_rank, cases, dtype=dtype, kind=kind, in_order=in_order)
    names = ("out", "dq", "dk", "dv", *["dsink"] * kind.sinks)
    for number, (plan, _, _, heads, kv_heads) in enumerate(cases):
        for name, whole, *parts in zip(
            names, _alone(plan, heads, kv_heads, kind), *(found[number] for found in by_rank), strict=True
        ):
            if name == "dsink":
                np.testing.assert_allclose(sum(parts), whole, rtol=tolerance, atol=tolerance, err_msg=f"{name}, {plan}")
                continue
            for rank, part in enumerate(parts):
                np.testing.assert_allclose(
                    part,
                    whole[_tokens(plan, rank)],
                    rtol=0 if dtype == "float64" else tolerance,
                    atol=tolerance,
                    err_msg=f"{name}, {plan}, rank {rank}",
                )


HEADS = [(4, 4), (4, 2), (4, 1)]
RAGGED = [(1, 2, 3, 1, 97, 31, 5), (64,), (16,) * 8, (1,) * 40, (2, 3, 5, 7, 11, 13, 17, 19, 23), (211, 1, 1, 40)]


def _cases(ranks: int) -> list[Case]:
    """Every batch under every exchange, with layouts, kinds of heads, nodes, turns and routing taking turns."""
    cases: list[Case] = []
    nodes = nodes_of(ranks, 2, nics=max(1, ranks // 2))
    for number, lengths in enumerate(RAGGED):
        for kind, exchange in enumerate(("ring", "gather", "mixed")):
            heads = HEADS[(number + kind) % 3]
            cluster = (None, nodes, in_many_turns(nodes))[(number + kind) % 3]
            routing = "off" if cluster is None else ("off", 2, "auto")[(number // 2) % 3]
            linear = ("same", "equal", "random")[(number // 2 + kind) % 3]
            plan = random_plan(lengths, ranks, number, exchange=exchange, linear=linear)
            cases.append((plan, cluster, routing, *heads))
            if exchange != "mixed":
                cases.append((zigzag_plan(lengths, ranks, exchange=exchange, linear=linear), cluster, routing, *heads))
    return cases


@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_documents_alone(pool: Pool, ranks: int) -> None:
    _check(pool, ranks, _cases(ranks)[:: 2 if ranks == 2 else 1])


def test_where_transfers_run_in_the_order_of_their_start(pool: Pool) -> None:
    """As over NCCL: collectives and batches of messages, started by one thread. Routed slices need NCCL's own order."""
    cases = [case for case in _cases(4) if case[2] == "off"]
    _check(pool, 4, cases, in_order=True)
    _check(pool, 4, cases[::3], in_order=True, kind=Kind(window=7))


def test_sinks_take_their_share_of_each_softmax(pool: Pool) -> None:
    """Once a query, however many blocks its keys come in; with local, ring and gathered sequences."""
    _check(pool, 4, _cases(4)[1::6], kind=Kind(sinks=True))
    lengths = (97, 5)
    plans = [zigzag_plan(lengths, 4, linear="random"), random_plan(lengths, 4, 1, exchange="gather", linear="equal")]
    _check(pool, 4, [(plan, None, "off", 4, 2) for plan in plans], "bfloat16", 4e-2, Kind(sinks=True))


@pytest.mark.parametrize(("window", "sinks"), [(0, False), (7, True), (40, False)])
def test_windows_over_ranks(pool: Pool, window: int, sinks: bool) -> None:
    """Of documents that are longer than the window and of shorter ones, over nodes and routed."""
    _check(pool, 4, _cases(4)[window % 3 :: 3], kind=Kind(sinks, window))


@pytest.mark.parametrize("values", [2, 7])
def test_values_of_another_size_over_ranks(pool: Pool, values: int) -> None:
    """As in multi-latent attention; with windows and sinks as well. What is sent is as small as it is."""
    _check(pool, 4, _cases(4)[values % 3 :: 3], kind=Kind(values=values))
    _check(pool, 4, _cases(4)[::9], kind=Kind(True, 7, values))
    plans = [zigzag_plan((97, 5), 4, linear="random"), random_plan((40, 61), 4, 1, exchange="gather", linear="equal")]
    _check(pool, 4, [(plan, None, "off", 4, 4) for plan in plans], "bfloat16", 4e-2, Kind(values=values))


@pytest.mark.parametrize(("ranks", "proxies"), [(6, 2), (8, 4)])
def test_routed_over_proxies_on_every_node(pool: Pool, ranks: int, proxies: int) -> None:
    """Two nodes: a ring, gathered prefixes and changes of layout, over several NICs of a node."""
    cluster = nodes_of(ranks, 2, nics=proxies)
    plans = [
        zigzag_plan((301, 5), ranks, linear="random"),
        random_plan((97, 130, 3), ranks, 1, linear="equal"),
        random_plan((97, 130, 3), ranks, 2, exchange="gather", linear="random"),
    ]
    _check(pool, ranks, [(plan, cluster, proxies, 2, 1) for plan in plans])


def test_many_short_documents_and_ranks_without_tokens(pool: Pool) -> None:
    one = (Shard(0, 0, 60, 0),)
    lopsided = SequencePlan((60,), 4, "test", one, linear_layout(one, nodes_of(4, 2)), ("local",))
    short = random_plan([1 + n % 4 for n in range(250)], 4, 3, linear="equal", cuts=1)
    _check(pool, 4, [(lopsided, nodes_of(4, 2, nics=2), 2, 4, 2), (short, None, "off", 2, 2)])


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 4e-2)])
def test_smaller_types(pool: Pool, dtype: str, tolerance: float) -> None:
    """Merged and summed in float32: a ring of eight chunks is no less exact than its inputs."""
    plans = [zigzag_plan((97, 5), 4, linear="random"), random_plan((40, 61), 4, 1, exchange="gather", linear="equal")]
    _check(pool, 4, [(plan, nodes_of(4, 2, nics=2), 2, 4, 2) for plan in plans], dtype, tolerance)


def _repeats(cases: list[Case]) -> list[Any]:
    return [[x.tobytes() for x in one] for one in _on_rank(cases, twice=True)]


def test_repeats_bit_for_bit_and_routing_changes_no_bit(pool: Pool) -> None:
    ragged, ring = random_plan(RAGGED[0], 4, 5, linear="random"), zigzag_plan((50, 61), 4)
    nodes = nodes_of(4, 2, nics=2)
    clusters = nodes, in_many_turns(nodes)
    cases: list[Case] = [
        (plan, cluster, routing, 4, 2) for plan in (ragged, ring) for cluster in clusters for routing in ("off", 2)
    ]
    for found in pool.run(4, _repeats, cases):
        assert found[0::2] == found[1::2]
        assert found[0::4] == found[2::4]


def _events(plan: SequencePlan, cluster: Cluster, routings: list[str | int], values: int) -> list[tuple[int, ...]]:
    import torch
    import torch.distributed as dist

    from balancing.sequences import SequenceAttention

    dist.init_process_group("gloo")
    found = []
    tokens = len(_tokens(plan, dist.get_rank()))
    for routing in routings:
        made = made_for(plan, cluster, heads=4, kv_heads=2, value_size=values)
        attention = SequenceAttention(made, program=compile_rank(made, dist.get_rank(), routing=routing))
        shapes = (4, SIZE), (2, SIZE), (2, values)
        q, k, v = (torch.ones(tokens, *shape, dtype=torch.float64) for shape in shapes)
        attention(q, k, v)
        statistics = attention.statistics
        assert statistics.exposed_seconds > 0
        names = ("intra_bytes", "inter_bytes", "remap_intra_bytes", "remap_inter_bytes")
        found.append(tuple(getattr(statistics, name) for name in names))
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("values", [SIZE, 3])
def test_events_count_bytes_and_proxies_spread_them(pool: Pool, values: int) -> None:
    """A ring of ranks 1 and 2 over two nodes; ranks 0 and 3 stand by, so with routing each sends half."""
    shards = (Shard(0, 0, 50, 1), Shard(0, 50, 100, 2))
    plan = SequencePlan((100,), 4, "test", shards, linear_layout(shards, nodes_of(4, 2)), ("ring",))
    direct, routed = zip(*pool.run(4, _events, plan, nodes_of(4, 2, nics=2), ["off", 2], values), strict=True)
    token = 2 * (SIZE + values) * 8
    assert [one[:2] for one in direct] == [(0, 0), (0, 50 * token), (0, 50 * token), (0, 0)]
    assert [one[1] for one in routed] == [25 * token] * 4
    assert [one[0] for one in routed] == [25 * token] * 4
    # 25 of a rank's 50 tokens go to the other rank of its node: q, k and v one way, the output the other.
    together, out = ((4 + 2) * SIZE + 2 * values) * 8, 4 * values * 8
    assert [one[2:] for one in direct] == [(25 * size, 0) for size in (together, out, out, together)]


def _sent_in_bf16(plan: SequencePlan, cluster: Cluster, routing: int | str) -> list[tuple[int, int]]:
    """Bytes sent inside the node and out of it, forward and in all."""
    import torch
    import torch.distributed as dist

    from balancing.sequences import SequenceAttention

    dist.init_process_group("gloo")
    plan = made_for(plan, cluster, item_bytes=2)
    attention = SequenceAttention(plan, program=compile_rank(plan, dist.get_rank(), routing=routing))
    shape = (len(_tokens(plan, dist.get_rank())), 2, SIZE)
    q, k, v = (torch.ones(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out = attention(q, k, v)
    forward = attention.statistics.intra_bytes, attention.statistics.inter_bytes
    out.sum().backward()
    dist.destroy_process_group()
    return [forward, (attention.statistics.intra_bytes, attention.statistics.inter_bytes)]


@pytest.mark.parametrize(("exchange", "near"), [("ring", 4), ("gather", 3)])
def test_sums_on_a_ring_travel_in_float32_inside_a_node(pool: Pool, exchange: str, near: int) -> None:
    """All else is as wide as keys: those of a backward pass, and the gradients that leave the node or were gathered."""
    plan = zigzag_plan((64,), 4, exchange=exchange)
    found = np.array(pool.run(4, _sent_in_bf16, plan, nodes_of(4, 2, nics=2), "off")).sum(0)
    assert found[1].tolist() == (found[0] * (near, 3)).tolist() and found[0].all()
    routed = np.array(pool.run(4, _sent_in_bf16, plan, nodes_of(4, 2, nics=2), 2)).sum(0)
    assert routed[:, 1].tolist() == found[:, 1].tolist() and routed[0, 0] > found[0, 0]


def _refusals(plan: SequencePlan, other: SequencePlan) -> list[str]:
    import torch
    import torch.distributed as dist

    from balancing.sequences import SequenceAttention

    dist.init_process_group("gloo")
    tokens = len(_tokens(plan, 0))
    good, wide = (torch.zeros(tokens, heads, 4) for heads in (2, 3))
    program = compile_rank(made_for(plan), 0)
    messages = []
    for make, inputs in (
        ({"program": replace(program, rank=1)}, None),
        ({"program": compile_rank(made_for(other), 0)}, None),
        ({}, (good[:-1], good, good)),
        ({}, (wide, good, good)),
        ({}, (good, good[..., :2], good)),
        ({}, (good, good.half(), good)),
        ({}, (good, good, good, torch.zeros(3))),
    ):
        with pytest.raises(ValueError) as caught:
            attention = SequenceAttention(plan, **{"program": program, **make})
            attention(*inputs[:3], sink=inputs[3] if len(inputs) > 3 else None)
        messages.append(str(caught.value))
    dist.destroy_process_group()
    return messages


def test_what_is_not_supported_is_refused(pool: Pool) -> None:
    (messages,) = pool.run(1, _refusals, random_plan((9, 4), 1, 0), random_plan((9, 5), 1, 0))
    wanted = ("rank 1 of a plan", "belongs to another plan")
    wanted += (
        "q has 12 tokens; the plan's linear layout has 13",
        "3 query heads",
        "q and k in head size",
        "of one type",
    )
    wanted += ("one score a query head, 2",)
    for message, part in zip(messages, wanted, strict=True):
        assert part in message


def test_a_plan_without_what_its_program_needs_is_refused() -> None:
    plan = random_plan((9, 4), 2, 0)
    made = made_for(plan, nodes_of(4, 2))
    with pytest.raises(ValueError, match="routing 'auto' needs the cluster of the plan's 2 ranks"):
        compile_rank(made, 0)
    for missing in ("cluster", "shape"):
        with pytest.raises(ValueError, match=f"{missing}=None .*; make it with plan_sequences, or give both"):
            compile_rank(replace(made, **{missing: None}), 0)
