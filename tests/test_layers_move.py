"""A layer that moves to another stage takes everything along: the run goes on as if it had always been there."""

from functools import cache

import numpy as np
import pytest
from moving import Plans, train_moving
from training import EXACT, MOCK_DATA, MODEL, MOE, Run, assert_same

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
    "PP 2": (2, f"{EXACTLY} {PP2}", TO_THE_RIGHT),
}


@cache
def _unmoved(pool, world_size: int, flags: str) -> tuple[Run, dict[str, np.ndarray]]:
    return train_moving(pool, world_size, flags, {}, base=BASE)


def _assert_same_state(state: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> None:
    assert state.keys() == reference.keys()
    for name, whole in reference.items():
        assert np.array_equal(state[name], whole), name


@pytest.mark.parametrize("case", CASES)
def test_a_move_changes_no_number(pool, case):
    world_size, flags, plans = CASES[case]
    run, state = train_moving(pool, world_size, flags, plans, base=BASE)
    reference, expected = _unmoved(pool, world_size, flags)
    assert_same(run, reference)
    _assert_same_state(state, expected)
    assert len([name for name in expected if name.endswith("exp_avg_sq")]) > 4 * 8
