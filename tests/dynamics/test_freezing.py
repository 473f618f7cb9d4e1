"""Freezing: its schedules, that frozen layers only run forward, and that no other number changes."""

import functools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from examples.dynamic_models.schemes import PlasticityFreezer, scheduled_prefix, similarity_loss
from tests.support.events import events_in
from tests.support.plain import train_plainly
from tests.support.program import parse
from tests.support.settings import PLASTICITY, scheme_flags
from tests.support.training import EXACT, MODEL, MOE, RankRun, assert_same, join, train, watch

UNTIED = "--untie-embeddings-and-output-weights"
FREEZE = "--freeze-layers 2 --freeze-layers-start 2"
PP2 = "--pipeline-model-parallel-size 2"


def test_schedule():
    once = [scheduled_prefix(i, layers=3, start=2) for i in range(5)]
    assert once == [0, 0, 3, 3, 3]
    grows = [scheduled_prefix(i, layers=3, start=2, interval=2, until=9) for i in range(11)]
    assert grows == [0, 0, 1, 1, 2, 2, 3, 3, 3, 0, 0]


def test_similarity_loss_sees_structure_alone():
    torch.manual_seed(0)
    hidden = torch.randn(20, 8, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64))[0]
    assert similarity_loss(hidden, hidden) == 0
    assert similarity_loss(3 * hidden @ rotation, hidden) < 1e-28
    near, far = (similarity_loss(hidden + scale * torch.randn_like(hidden), hidden) for scale in (0.01, 1.0))
    assert 0 < near < far / 100


def test_a_layer_freezes_once_it_stands_still_and_a_low_learning_rate_wakes_it():
    freezer = PlasticityFreezer(layers=2, patience=2)
    falling = [freezer.observe(0.5**step, 1.0) for step in range(5)]
    assert falling == [0] * 5, "it still moves"
    still = [freezer.observe(0.01, 1.0) for _ in range(8)]
    assert still[-1] == 1
    assert still == sorted(still)
    half = PlasticityFreezer(layers=2)
    half.load_state_dict(json.loads(json.dumps(freezer.state_dict())))
    assert [half.observe(0.01, 1.0) for _ in range(9)] == [freezer.observe(0.01, 1.0) for _ in range(9)]
    assert freezer.frozen == 2
    assert freezer.observe(0.01, 0.5) == 2
    assert freezer.observe(0.01, 0.1) == 0
    assert freezer.patience == 1


def _rank(argv: list[str], keep: bool, restore: int, from_step: int) -> tuple[RankRun, list[str], list[tuple]]:
    """Train, and note each layer that ran backward, as iteration/layer, and what gradients were reduced.

    restore: put the embedding and this many layers back to what they were after each step from `from_step` on, which
    is what a learning rate of zero does for them.
    """
    args, config, start = parse(argv)

    import torch.distributed as dist
    from megatron.core.utils import unwrap_model
    from megatron.training import training

    finish = watch(keep)
    step, seen, reduced = training.train_step, [], []
    hooked: list[bool] = []
    now = [0]
    all_reduce = dist.all_reduce

    def counted(tensor: torch.Tensor, *rest, **more):
        if tensor.numel() > 1000:
            reduced.append((now[0], tensor.numel()))
        return all_reduce(tensor, *rest, **more)

    dist.all_reduce = counted

    def hook(layer, args, kwargs, output):
        hidden = output[0]
        if hidden.requires_grad:
            iteration = now[0]
            hidden.register_hook(lambda gradient: seen.append(f"{iteration}/{layer.layer_number}"))

    @functools.wraps(step)
    def train_step(*args, **kwargs):
        model = unwrap_model(args[2])
        now[0] = kwargs["iteration"]
        if not hooked:
            hooked.append(True)
            for chunk in model:
                for layer in chunk.decoder.layers:
                    layer.register_forward_hook(hook, with_kwargs=True)
        kept = []
        if now[0] >= from_step:
            for chunk in model:
                modules = [layer for layer in chunk.decoder.layers if layer.layer_number <= restore]
                modules += [chunk.embedding] if restore and chunk.pre_process else []
                kept += [(p, p.detach().clone()) for module in modules for p in module.parameters()]
        result = step(*args, **kwargs)
        for parameter, value in kept:
            parameter.data.copy_(value)
        return result

    training.train_step = train_step
    start(args, config)
    return finish(), seen, reduced


def _run(pool, corpus, world_size: int, flags: str, restore: int = 0, from_step: int = 2):
    results = pool.run(world_size, _rank, [*MODEL, *corpus, *flags.split()], True, restore, from_step)
    run = join([rank for rank, _, _ in results])
    return run, sorted({mark for _, seen, _ in results for mark in seen}), [reduced for _, _, reduced in results]


# ranks, layout. Layers 1 and 2 are frozen, which at PP 2 is the first stage, or 3 with a part of the second stage.
LAYOUTS = {
    "PP 2, 3 layers": (2, f"{PP2} --freeze-layers 3"),
    "DP 2, overlap": (2, "--overlap-grad-reduce --ddp-bucket-size 8000"),
    "EP 2, sharded": (
        2,
        f"{' '.join(MOE)} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_freezing_is_a_learning_rate_of_zero(pool, corpus, name):
    """Bit for bit, with no backward pass in frozen layers."""
    world_size, layout = LAYOUTS[name]
    flags = f"{' '.join(EXACT)} {UNTIED} {FREEZE} {layout}"
    if "sharded" in name:
        flags = flags.replace("--fp64", "")
    frozen = 3 if "3 layers" in name else 2
    run, seen, reduced = _run(pool, corpus, world_size, flags)
    off = flags.replace(FREEZE, "").replace("--freeze-layers 3", "")
    reference, _, all_reduced = _run(pool, corpus, world_size, off, frozen)
    assert_same(replace(run, grad_norms=reference.grad_norms), reference)  # what is frozen has no gradient to count
    trained = [f"{i}/{layer}" for i in range(4) for layer in range(1, 5) if i < 2 or layer > frozen]
    assert set(trained) <= set(seen)
    if "PP" not in name:
        assert seen == sorted(trained)
    if name == "DP 2, overlap":

        def of(sizes, iteration):
            return sum(size for i, size in sizes[0] if i == iteration)

        assert of(reduced, 1) == of(all_reduced, 1) == of(all_reduced, 3)
        assert of(reduced, 3) < 0.6 * of(reduced, 1)


# ranks, flags. Each freezes, goes on from a checkpoint in which layers are frozen, and trains them again or more.
RESUMED = {
    "schedule, PP 2, interleaved, bf16": (
        2,
        f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --bf16 {FREEZE} {scheme_flags(freeze_layers_until=5)}",
        [("freeze", 2), ("unfreeze", 0)],
    ),
    "plasticity, DP 2, sharded": (
        2,
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --freeze-layers 2 "
        f"--freeze-layers-interval 1 {PLASTICITY} --train-iters 12",
        [("freeze", 1), ("freeze", 2)],
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RESUMED)
def test_resumed_with_frozen_layers_is_uninterrupted(pool, corpus, tmp_path, name):
    world_size, flags, moves = RESUMED[name]
    base = [*MODEL, *corpus, *f"{UNTIED} --ckpt-format torch_dist --train-iters 7".split(), *flags.split()]
    at, every = (6, 6) if "plasticity" in name else (4, 2)
    report = f"--balance-report {tmp_path / 'report'}"
    whole = train(pool, world_size, f"--save {tmp_path} --save-interval {every} {report}", base=base, parameters=True)
    events = events_in(tmp_path / "report")
    assert [(e["action"], e["frozen_layers"]) for e in events if e["balancer"] == "dynamics"] == moves
    resumed = train(
        pool,
        world_size,
        f"--load {tmp_path} --ckpt-step {at} --save {tmp_path} --save-interval {every}",
        base=base,
        parameters=True,
    )
    assert resumed.losses == whole.losses[at:]
    assert_same(replace(resumed, losses=whole.losses, grad_norms=whole.grad_norms), whole)
    assert np.mean(whole.losses[-2:]) < whole.losses[0]
    if "schedule" in name:  # with the moments of all layers, frozen before or not
        ours = base.index("--freeze-layers")
        load = f"--load {tmp_path} --ckpt-step 6".split()
        assert train_plainly(pool, world_size, [*base[:ours], *load], tmp_path).losses == whole.losses[6:]
