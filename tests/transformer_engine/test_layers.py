"""Layers of Transformer Engine move with the state of its optimizer, and ranks leave: no number changes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.layers.test_release import _train
from tests.support.moving import train_moving
from tests.support.training import Run, assert_same, differences, train
from tests.support.transformer_engine.model import EXPERTS, TE, cases

PP2 = "--pipeline-model-parallel-size 2"
PP4 = "--pipeline-model-parallel-size 4"
OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000"
THERE_AND_BACK = {1: ((1,), (3,)), 2: ((3,), (1,))}

# model, ranks, flags, plans
MOVES = {
    "PP 2": ("", 2, PP2, THERE_AND_BACK),
    "bf16, DP 2, both overlaps": ("", 4, f"{PP2} --bf16 {OVERLAPS}", THERE_AND_BACK),
    "grouped experts, EP 2": (
        EXPERTS,
        4,
        f"{PP2} --expert-model-parallel-size 2 --moe-grouped-gemm {OVERLAPS}",
        THERE_AND_BACK,
    ),
}


def _assert_same(run: Run, reference: Run) -> None:
    """Bit for bit, but for the norm of the gradients, which is summed stage by stage."""
    assert run.grad_norms == pytest.approx(reference.grad_norms, rel=1e-6)
    assert_same(replace(run, grad_norms=reference.grad_norms), reference)


def _assert_same_state(state: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert any(name.endswith(":exp_avg_sq") for name in state)
    for name, whole in state.items():
        np.testing.assert_array_equal(whole, expected[name], err_msg=name)


@pytest.mark.parametrize("case", cases(MOVES, "PP 2"))
def test_a_move_of_transformer_engine_changes_no_number(model_of, case):
    model, ranks, flags, plans = MOVES[case]
    model = model_of(model)
    moved, state = train_moving(model.pool, ranks, "", plans, base=model.argv(flags))
    stayed, expected = train_moving(model.pool, ranks, "", {}, base=model.argv(flags))
    _assert_same(moved, stayed)
    assert state.keys() == expected.keys()
    _assert_same_state(state, expected)


def test_ranks_with_transformer_engine_leave(model_of):
    model = model_of("")
    argv = model.argv(f"{PP4} --bf16 --use-distributed-optimizer")
    run, state = _train(model.pool, 4, 2, "", {2: ((3,), (1,))}, argv)
    reference, expected = _train(model.pool, 4, 4, "", {}, argv)
    assert run.losses == reference.losses
    assert differences(run, reference)[1] == 0
    _assert_same_state(state, expected)


@pytest.mark.parametrize("optimizer", cases(["whole", "sharded"], "whole"))
def test_saved_after_a_move_it_goes_on(model_of, tmp_path, optimizer):
    """A checkpoint has what Transformer Engine keeps beside weights (`_extra_state`), whichever rank has a layer."""
    model = model_of("")
    ranks, flags = (4, f"{PP2} {OVERLAPS}") if optimizer == "sharded" else (2, PP2)
    save = f"{flags} --save {tmp_path} --save-interval 3"
    whole, _ = train_moving(model.pool, ranks, "", {2: ((1,), (3,))}, base=model.argv(save))
    saved = _keys_in(tmp_path / "iter_0000003")
    assert {name for name in saved if name.startswith("decoder.layers.") and "_extra_state" in name}
    load = f"{TE} {flags} --pipeline-model-parallel-layout Et|tttL --load {tmp_path} --ckpt-step 3 --no-load-rng"
    resumed = train(model.pool, ranks, load, base=model.base, parameters=True)
    assert resumed.losses == whole.losses[3:]
    assert_same(replace(resumed, losses=whole.losses, grad_norms=whole.grad_norms), whole)


def _keys_in(folder: Path) -> set[str]:
    from torch.distributed.checkpoint import FileSystemReader

    return set(FileSystemReader(folder).read_metadata().state_dict_metadata)
