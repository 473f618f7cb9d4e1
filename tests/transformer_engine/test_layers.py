"""Layers of Transformer Engine move between stages with the state of its optimizer, and ranks leave: no number changes."""

from dataclasses import replace

import numpy as np
import pytest

from tests.layers.test_release import _train
from tests.support.moving import train_moving
from tests.support.training import assert_same, differences, train
from tests.support.transformer_engine.model import EXPERTS

PP2 = "--pipeline-model-parallel-size 2"
PP4 = "--pipeline-model-parallel-size 4"
OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000"
THERE_AND_BACK = {1: ((1,), (3,)), 2: ((3,), (1,))}

# model, ranks, flags, plans
MOVES = {
    "PP 2": ("", 2, PP2, THERE_AND_BACK),
    "interleaved": ("", 2, f"{PP2} --num-virtual-stages-per-pipeline-rank 2", {2: ((1, 1), (1, 1)), 1: ((2, 1), (1, 0))}),
    "bf16, DP 2, both overlaps": ("", 4, f"{PP2} --bf16 {OVERLAPS}", THERE_AND_BACK),
    "grouped experts, EP 2": (
        EXPERTS,
        4,
        f"{PP2} --expert-model-parallel-size 2 --moe-grouped-gemm {OVERLAPS}",
        THERE_AND_BACK,
    ),
    "replicas of experts": (
        EXPERTS,
        4,
        f"{PP2} --expert-model-parallel-size 2 --balance-experts --expert-min-gain 0",
        THERE_AND_BACK,
    ),
}


def _assert_same_state(state: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert any(name.endswith(":exp_avg_sq") for name in state)
    for name, whole in state.items():
        np.testing.assert_array_equal(whole, expected[name], err_msg=name)


@pytest.mark.parametrize("case", MOVES)
def test_a_move_changes_no_number(model_of, case):
    model, ranks, flags, plans = MOVES[case]
    model = model_of(model)
    moved, state = train_moving(model.pool, ranks, "", plans, base=model.argv(flags))
    stayed, expected = train_moving(model.pool, ranks, "", {}, base=model.argv(flags))
    assert_same(moved, stayed)
    assert state.keys() == expected.keys()
    _assert_same_state(state, expected)


def test_nobody_misses_the_ranks_that_left(model_of):
    model = model_of("")
    argv = model.argv(f"{PP4} --bf16 --use-distributed-optimizer")
    run, state = _train(model.pool, 4, 2, "", {2: ((3,), (1,))}, argv)
    reference, expected = _train(model.pool, 4, 4, "", {}, argv)
    assert run.losses == reference.losses
    assert differences(run, reference)[1] == 0
    _assert_same_state(state, expected)


@pytest.mark.parametrize("sharded", ["", OVERLAPS])
def test_saved_after_a_move_it_goes_on(model_of, tmp_path, sharded):
    """A checkpoint holds what Transformer Engine keeps beside its weights (`_extra_state`), whichever rank has a layer."""
    model = model_of("")
    flags = f"{PP2} {sharded}"
    save = f"{flags} --save {tmp_path} --save-interval 3"
    whole, _ = train_moving(model.pool, 4 if sharded else 2, "", {2: ((1,), (3,))}, base=model.argv(save))
    saved = _keys_in(tmp_path / "iter_0000003")
    assert {name for name in saved if name.startswith("decoder.layers.") and "_extra_state" in name}
    load = model.argv(f"{flags} --pipeline-model-parallel-layout Et|tttL").copy()
    del load[load.index("--load") : load.index("--load") + 5]
    resumed = train(
        model.pool,
        4 if sharded else 2,
        f"--load {tmp_path} --ckpt-step 3 --no-load-rng",
        base=load,
        parameters=True,
    )
    assert resumed.losses == whole.losses[3:]
    assert_same(replace(resumed, losses=whole.losses, grad_norms=whole.grad_norms), whole)


def _keys_in(folder) -> set[str]:
    from torch.distributed.checkpoint import FileSystemReader

    return set(FileSystemReader(folder).read_metadata().state_dict_metadata)
