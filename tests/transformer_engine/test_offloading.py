"""Activations that are offloaded to the host, beside layers that move and replicas.

Megatron-LM finds out in its first iteration which activations are offloaded (`--fine-grained-activation-offloading`),
and knows them by their order afterwards.
"""

import os
from typing import Any

import numpy as np
import pytest

from tests.support.events import events_in
from tests.support.moving import Plans, moving_rank, train_moving
from tests.support.sampled import sampled
from tests.support.settings import settings
from tests.support.training import join, train, train_rank
from tests.support.transformer_engine.model import EXPERTS, assert_close
from tests.transformer_engine.test_layers import OVERLAPS, PP2
from tests.transformer_engine.test_sequences import CP2, PACKED

OFFLOAD = "--fine-grained-activation-offloading --min-offloaded-tensor-size 1 --offload-modules"
ATTENTION = f"{OFFLOAD} attn_norm qkv_linear core_attn attn_proj mlp_norm"
EP2 = "--expert-model-parallel-size 2 --moe-grouped-gemm"
INTERLEAVED = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"

SIX = "--num-layers 6"
TO_AND_FRO: Plans = {1: ((4,), (2,)), 2: ((2,), (4,))}  # Megatron-LM's cannot offload the only layer of a stage

DENSE = "attention, DP 2, both overlaps"
# model, ranks, layout, what is offloaded, plans
MOVES = {
    DENSE: (SIX, 4, f"{PP2} {OVERLAPS}", ATTENTION, TO_AND_FRO),
    "experts, EP 2": (f"{EXPERTS} {SIX}", 4, f"{PP2} {EP2}", f"{OFFLOAD} core_attn expert_fc1 moe_act", TO_AND_FRO),
    "interleaved, half of it": (
        "--num-layers 12",
        2,
        INTERLEAVED,
        f"{ATTENTION} --activation-offload-fraction 0.5",
        {1: ((4, 3), (3, 2)), 2: ((2, 3), (3, 4))},
    ),
}


def _offloading(argv: list[str], plans: Any) -> Any:
    from tests.support.stand_ins.offloaded_activations import install, offloaded

    install()
    run = moving_rank(argv, plans)
    assert offloaded["tensors"] > 4 * 4, offloaded
    return run


@pytest.mark.parametrize("case", sampled(MOVES, DENSE))
def test_activations_of_layers_that_moved_are_offloaded(model_of, case):
    """To rounding: which activations are copies follows from their order, and the products of some processors round
    copies, with other strides, in another way."""
    model, ranks, layout, offload, plans = MOVES[case]
    model = model_of(model)
    base = model.argv(f"{layout} {offload}")
    moved, state = train_moving(model.pool, ranks, "", plans, base=base, body=_offloading)
    stayed, expected = train_moving(model.pool, ranks, "", {}, base=base, body=_offloading)
    assert_close(moved, stayed, 1e-5, 1e-4)
    assert state.keys() == expected.keys() and any(name.endswith(":exp_avg_sq") for name in state)
    for name, whole in state.items():
        np.testing.assert_allclose(whole, expected[name], 1e-4, 1e-4 * np.abs(expected[name]).max(), err_msg=name)
    assert_close(stayed, train(model.pool, ranks, base=model.argv(layout), parameters=True), 1e-5, 1e-4)


def _offloading_beside_replicas(argv: list[str]) -> Any:
    from tests.support.stand_ins.offloaded_activations import install, offloaded

    install()
    if "--use-transformer-engine-op-fuser" in argv:
        os.environ["NVTE_CUTEDSL_FUSED_GROUPED_MLP"] = "1"  # without which Megatron-LM does not try
    run = train_rank(argv, True)
    assert offloaded["tensors"] > 4 * 4, offloaded
    return run


EIGHT = EXPERTS.replace("--num-experts 4", "--num-experts 8")
OF_EXPERTS = f"{ATTENTION} expert_fc1 moe_act"
FUSED = f"{OFFLOAD} core_attn fused_group_mlp --use-transformer-engine-op-fuser"
GROUPED = "grouped, PP 2, DP 2, both overlaps"
# ranks, flags
REPLICAS = {
    GROUPED: (4, f"{PP2} {EP2} {OVERLAPS} {OF_EXPERTS}"),
    "grouped, act computed again": (
        2,
        f"{EP2} {ATTENTION} expert_fc1 --recompute-granularity selective --recompute-modules moe_act",
    ),
    "fused operations": (2, f"{EP2} {FUSED}"),
    "linear layers": (2, f"--expert-model-parallel-size 2 {OF_EXPERTS}"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", REPLICAS)
def test_activations_beside_replicas_are_offloaded(model_of, tmp_path, case):
    ranks, flags = REPLICAS[case]
    model = model_of(EIGHT)
    balanced = f"--balance-experts {settings('experts', min_gain=0)} --train-iters 6 --balance-report {tmp_path}"
    run = join(model.pool.run(ranks, _offloading_beside_replicas, model.argv(f"{flags} {balanced}")))
    assert len(events_in(tmp_path, action="replicate")) > 10, "hardly anything was replicated"
    assert_close(run, model.alone("--moe-grouped-gemm --train-iters 6"), 1e-5, 1e-4)


@pytest.mark.exhaustive
def test_activations_of_spread_documents_are_offloaded(model_of):
    flags = f"{PACKED} {CP2} {PP2} {ATTENTION}"
    model = model_of(SIX)
    run = join(model.pool.run(4, _offloading_beside_replicas, model.argv(flags)))
    assert_close(run, model.alone(PACKED), 1e-5, 1e-4)
