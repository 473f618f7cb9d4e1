"""Latents travel in the place of keys and values (multi-latent attention): the engine, and training, equal one rank."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from balancing.cluster import Cluster
from balancing.sequences import AttentionShape, compile_rank, plan_sequences, step_cost
from balancing.sequences.sequence_plan import LatentShape, SequencePlan, in_window
from tests.sequences.test_engine import SCALE, SIZE, Case, _cases, _tokens
from tests.sequences.test_packed_documents import PP, SP, Packed
from tests.sequences.test_training import BALANCED, CP, LATENT, LOSS, SHORT
from tests.support.pool import Pool
from tests.support.sampled import sampled
from tests.support.sequence_plans import made_for, random_plan, zigzag_plan
from tests.support.settings import settings
from tests.support.training import MOE, assert_close

LATENTS, SHARED, VALUES = 5, 1, 3  # numbers of a latent, of the shared part of a key, of a head of values


def _inputs(plan: SequencePlan, heads: int, kv_heads: int) -> tuple[np.ndarray, ...]:
    """Queries, latents and shared parts of keys by token, the weight, and the output's gradient."""
    tokens, draw = sum(plan.lengths), np.random.default_rng(sum(plan.lengths))
    projected = kv_heads * (SIZE - SHARED + VALUES)
    shapes = (tokens, heads, SIZE), (tokens, LATENTS), (tokens, SHARED), (projected, LATENTS), (tokens, heads, VALUES)
    return tuple(draw.standard_normal(shape) for shape in shapes)


def _keys_values(latents: Any, shared: Any, weight: Any, kv_heads: int) -> tuple[Any, Any]:
    import torch

    projected = (latents @ weight.t()).unflatten(1, (kv_heads, -1))
    own = SIZE - SHARED
    return torch.cat((projected[..., :own], shared[:, None].expand(-1, kv_heads, -1)), 2), projected[..., own:]


def _on_rank(cases: list[Case], dtype: str = "float64") -> list[tuple[list[np.ndarray], int, int]]:
    """Output and gradients of each case, and bytes that the rank sent: of latents, and of keys and values instead."""
    import torch
    import torch.distributed as dist

    from balancing.sequences import SequenceAttention
    from balancing.sequences.engine import gather

    gather.TILE = 8  # or short sequences would come in one turn
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), []
    for plan, cluster, routing, heads, kv_heads in cases:
        own = _tokens(plan, rank)
        inputs = [x if at == 3 else x[own] for at, x in enumerate(_inputs(plan, heads, kv_heads))]
        *leaves, grad = (torch.from_numpy(x).to(getattr(torch, dtype)) for x in inputs)
        q, latents, shared, weight = (x.requires_grad_() for x in leaves)
        sent = []
        for travels in (True, False):
            latent = LatentShape(LATENTS, SHARED) if travels else None
            made = made_for(plan, cluster, heads=heads, kv_heads=kv_heads, value_size=VALUES, latent=latent)
            attention = SequenceAttention(made, program=compile_rank(made, rank, routing=routing))
            k, v = _keys_values(latents, shared, weight, kv_heads)
            more = {"latent": latents, "projection": weight} if travels else {}
            out = attention(q, k, v, softmax_scale=SCALE, **more)
            gradients = torch.autograd.grad(out, (q, latents, shared, weight), grad)
            sent.append(attention.statistics.intra_bytes + attention.statistics.inter_bytes)
            if travels:
                kept = [x.detach().double().numpy() for x in (out, *gradients)]
        found.append((kept, *sent))
    dist.destroy_process_group()
    return found


def _alone(plan: SequencePlan, heads: int, kv_heads: int) -> list[np.ndarray]:
    import torch

    *leaves, grad = (torch.from_numpy(x) for x in _inputs(plan, heads, kv_heads))
    q, latents, shared, weight = (x.requires_grad_() for x in leaves)
    keys_values = _keys_values(latents, shared, weight, kv_heads)
    outs, start = [], 0
    for length in plan.lengths:
        own = slice(start, start + length)
        k, v = (x[own].transpose(0, 1).repeat_interleave(heads // kv_heads, 0) for x in keys_values)
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = (q[own].transpose(0, 1) @ k.transpose(1, 2) * SCALE).masked_fill(hidden, float("-inf"))
        outs.append((scores.softmax(-1) @ v).transpose(0, 1))
        start += length
    out = torch.cat(outs)
    return [x.detach().numpy() for x in (out, *torch.autograd.grad(out, (q, latents, shared, weight), grad))]


def _check(pool: Pool, ranks: int, cases: list[Case], dtype: str = "float64", tolerance: float = 1e-10) -> None:
    by_rank = pool.run(ranks, _on_rank, cases, dtype)
    for number, (plan, _, _, heads, kv_heads) in enumerate(cases):
        parts = [found[number][0] for found in by_rank]
        for name, whole, *own in zip(
            ("out", "queries", "latents", "shared", "weight"), _alone(plan, heads, kv_heads), *parts, strict=True
        ):
            message = f"{name}, {plan}"
            if name == "weight":
                np.testing.assert_allclose(sum(own), whole, rtol=tolerance, atol=tolerance, err_msg=message)
                continue
            for rank, part in enumerate(own):
                expected = whole[_tokens(plan, rank)]
                rtol = 0 if dtype == "float64" else tolerance
                np.testing.assert_allclose(part, expected, rtol=rtol, atol=tolerance, err_msg=f"{message}, rank {rank}")


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_latents_equal_keys_and_values(pool: Pool, ranks: int) -> None:
    """On rings and gathered, with changes of layout, nodes and routes. The weight's gradient is a sum over ranks."""
    _check(pool, ranks, _cases(ranks)[:: 2 if ranks == 2 else 1])


@pytest.mark.exhaustive
def test_latents_in_bf16(pool: Pool) -> None:
    plans = [zigzag_plan((97, 5), 4, linear="random"), random_plan((40, 61), 4, 1, exchange="gather", linear="equal")]
    _check(pool, 4, [(plan, None, "off", 4, 4) for plan in plans], "bfloat16", 1e-1)


def test_latents_are_less_to_send(pool: Pool) -> None:
    """Of each token a latent and the shared part, in the place of all heads' keys and values."""
    plan = random_plan((97, 130, 3), 4, 1)
    sent = [own[0][1:] for own in pool.run(4, _on_rank, [(plan, None, "off", 4, 4)])]
    latents, keys_values = np.sum(sent, axis=0)
    assert keys_values > 0
    assert latents * 4 * (SIZE + VALUES) == keys_values * (LATENTS + SHARED)


def _refused(plan: SequencePlan, windowed: SequencePlan) -> list[str]:
    import torch
    import torch.distributed as dist

    from balancing.sequences import SequenceAttention

    dist.init_process_group("gloo")
    said = []
    projected = 2 * (SIZE - SHARED + VALUES)
    for own, numbers, more in ((plan, 9, {}), (plan, projected, {"projection": None}), (windowed, projected, {})):
        program = compile_rank(made_for(own), dist.get_rank())
        tokens = int(own.linear_tokens[dist.get_rank()])
        q, k, v = torch.ones(tokens, 2, SIZE), torch.ones(tokens, 2, SIZE), torch.ones(tokens, 2, VALUES)
        latents = {"latent": torch.ones(tokens, LATENTS), "projection": torch.ones(numbers, LATENTS)} | more
        try:
            SequenceAttention(own, program=program)(q, k, v, **latents)
        except ValueError as error:
            said.append(str(error))
    dist.destroy_process_group()
    return said


def test_latents_that_do_not_fit_are_refused(pool: Pool) -> None:
    plan = zigzag_plan((64,), 2, exchange="gather")
    for said in pool.run(2, _refused, plan, in_window(plan, 7)):
        wrong_weight, half, window = said
        assert "does not project latents" in wrong_weight
        assert "go together" in half
        assert "a sliding window" in window


def _gradients() -> tuple[Any, list[list[float]], list[float]]:
    """A weight's `grad` and `main_grad` where a fused linear layer, which adds to the latter, uses it as well."""
    import torch

    from megatron.balanced.sequences.latents import _IntoMainGradient

    weight = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.float64))
    weight.main_grad = torch.full((2, 3), 5.0, dtype=torch.float64)
    tokens = torch.arange(3, dtype=torch.float64, requires_grad=True)
    (_IntoMainGradient.apply(weight) @ tokens).sum().backward()
    return weight.grad, weight.main_grad.tolist(), tokens.grad.tolist()


def test_a_weight_takes_gradients_beside_a_fused_linear_layer(pool: Pool) -> None:
    """In `main_grad`, where that layer adds its own; `grad` is not read."""
    ((grad, main, tokens),) = pool.run(1, _gradients)
    assert grad is None
    assert main == [[5.0, 6.0, 7.0]] * 2
    assert tokens == [2.0] * 3


# The cost model.

DEEPSEEK = AttentionShape(7168, 128, 128, 61, 18432, head_size=192, value_size=128, latent=LatentShape(512, 64))


def test_the_cost_model_counts_latents() -> None:
    """They are less to send than keys and values, and every rank that receives them projects them."""
    nodes = Cluster.sheet("h200-8x400g").relabel(4, 8)
    plan = plan_sequences([65536, 20000, 3000, 500], nodes, shape=DEEPSEEK)
    latents, keys = (step_cost(plan, nodes, shape) for shape in (DEEPSEEK, replace(DEEPSEEK, latent=None)))
    assert latents.exchange < keys.exchange / 10 and latents.attention > keys.attention
    copied = step_cost(plan, nodes, replace(DEEPSEEK, tensor_parallel=4))
    assert latents.exchange < copied.exchange < keys.exchange, "each tensor-parallel rank receives whole latents"
    windowed = in_window(plan, 128), nodes, replace(DEEPSEEK, window=128, windowed_layers=61)
    assert step_cost(*windowed) == step_cost(*windowed[:2], replace(windowed[2], latent=None)), (
        "in a window keys travel"
    )


# Training.

NORMED = "--q-lora-rank 16 --qk-layernorm --rotary-scaling-factor 4"
KEYS_TRAVEL = "--recompute-granularity selective --recompute-modules core_attn"
# model, layout
TRAINING = {
    "TP 2, sequence parallel": (NORMED, f"{CP} 2 {SP} {settings('sequences', planner='zones')}"),
    "TP 2": ("--q-lora-rank 16", f"{CP} 2 --tensor-model-parallel-size 2"),
    "rings": ("--rope-type rope", f"{CP} 4 {settings('sequences', planner='ring')}"),
    "PP 2, recomputed projections": (
        f"{NORMED} --softmax-type learnable",
        f"{CP} 2 {PP} 2 --recompute-granularity selective --recompute-modules mla_up_proj",
    ),
    "full recompute": (
        NORMED,
        f"{CP} 4 --recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
    ),
    "data-parallel ranks, both overlaps": (
        NORMED,
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000",
    ),
    "experts, predicted tokens": (
        f"{NORMED} {' '.join(MOE)} --moe-token-dispatcher-type alltoall --mtp-num-layers 1 "
        "--untie-embeddings-and-output-weights",
        f"{CP} 2 {PP} 2 --expert-model-parallel-size 2 --balance-experts {settings('experts', min_gain=0)}",
    ),
    "windows": (
        "--q-lora-rank 16 --window-size 5,0 --softmax-type learnable",
        f"{CP} 2 {PP} 2 --recompute-granularity selective --recompute-modules mla_up_proj",
    ),
}
FIRST = "TP 2, sequence parallel"


def _packed(pool: Pool, folder: Path, model: str) -> Packed:
    return Packed(pool, folder, f"{LATENT} {model} --normalization RMSNorm --disable-bias-linear {SHORT}")


@pytest.mark.parametrize("case", sampled(TRAINING, FIRST))
def test_models_with_latents_train_alike(pool: Pool, tmp_path: Path, case: str) -> None:
    """As DeepSeek-V3's: values smaller than keys, YaRN from each document's first token, norms of the latents."""
    model, layout = TRAINING[case]
    packed = _packed(pool, tmp_path, model)
    assert_close(packed.train(4, f"{BALANCED} {layout}"), packed.train(1, LOSS))


def test_what_travels_in_training(pool: Pool, tmp_path: Path) -> None:
    """Latents, which are fewer bytes; keys and values where core attention is recomputed alone."""
    packed, sent = _packed(pool, tmp_path, NORMED), []
    balanced = f"{BALANCED} {CP} 2 {settings('sequences', planner='chunks')}"
    runs = [
        packed.train(2, f"{balanced} {more} --balance-report {tmp_path / name}")
        for name, more in (("latents", ""), ("keys", KEYS_TRAVEL))
    ]
    assert_close(*runs)
    for name in ("latents", "keys"):
        lines = map(json.loads, (tmp_path / name / "events.jsonl").read_text().splitlines())
        sent.append([line["kv_intra_bytes"] for line in lines if line.get("action") == "spread"])
    latents, keys = np.array(sent)
    heads, of_head, of_latent = 4, 8 + 4 + 6, 12 + 4
    assert keys.min() > 0
    # Forward, again backward, and gradients; recomputation sends once more.
    assert (latents / 3 * heads * of_head == keys / 4 * of_latent).all()
