"""The attention engine against attention of each document alone: output and gradients, in float64."""

from typing import Any

import numpy as np
import pytest
from pool import Pool
from sequence_plans import nodes_of, random_plan, zigzag_plan

from balancing.cluster import Cluster
from balancing.sequences.layout import SequencePlan

Case = tuple[SequencePlan, Cluster | None, str | int, int, int]  # plan, cluster, routing, heads, kv_heads
SIZE = 4
SCALE = 0.37


def _inputs(plan: SequencePlan, heads: int, kv_heads: int) -> tuple[np.ndarray, ...]:
    """q, k, v and the output's gradient [token, heads, size], documents behind one another."""
    draw = np.random.default_rng(sum(plan.lengths))
    return tuple(draw.standard_normal((sum(plan.lengths), h, SIZE)) for h in (heads, kv_heads, kv_heads, heads))


def _tokens(plan: SequencePlan, rank: int) -> np.ndarray:
    """The token numbers of a rank's linear layout."""
    first = np.concatenate(([0], np.cumsum(plan.lengths)))
    shards = plan.shards(rank, linear=True)
    return np.concatenate([np.zeros(0, int)] + [np.arange(s.start, s.stop) + first[s.sequence] for s in shards])


def _on_rank(cases: list[Case], twice: bool = False) -> list[list[np.ndarray]]:
    import torch
    import torch.distributed as dist

    from balancing.sequences.attention import SequenceAttention

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = []
    for plan, cluster, routing, heads, kv_heads in cases:
        own = _tokens(plan, rank)
        *qkv, grad = (torch.from_numpy(x[own]) for x in _inputs(plan, heads, kv_heads))
        qkv = [x.requires_grad_() for x in qkv]
        for _ in range(1 + twice):
            attention = SequenceAttention(plan, rank=rank, cluster=cluster, routing=routing)
            out = attention(*qkv, softmax_scale=SCALE)
            found.append([x.detach().numpy() for x in (out, *torch.autograd.grad(out, qkv, grad))])
    dist.destroy_process_group()
    return found


def _alone(plan: SequencePlan, heads: int, kv_heads: int) -> list[np.ndarray]:
    """Output and gradients of every document by itself, in plain matrix products."""
    import torch

    *qkv, grad = (torch.from_numpy(x) for x in _inputs(plan, heads, kv_heads))
    qkv = [x.requires_grad_() for x in qkv]
    outs, start = [], 0
    for length in plan.lengths:
        q, k, v = (x[start : start + length].transpose(0, 1) for x in qkv)
        k, v = (x.repeat_interleave(heads // kv_heads, 0) for x in (k, v))
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = (q @ k.transpose(1, 2) * SCALE).masked_fill(hidden, float("-inf")).softmax(-1)
        outs.append((weights @ v).transpose(0, 1))
        start += length
    out = torch.cat(outs)
    return [x.detach().numpy() for x in (out, *torch.autograd.grad(out, qkv, grad))]


def _check(pool: Pool, ranks: int, cases: list[Case]) -> None:
    by_rank = pool.run(ranks, _on_rank, cases)
    for number, (plan, _, _, heads, kv_heads) in enumerate(cases):
        for name, whole, *parts in zip(
            ("out", "dq", "dk", "dv"), _alone(plan, heads, kv_heads), *(found[number] for found in by_rank), strict=True
        ):
            for rank, part in enumerate(parts):
                np.testing.assert_allclose(
                    part, whole[_tokens(plan, rank)], rtol=0, atol=1e-10, err_msg=f"{name}, {plan}, rank {rank}"
                )


HEADS = [(4, 4), (4, 2), (4, 1)]
RAGGED = [(1, 2, 3, 1, 97, 31, 5), (64,), (16,) * 8, (1,) * 40, (2, 3, 5, 7, 11, 13, 17, 19, 23), (211, 1, 1, 40)]


def _cases(ranks: int) -> list[Case]:
    """Every batch under every exchange, with layouts, kinds of heads, nodes and routing taking turns."""
    cases: list[Case] = []
    for number, lengths in enumerate(RAGGED):
        for kind, exchange in enumerate(("ring", "gather", "mixed")):
            heads = HEADS[(number + kind) % 3]
            cluster = (None, nodes_of(ranks, 2, nics=max(1, ranks // 2)))[(number + kind) % 2]
            routing = "off" if cluster is None else ("off", 2, "auto")[(number // 2) % 3]
            linear = ("same", "equal", "random")[(number // 2 + kind) % 3]
            plan = random_plan(lengths, ranks, number, exchange=exchange, linear=linear)
            cases.append((plan, cluster, routing, *heads))
            if exchange != "mixed":
                cases.append((zigzag_plan(lengths, ranks, exchange=exchange, linear=linear), cluster, routing, *heads))
    return cases


@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_documents_alone(pool: Pool, ranks: int) -> None:
    _check(pool, ranks, _cases(ranks))


def test_routed_over_proxies_on_every_node(pool: Pool) -> None:
    """Six ranks on two nodes: a ring, gathered prefixes and changes of layout, over two and three NICs of a node."""
    cluster = nodes_of(6, 2, nics=3)
    plans = [
        zigzag_plan((301, 5), 6, linear="random"),
        random_plan((97, 130, 3), 6, 1, linear="equal"),
        random_plan((97, 130, 3), 6, 2, exchange="gather", linear="random"),
    ]
    _check(pool, 6, [(plan, cluster, proxies, 2, 1) for plan in plans for proxies in (2, 3)])


def _repeats(cases: list[Case]) -> list[Any]:
    return [[x.tobytes() for x in one] for one in _on_rank(cases, twice=True)]


def test_repeats_bit_for_bit_and_routing_changes_no_bit(pool: Pool) -> None:
    ragged, ring = random_plan(RAGGED[0], 4, 5, linear="random"), zigzag_plan((50, 61), 4)
    nodes = nodes_of(4, 2, nics=2)
    cases: list[Case] = [(plan, nodes, routing, 4, 2) for plan in (ragged, ring) for routing in ("off", 2)]
    for found in pool.run(4, _repeats, cases):
        assert found[0::2] == found[1::2]
        assert found[0] == found[2] and found[4] == found[6]
