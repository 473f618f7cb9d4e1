"""Mixture of depths, early exit and sparse attention: the chosen tokens, computation of these only, gradients."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from examples.dynamic_models.schemes import (
    block_sparse_attention,
    choose_blocks,
    choose_tokens,
    exits,
    gate,
    hash_scores,
    mean_scores,
    put_back,
    saturation,
    take,
    tokens_of,
    weigh_loss,
)
from tests.support.events import events_in
from tests.support.program import parse
from tests.support.settings import HASH_ATTENTION, scheme_flags
from tests.support.training import EXACT, MODEL, RankRun, join, watch

PP2 = "--pipeline-model-parallel-size 2"


def test_tokens_are_taken_in_order_and_put_back():
    scores = torch.tensor([[0.0, 5.0], [3.0, 1.0], [1.0, 2.0], [2.0, 4.0], [-1.0, 3.0]])
    assert choose_tokens(scores, 0.4).tolist() == [[1, 0], [3, 3]]
    assert choose_tokens(scores, 0.41).shape == (3, 2)
    assert choose_tokens(scores, 0.0).tolist() == [[1, 0]]
    active = torch.tensor([[1, 0], [0, 0], [1, 1], [1, 0]]).bool()
    index, real = tokens_of(active)
    assert index[:, 0].tolist() == [0, 2, 3]
    assert index[0, 1] == 2
    assert real.tolist() == [[True, True], [True, False], [True, False]]


def test_gradients_of_a_routed_layer():
    """The layer stands for anything that maps a token's state, here with a square."""
    torch.manual_seed(0)
    hidden = torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True)
    router = torch.randn(3, 1, dtype=torch.float64, requires_grad=True)
    index = choose_tokens((hidden @ router).detach()[..., 0], 0.5)

    def layer(hidden, router):
        chosen = take(hidden, index)
        return put_back(hidden, index, gate(take(hidden @ router, index)) * chosen**2)

    assert torch.autograd.gradcheck(layer, (hidden, router))
    bypassed = torch.ones(6, 2, dtype=torch.bool).scatter(0, index, False)
    assert torch.equal(layer(hidden, router)[bypassed], hidden[bypassed])
    assert float(gate(torch.zeros(()))) == 1


def test_exits_take_the_confident_and_leave_one():
    before = torch.randn(5, 2, 8)
    after = before.clone()
    after[:2] += torch.randn(2, 2, 8)
    confidence = saturation(before, after)
    active = torch.ones(5, 2, dtype=torch.bool)
    active[4, 0] = False
    done = exits(confidence, active, 0.999)
    assert done.tolist() == [[False] * 2, [False] * 2, [True] * 2, [True] * 2, [False, True]]
    everyone = exits(torch.ones(5, 2), active, 0.5)
    assert (active & ~everyone).sum(0).tolist() == [1, 1]
    loss = torch.ones(2, 5, requires_grad=True)
    weigh_loss(loss, ~done, 0.25).sum().backward()
    assert loss.grad[0].tolist() == [1, 1, 0.25, 0.25, 1]


def _dense(query, key, value, seen):
    logits = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    return logits.masked_fill(~seen, -torch.inf).softmax(-1) @ value


@pytest.mark.parametrize("method", ["blocks", "hash"])
def test_sparse_attention_is_dense_attention_to_the_chosen_blocks(method):
    torch.manual_seed(0)
    block, length = 4, 22  # the last block is not full
    query, key, value = (torch.randn(2, 2, length, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def attend(query, key, value, keep=3):
        return block_sparse_attention(query, key, value, block=block, keep=keep, method=method)

    cut = [torch.nn.functional.pad(t.detach(), (0, 0, 0, 2)).reshape(2, 2, 6, block, 3) for t in (query, key)]
    index, real = choose_blocks({"blocks": mean_scores, "hash": hash_scores}[method](*cut).float(), 3)
    chosen = torch.zeros(2, 2, 6, 6, dtype=torch.bool)
    chosen.scatter_(-1, index, real)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    assert chosen.diagonal(dim1=-2, dim2=-1).all() and chosen[..., 0].all()
    assert chosen.sum(-1).unique(dim=0).shape[-1] == 6
    assert [int(n) for n in chosen[0, 0].sum(-1)] == [1, 2, 3, 3, 3, 3]
    assert not torch.equal(chosen[0, 0], chosen[1, 1]), "the data decides"
    seen = chosen.repeat_interleave(block, -1).repeat_interleave(block, -2)[..., :length, :length] & causal
    torch.testing.assert_close(attend(query, key, value), _dense(query, key, value, seen), rtol=1e-13, atol=1e-13)
    full = attend(query, key, value, keep=6)
    torch.testing.assert_close(full, _dense(query, key, value, causal), rtol=1e-13, atol=1e-13)
    few = [tensor.detach()[:1, :1, :14].requires_grad_() for tensor in (query, key, value)]
    assert torch.autograd.gradcheck(attend, few, fast_mode=True)


def test_sparse_attention_does_less():
    shape = (1, 2, 1024, 16)
    query, key, value = (torch.randn(shape, requires_grad=True) for _ in range(3))

    def flops(keep: int) -> int:
        with FlopCounterMode(display=False) as counter:
            block_sparse_attention(query, key, value, block=32, keep=keep).sum().backward()
        return counter.get_total_flops()

    assert flops(4) < 0.15 * flops(32)


def _rank(argv: list[str]) -> tuple[RankRun, dict[int, set[int]]]:
    """Train. Also gives for each layer (from 1) how many tokens of a sequence its MLP was run for."""
    args, config, start = parse(argv)

    from megatron.core.utils import unwrap_model
    from megatron.training import training

    finish = watch(False)
    build, lengths = training.setup_model_and_optimizer, {}

    def setup_model_and_optimizer(*args, **kwargs):
        built = build(*args, **kwargs)
        for chunk in unwrap_model(built[0]):
            for layer in chunk.decoder.layers:
                seen = lengths.setdefault(layer.layer_number, set())
                layer.mlp.register_forward_hook(lambda module, args, output, seen=seen: seen.add(args[0].shape[0]))
        return built

    training.setup_model_and_optimizer = setup_model_and_optimizer
    start(args, config)
    return finish(), lengths


def _run(pool, base: list[str], world_size: int, flags: str):
    results = pool.run(world_size, _rank, [*base, *flags.split()])
    return join([rank for rank, _ in results]), {k: v for _, lengths in results for k, v in lengths.items()}


def test_what_leaves_nothing_out_changes_no_number(pool, corpus):
    """No token is so confident, and as many blocks are kept as there are."""
    base = [*MODEL, *corpus, *EXACT, *PP2.split()]
    off, _ = _run(pool, base, 2, "")
    none_out = f"{scheme_flags(early_exit_layers=[1, 3], early_exit_threshold=1)} "
    none_out += scheme_flags(sparse_attention="blocks", sparse_attention_block=8, sparse_attention_keep=4)
    on, lengths = _run(pool, base, 2, none_out)
    np.testing.assert_allclose(on.losses, off.losses, rtol=1e-12)
    assert all(seen == {32} for seen in lengths.values())


# ranks, flags
SCHEMES = {
    "mixture of depths": (
        2,
        f"{PP2} {scheme_flags(mixture_of_depths=0.25)} --micro-batch-size 2 {' '.join(EXACT)}",
    ),
    "early exit": (
        2,
        f"{PP2} {scheme_flags(early_exit_layers=[1, 2], early_exit_threshold=0.9)} "
        f"{scheme_flags(early_exit_start=2, early_exit_loss_weight=0.5)} "
        "--micro-batch-size 2",
    ),
    "sparse attention": (1, HASH_ATTENTION),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_loss_falls_and_what_is_left_out_is_not_run(pool, corpus, tmp_path, name):
    world_size, flags = SCHEMES[name]
    base = [*MODEL, *corpus, *f"--train-iters 8 --ckpt-format torch_dist --balance-report {tmp_path}".split()]
    save = f"--save {tmp_path / 'save'} --save-interval 6" if name == "mixture of depths" else ""
    run, lengths = _run(pool, base, world_size, f"{flags} {save}")
    assert np.mean(run.losses[-3:]) < np.mean(run.losses[:2])
    events = events_in(tmp_path)
    tokens = {}
    for event in (event for event in events if event.get("scheme") == name):
        for layer, count, whole in zip(event["layers"], event["tokens"], event["tokens_all"], strict=True):
            tokens.setdefault(layer + 1, []).append(count / whole)
    if name == "mixture of depths":
        assert lengths == {1: {32}, 2: {8}, 3: {32}, 4: {8}}
        assert {layer: set(shares) for layer, shares in tokens.items()} == {1: {1}, 2: {0.25}, 3: {1}, 4: {0.25}}
        load = f"--load {tmp_path / 'save'} --ckpt-step 6 --no-load-rng"
        alone, _ = _run(pool, base, 1, f"{flags.replace(PP2, '')} {load}")  # routers under another layout
        np.testing.assert_allclose(alone.losses, run.losses[6:], rtol=1e-12)
    if name == "early exit":
        assert lengths[1] == {32}
        assert min(lengths[4]) <= min(lengths[3]) <= min(lengths[2]) < 32
        assert all(np.mean(tokens[layer][:2]) == 1 for layer in tokens)
        assert np.mean(tokens[4][2:]) == np.mean(tokens[3][2:]) < 1
