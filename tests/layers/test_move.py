"""Moves of layers transfer their whole state: a run with moves equals one in which the layers were always there."""

import weakref
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.events import events_in
from tests.support.moving import Plans, at_end_of_step, move_at, train_moving
from tests.support.sampled import sampled
from tests.support.training import EXACT, MOCK_DATA, MODEL, MOE, Run, differences, train, train_rank

PP2 = "--pipeline-model-parallel-size 2"
VPP = "--num-virtual-stages-per-pipeline-rank 2"
SHARDED = "--use-distributed-optimizer"
OVERLAPS = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"
EP2 = f"{' '.join(MOE)} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
EXACTLY = " ".join(EXACT)
DROPOUT = f"{PP2} --fp64 --clip-grad 0 --attention-dropout 0.1 --hidden-dropout 0.1"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
BASE = [*MODEL, *MOCK_DATA, *"--init-method-std 0.1 --train-iters 4".split()]

TO_THE_RIGHT: Plans = {2: ((1,), (3,))}

# ranks, flags, plans
CASES = {
    "PP 2": (2, f"{EXACTLY} {PP2}", {1: ((3,), (1,)), 3: ((1,), (3,))}),
    "PP 2, TP 2, sequence parallel, recomputed": (
        4,
        f"{EXACTLY} {PP2} {RECOMPUTE} --tensor-model-parallel-size 2 --sequence-parallel "
        "--make-vocab-size-divisible-by 64",
        TO_THE_RIGHT,
    ),
    "PP 4, two layers over a stage, and back": (
        4,
        f"{EXACTLY} --pipeline-model-parallel-size 4 --num-layers 8",
        {1: ((1,), (1,), (1,), (5,)), 3: ((4,), (2,), (1,), (1,))},
    ),
    "PP 2, DP 2, VPP 2, both overlaps": (4, f"{EXACTLY} {PP2} {VPP} {OVERLAPS} --num-layers 8", {2: ((1, 3), (3, 1))}),
    "PP 2, DP 2, fp16": (
        4,
        f"{PP2} --fp16 --initial-loss-scale 1024 --clip-grad 0 --attention-dropout 0 --hidden-dropout 0",
        TO_THE_RIGHT,
    ),
    "PP 2, DP 2, bf16, both overlaps, untied": (
        4,
        f"{PP2} --bf16 {OVERLAPS} --attention-dropout 0 --hidden-dropout 0 --clip-grad 0 "
        "--untie-embeddings-and-output-weights",
        TO_THE_RIGHT,
    ),
    "PP 2, DP 2, multi-token prediction, distributed optimizer": (
        4,
        f"{EXACTLY} {PP2} {SHARDED} --mtp-num-layers 1 --pipeline-model-parallel-layout Et|tttmL "
        "--untie-embeddings-and-output-weights",
        {1: ((3,), (1,)), 3: ((1,), (3,))},
    ),
    # The final norm follows the last layer, which stays before multi-token prediction.
    "PP 4, multi-token prediction on a stage of its own, experts": (
        4,
        f"{EXACTLY} --pipeline-model-parallel-size 4 {' '.join(MOE)} --mtp-num-layers 1 "
        "--pipeline-model-parallel-layout Et|ttt|m|L --untie-embeddings-and-output-weights",
        {1: ((2,), (1,), (1,), (0,)), 3: ((1,), (3,), (0,), (0,))},
    ),
    "PP 2, DP 2, widths by muP, distributed optimizer": (
        4,
        f"{EXACTLY} {PP2} {SHARDED} --use-mup --mup-base-hidden-size 8 --untie-embeddings-and-output-weights",
        TO_THE_RIGHT,
    ),
    "PP 2, VPP 2, embedding and loss count as layers": (
        2,
        f"{EXACTLY} {PP2} --num-layers 6 --num-layers-per-virtual-pipeline-stage 2 "
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
        {1: ((2, 1), (1, 2)), 2: ((1, 2), (2, 1))},
    ),
    # The first stage gets the first layers with experts that it has, and loses all of them again.
    "PP 2, EP 2, one dense layer, expert bias, distributed optimizer": (
        4,
        f"{EXACTLY} {PP2} {EP2} {SHARDED} --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-layer-freq ([0]*2+[1]*2)",
        {1: ((3,), (1,)), 3: ((1,), (3,))},
    ),
}


@cache
def _unmoved(pool, world_size: int, flags: str) -> tuple[Run, dict[str, np.ndarray]]:
    return train_moving(pool, world_size, flags, {}, base=BASE)


def _assert_same_run(run: Run, reference: Run) -> None:
    """Bit for bit, but for the norm of gradients, which Megatron sums up in float32 in the order of stages."""
    assert run.losses == reference.losses
    np.testing.assert_allclose(run.grad_norms, reference.grad_norms, rtol=1e-6)
    _assert_same_tensors(run.parameters, reference.parameters)


def _assert_same_tensors(tensors: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> None:
    assert tensors.keys() == reference.keys()
    for name, whole in reference.items():
        assert np.array_equal(tensors[name], whole), name


@pytest.mark.parametrize(
    "case",
    sampled(
        CASES,
        "PP 2, DP 2, VPP 2, both overlaps",
        "PP 2, DP 2, bf16, both overlaps, untied",
        "PP 2, DP 2, multi-token prediction, distributed optimizer",
        "PP 2, EP 2, one dense layer, expert bias, distributed optimizer",
    ),
)
def test_a_move_changes_no_number(pool, case):
    world_size, flags, plans = CASES[case]
    run, state = train_moving(pool, world_size, flags, plans, base=BASE)
    reference, expected = _unmoved(pool, world_size, flags)
    _assert_same_run(run, reference)
    _assert_same_tensors(state, expected)
    assert len([name for name in expected if name.endswith("exp_avg_sq")]) > 4 * 8


def test_replicas_of_experts_follow(pool, tmp_path):
    """Hot experts have replicas before, between and after two moves, and both balancers together change no number."""
    flags = f"{EXACTLY} {PP2} {EP2} {OVERLAPS} --train-iters 9"
    both = f"{flags} --balance-experts --balance-report {tmp_path}"
    run, _ = train_moving(pool, 4, both, {3: ((3,), (1,)), 6: ((1,), (3,))}, base=BASE)
    replicated = {line["iteration"] for line in events_in(tmp_path, action="replicate")}
    assert replicated & {2, 3} and replicated & {5, 6} and replicated & {8, 9}
    assert max(differences(run, _unmoved(pool, 4, flags)[0])) <= 1e-12


def test_with_dropout_only_a_move_changes_the_masks(pool):
    """Before it, the run is Megatron-LM's bit for bit; after it, other masks are drawn, which are as good."""
    moved, _ = train_moving(pool, 2, DROPOUT, TO_THE_RIGHT, base=BASE)
    plain = train(pool, 2, DROPOUT, base=BASE)
    assert moved.losses[:2] == plain.losses[:2]
    assert moved.losses[2:] != plain.losses[2:]
    assert moved.losses == pytest.approx(plain.losses, rel=0.02)


def _frozen_and_masked(argv: list[str]) -> list[tuple[int, bool, float, bool]]:
    """Freeze part of a layer, hang a buffer on it, move it. Returns what this rank's layers are like at the end."""
    from megatron.balanced.layers import balancer as layers

    found: list[tuple[int, bool, float, bool]] = []
    move_at({1: ((1,), (3,)), 3: ((3,), (1,))})
    between_steps = layers.LayerBalancer.between_steps

    def first(self: Any, step: int) -> None:
        own = [layer for model in self.mover.models() for layer in model.decoder.layers]
        for layer in own if step == 1 else []:
            layer.mlp.linear_fc1.bias.requires_grad_(layer.layer_number != 2)
            layer.mlp.register_buffer("mask", torch.full((3,), float(layer.layer_number)), persistent=False)
        between_steps(self, step)

    def see(balancer: Any) -> None:
        own = [layer for model in balancer.mover.models() for layer in model.decoder.layers]
        found[:] = [
            (
                layer.layer_number,
                layer.mlp.linear_fc1.bias.requires_grad,
                layer.mlp.mask.mean().item() if balancer.iteration else 0.0,
                balancer.iteration > 0 and "mask" in layer.mlp._non_persistent_buffers_set,
            )
            for layer in own
        ]

    layers.LayerBalancer.between_steps = first
    at_end_of_step(see)
    train_rank(argv, False)
    return found


def test_what_others_did_to_a_layer_comes_along(pool):
    flags = f"{PP2} --balance-layers --attention-dropout 0 --hidden-dropout 0"
    first, second = pool.run(2, _frozen_and_masked, [*BASE, *flags.split()])
    assert first == [(1, True, 1.0, True), (2, False, 2.0, True), (3, True, 3.0, True)]
    assert second == [(4, True, 4.0, True)]


def _peeks_at_buffers(argv: list[str]) -> list[bool]:
    """Whether gradient buffers, and the optimizer they belong to, are gone while layers travel."""
    from megatron.balanced.layers import layer_tensors, mover

    gone: list[bool] = []
    move_at({2: ((1,), (3,))})
    old: list[weakref.ref] = []
    free, run_transfers = mover.LayerMover._free_buffers, layer_tensors.run_transfers

    def watched(self: Any) -> None:
        old.extend(weakref.ref(buffer.grad_data) for ddp in self._chunks for buffer in ddp.buffers)
        free(self)

    def peek(*args: Any, **named: Any) -> int:
        gone.extend(reference() is None for reference in old)
        return run_transfers(*args, **named)

    mover.LayerMover._free_buffers, layer_tensors.run_transfers = watched, peek
    train_rank(argv, False)
    return gone


def test_gradient_buffers_make_room_for_what_travels(pool):
    flags = f"{PP2} {OVERLAPS} --bf16 --balance-layers"
    for gone in pool.run(4, _peeks_at_buffers, [*BASE, *flags.split()]):
        assert gone
        assert all(gone)
