"""Layers of Transformer Engine move with the state of its optimizer, and ranks leave: no number changes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.layers.test_memory import BASE, SMALL, _bytes, _peak
from tests.layers.test_release import _train
from tests.support.events import events_in
from tests.support.moving import train_moving
from tests.support.sampled import sampled
from tests.support.training import Run, assert_same, differences, train, train_rank
from tests.support.transformer_engine.model import EXPERTS, TE, assert_close

PP2 = "--pipeline-model-parallel-size 2"
PP4 = "--pipeline-model-parallel-size 4"
OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000"
THERE_AND_BACK = {1: ((1,), (3,)), 2: ((3,), (1,))}

REMAINDERS = "precision-aware, main parameters as remainders, moments in bf16, DP 2"
PRECISION = f"{PP2} --bf16 --use-distributed-optimizer --use-precision-aware-optimizer"

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
    REMAINDERS: (
        "",
        4,
        f"{PRECISION} {OVERLAPS} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --main-grads-dtype bf16",
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


@pytest.mark.parametrize("case", sampled(MOVES, "bf16, DP 2, both overlaps"))
def test_a_move_of_transformer_engine_changes_no_number(model_of, case):
    model, ranks, flags, plans = MOVES[case]
    model = model_of(model)
    moved, state = train_moving(model.pool, ranks, "", plans, base=model.argv(flags))
    stayed, expected = train_moving(model.pool, ranks, "", {}, base=model.argv(flags))
    _assert_same(moved, stayed)
    assert state.keys() == expected.keys()
    _assert_same_state(state, expected)


IN_PARTS = "--moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm --delay-wgrad-compute"
FIVE_IN_PARTS = f"{EXPERTS} --num-layers 5 --moe-shared-expert-intermediate-size 32 --global-batch-size 8"
INTERLEAVED = f"{PP2} --pipeline-model-parallel-layout Et|tt|t|tL --expert-model-parallel-size 2 --moe-grouped-gemm"


RECOMPUTED = "--recompute-granularity selective --recompute-modules moe_act layernorm"


@pytest.mark.exhaustive
@pytest.mark.parametrize("flags", [OVERLAPS, f"--use-distributed-optimizer {RECOMPUTED}"])
def test_layers_with_delayed_gradients_move(model_of, flags):
    """Weight gradients come in parts of the schedule of their own, from hooks of modules."""
    model = model_of(FIVE_IN_PARTS)
    base = model.argv(f"{INTERLEAVED} {flags}")
    plans = {1: ((2, 1), (1, 1)), 3: ((1, 1), (1, 2))}
    moved, state = train_moving(model.pool, 4, IN_PARTS, plans, base=base)
    stayed, expected = train_moving(model.pool, 4, IN_PARTS, {}, base=base)
    _assert_same(moved, stayed)
    assert state.keys() == expected.keys()
    _assert_same_state(state, expected)
    assert_close(stayed, train(model.pool, 4, base=base, parameters=True), 1e-5, 1e-4)


def _train_with_slow_gradients(argv: list[str]) -> None:
    """Weight gradients are all that takes time."""
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    from tests.support.set_clock import SetClock

    clock = SetClock().install()

    def slow(owner: Any, seconds: float) -> None:
        original = owner.backward_dw

        def backward_dw(self: Any) -> None:
            clock.work(seconds)
            original(self)

        owner.backward_dw = backward_dw

    slow(SelfAttention, 0.25)
    slow(TEGroupedMLP, 0.5)
    train_rank(argv, False)


@pytest.mark.exhaustive
def test_delayed_gradients_are_a_cost_of_their_layer(model_of, tmp_path):
    flags = f"{IN_PARTS} --expert-model-parallel-size 2 --moe-grouped-gemm --train-iters 2 --balance-report {tmp_path}"
    model = model_of(FIVE_IN_PARTS)
    model.pool.run(2, _train_with_slow_gradients, model.argv(flags))
    costs = events_in(tmp_path, balancer="layers", unit="layer")
    assert len(costs) == 2
    for line in costs:
        assert line["layers"] == ["embedding", 0, 1, 2, 3, 4, "head"]
        assert line["forward_s"] == [0.0] * 7
        assert line["backward_s"] == [0.0, *[0.75] * 5, 0.0]


# flags, bytes that a rank holds for each element of a weight
MEMORY = {
    "precision-aware": (f"{PRECISION} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", 2 + 4 + 2 + 2 + 2),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", MEMORY)
def test_no_more_memory_than_before_or_after_and_one_layer(engine, case):
    flags, state = MEMORY[case]
    argv = [*BASE, *f"{TE} --disable-bias-linear --balance-layers {flags}".split()]
    for before, after, peak, weights in engine.run(2, _peak, argv):
        layer = weights * state / 2
        assert abs(before - after) > 1.5 * layer, "hardly anything moved"
        assert peak <= max(before, after) + layer + SMALL


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", MEMORY)
def test_bytes_of_state_are_counted(engine, case):
    flags, _ = MEMORY[case]
    argv = [*BASE, *f"{TE} --disable-bias-linear --balance-layers --train-iters 1 {flags}".split()]
    for counted, held in engine.run(2, _bytes, argv):
        for layer, (resident, gradients) in held.items():
            assert counted["travelling"][layer] == pytest.approx(resident, rel=0.02)
            assert counted["resting"][layer] == pytest.approx(resident + gradients, rel=0.02)


def test_ranks_with_transformer_engine_leave(model_of):
    model = model_of("")
    argv = model.argv(f"{PP4} --bf16 --use-distributed-optimizer")
    run, state = _train(model.pool, 4, 2, "", {2: ((3,), (1,))}, argv)
    reference, expected = _train(model.pool, 4, 4, "", {}, argv)
    assert run.losses == reference.losses
    assert differences(run, reference)[1] == 0
    _assert_same_state(state, expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", ["whole", "sharded"])
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
