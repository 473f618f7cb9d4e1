"""Attention of layers whose passes are captured as CUDA graphs and replayed, against the same without graphs.

`tests.support.stand_ins.captured_attention` is in the place of the graph.
"""

import gc
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from balancing.sequences import compile_rank
from balancing.sequences.config import SequenceConfig
from balancing.sequences.sequence_plan import in_window
from megatron.balanced.sequences.graphs import check_graphs
from tests.sequences.test_engine import SIZE, Case, _cases, _sink, _tokens
from tests.sequences.test_packed_documents import PACKED, PP, Packed
from tests.support.pool import Pool
from tests.support.sequence_plans import made_for
from tests.support.settings import settings
from tests.support.training import RankRun, assert_same, join, train_rank


class _Kind(NamedTuple):
    """sinks, window: of attention. recomputed: whether layers run forward once more before their backward pass."""

    sinks: bool = False
    window: int | None = None
    recomputed: bool = False


LAYERS, BATCHES = 4, 2


def _train(make: Any, case: Case, kind: _Kind) -> tuple[list[Any], list[int]]:
    """Outputs and gradients of some micro-batches, which all go forward before the first goes back, and bytes sent."""
    import torch
    from torch.utils.checkpoint import checkpoint

    plan, cluster, routing, heads, kv_heads = case
    draw, found, flying, sent = torch.Generator().manual_seed(7), [], [], []
    for batch in range(BATCHES):
        mine = made_for(plan, cluster, heads=heads, kv_heads=kv_heads)
        mine = mine if kind.window is None else in_window(mine, kind.window)
        rank = torch.distributed.get_rank()
        attention = make(mine, program=compile_rank(mine, rank, routing=routing))
        attention.transport.in_order = True
        layers = []
        for layer in range(LAYERS):
            shapes = [(len(_tokens(plan, rank)), each, SIZE) for each in (heads, kv_heads, kv_heads)]
            joined = torch.randn(shapes[0][0], heads + 2 * kv_heads, SIZE, generator=draw, dtype=torch.float64)
            leaves = [*joined.split([shape[1] for shape in shapes], 1)]  # not contiguous, as of one projection
            if kind.sinks:
                leaves.append(torch.from_numpy(_sink(heads)) + layer)
            leaves = [leaf.detach().requires_grad_() for leaf in leaves]
            scale = 0.37 if layer % 2 else 0.5  # kinds of layers take turns

            def run(q: Any, k: Any, v: Any, sink: Any = None, scale: Any = scale, attention: Any = attention) -> Any:
                return attention(q, k, v, softmax_scale=scale, sink=sink)

            out = checkpoint(run, *leaves, use_reentrant=True) if kind.recomputed else run(*leaves)
            layers.append((leaves, out))
        flying.append((attention, layers))
        if batch + 1 < BATCHES:
            continue
        for attention, layers in flying:
            for leaves, out in reversed(layers):
                out.backward(torch.randn(out.shape, generator=draw, dtype=out.dtype))
                found += [out.detach(), *(leaf.grad for leaf in leaves)]
            counted = attention.statistics
            sent += [counted.intra_bytes, counted.inter_bytes, counted.remap_intra_bytes, counted.remap_inter_bytes]
    return found, sent


def _on_rank(cases: list[Case], kind: _Kind) -> tuple[int, int]:
    """Captures and replays. Raises AssertionError where graphs change a bit, or live on."""
    from functools import partial

    import torch
    import torch.distributed as dist

    from balancing.sequences import SequenceAttention
    from balancing.sequences.engine.captured import CapturedAttention, Graphs
    from tests.support.stand_ins import captured_attention

    captured_attention.install()
    dist.init_process_group("gloo")
    graphs = Graphs()
    for number, case in enumerate(cases):
        with_graphs, sent = _train(partial(CapturedAttention, graphs=graphs), case, kind)
        assert 1 < len(captured_attention.alive) <= 5  # with the one that keeps the memory
        graphs.clear()
        gc.collect()
        assert len(captured_attention.alive) == 1
        without, wanted = _train(SequenceAttention, case, kind)
        assert sent == wanted
        for at, (one, other) in enumerate(zip(with_graphs, without, strict=True)):
            assert torch.equal(one, other), f"case {number}, result {at}: {(one - other).abs().max()}"
    graphs.close()
    gc.collect()
    assert not captured_attention.alive
    dist.destroy_process_group()
    return captured_attention.counted["captures"], captured_attention.counted["replays"]


def _some(ranks: int) -> list[Case]:
    return [case for case in _cases(ranks) if case[2] == "off" and (ranks % 2 == 0 or case[1] is None)]


@pytest.mark.parametrize(
    ("ranks", "every", "kind"),
    [
        (2, 5, _Kind()),
        (3, 3, _Kind(sinks=True)),
        (4, 6, _Kind()),
        (4, 9, _Kind(sinks=True, window=7)),
        (4, 9, _Kind(recomputed=True)),
    ],
)
def test_graphs_change_no_bit(pool: Pool, ranks: int, every: int, kind: _Kind) -> None:
    cases = _some(ranks)[::every]
    # Of each micro-batch and each of two scales: forward and backward, in the second of two layers.
    runs = len(cases) * BATCHES * 2
    captures, replays = 2 * runs, 2 * runs
    if kind.recomputed:  # forward twice more, of the second micro-batch by graphs that are captured anew
        captures, replays = 5 * runs // 2, 4 * runs
    for found in pool.run(ranks, _on_rank, cases, kind):
        assert found == (captures + 1, replays)


def _train_replayed(argv: list[str]) -> tuple[RankRun, int, int]:
    """The run, captures, and graphs that it has left."""
    from megatron.balanced.sequences import balancer
    from megatron.balanced.trainer.checks import machine
    from tests.support.stand_ins import captured_attention

    captured_attention.install()
    machine.check_graphs = balancer.check_graphs = lambda *unused, **also_unused: None  # the CPU device is refused
    run = train_rank(argv, True)
    gc.collect()
    return run, captured_attention.counted["captures"], len(captured_attention.alive)


def test_training_with_graphs_is_the_same_to_the_bit(pool: Pool, tmp_path: Any) -> None:
    """In a pipeline whose stages recompute their layers, of which each has two."""
    packed = Packed(pool, tmp_path, "--num-layers 4 --global-batch-size 4 --train-iters 2")
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    flags = f"{PACKED} --balance-sequences --context-parallel-size 2 {PP} 2 {recompute}"
    replayed = packed.from_start(f"{flags} {settings('sequences', attention_cuda_graphs=True)}")
    results = pool.run(4, _train_replayed, replayed)
    # In 2 iterations of 4 micro-batches: forward, by a graph that also recomputes, and backward; and what keeps memory.
    assert {tuple(found) for _, *found in results} == {(2 * 8 + 1, 1)}
    assert_same(join([run for run, *_ in results]), packed.train(4, flags))


def test_graphs_that_cannot_be_captured_are_refused() -> None:
    # What `latent_shape` reads of a model.
    fields = {"recompute_modules", "recompute_granularity", "window_size", "delay_wgrad_compute", "fp8", "fp4"}
    plain = SimpleNamespace(**dict.fromkeys(fields), kv_lora_rank=512, qk_pos_emb_head_dim=64)
    latents = SimpleNamespace(**vars(plain), multi_latent_attention=True)
    on = SequenceConfig(enabled=True, attention_cuda_graphs=True)
    check_graphs(SequenceConfig(enabled=True), latents, nccl=False, timed=True)
    check_graphs(on, plain, nccl=True, timed=False)
    for model, nccl, timed, why in (
        (plain, False, False, "captures messages of NCCL"),
        (plain, True, True, "incompatible with --balance-report"),
        (latents, True, False, "exchanges latents"),
    ):
        with pytest.raises(ValueError, match=why):
            check_graphs(on, model, nccl=nccl, timed=timed)
