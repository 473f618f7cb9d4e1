"""A layer that moves to another stage takes everything along: the run goes on as if it had always been there."""

from functools import cache

import numpy as np
import pytest
from moving import Plans, train_moving
from training import EXACT, MOCK_DATA, MODEL, MOE, Run

PP2 = "--pipeline-model-parallel-size 2"
VPP = "--num-virtual-stages-per-pipeline-rank 2"
SHARDED = "--use-distributed-optimizer"
OVERLAPS = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"
EP2 = f"{' '.join(MOE)} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
EXACTLY = " ".join(EXACT)
BASE = [*MODEL, *MOCK_DATA, *"--init-method-std 0.1 --train-iters 4".split()]

TO_THE_RIGHT: Plans = {2: ((1,), (3,))}

# ranks, flags, plans
CASES = {
    "PP 2, dropout": (
        2,
        f"{EXACTLY} {PP2} --attention-dropout 0.1 --hidden-dropout 0.1",
        {1: ((3,), (1,)), 3: ((1,), (3,))},
    ),
    "PP 4, two layers over a stage, and back": (
        4,
        f"{EXACTLY} --pipeline-model-parallel-size 4 --num-layers 8",
        {1: ((1,), (1,), (1,), (5,)), 3: ((4,), (2,), (1,), (1,))},
    ),
    "PP 2, DP 2, both overlaps": (4, f"{EXACTLY} {PP2} {OVERLAPS}", TO_THE_RIGHT),
    "PP 2, DP 2, VPP 2, both overlaps": (4, f"{EXACTLY} {PP2} {VPP} {OVERLAPS} --num-layers 8", {2: ((1, 3), (3, 1))}),
    "PP 2, DP 2, bf16": (4, f"{PP2} --bf16 --clip-grad 0 --attention-dropout 0 --hidden-dropout 0", TO_THE_RIGHT),
    "PP 2, DP 2, bf16, both overlaps, untied": (
        4,
        f"{PP2} --bf16 {OVERLAPS} --attention-dropout 0 --hidden-dropout 0 --clip-grad 0 "
        "--untie-embeddings-and-output-weights",
        TO_THE_RIGHT,
    ),
    "PP 2, EP 2, expert bias, distributed optimizer": (
        4,
        f"{EXACTLY} {PP2} {EP2} {SHARDED} --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
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


@pytest.mark.parametrize("case", CASES)
def test_a_move_changes_no_number(pool, case):
    world_size, flags, plans = CASES[case]
    run, state = train_moving(pool, world_size, flags, plans, base=BASE)
    reference, expected = _unmoved(pool, world_size, flags)
    _assert_same_run(run, reference)
    _assert_same_tensors(state, expected)
    assert len([name for name in expected if name.endswith("exp_avg_sq")]) > 4 * 8
