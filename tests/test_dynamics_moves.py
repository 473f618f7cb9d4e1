"""Dynamic models whose layers move: what a scheme has done to a layer goes with it, and no number changes."""

import pytest
from moving import Plans, train_moving
from test_layers_move import _assert_same_run, _assert_same_tensors
from training import EXACT, MOCK_DATA, MODEL, MOE

PP2 = "--pipeline-model-parallel-size 2"
OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
EXACTLY = " ".join(EXACT)
DROPOUT = f"{EXACTLY} --attention-dropout 0.1 --hidden-dropout 0.1"
BASE = [*MODEL, *MOCK_DATA, *"--init-method-std 0.1".split()]

# One layer is frozen from iteration 2 on, two from 4, three from 6, and none from 8.
FREEZE = (
    "--untie-embeddings-and-output-weights --freeze-layers 3 --freeze-layers-start 2 --freeze-layers-interval 2 "
    "--freeze-layers-until 8 --train-iters 10"
)
# Moves before the first freeze, together with one, where all of the first stage is frozen, and together with the thaw.
WHILE_FREEZING: Plans = {1: ((3,), (1,)), 4: ((1,), (3,)), 7: ((3,), (1,)), 8: ((1,), (3,)), 9: ((2,), (2,))}

# ranks, flags, plans
CASES = {
    "freezing, PP 2, DP 2, both overlaps, dropout": (4, f"{DROPOUT} {PP2} {OVERLAPS} {FREEZE}", WHILE_FREEZING),
    "freezing, PP 4, a stage between others": (
        4,
        f"{EXACTLY} --pipeline-model-parallel-size 4 --num-layers 8 --untie-embeddings-and-output-weights "
        "--freeze-layers 5 --freeze-layers-start 1 --freeze-layers-until 4 --train-iters 6",
        {2: ((1,), (3,), (3,), (1,)), 3: ((5,), (1,), (1,), (1,)), 5: ((2,), (2,), (2,), (2,))},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_move_changes_no_number(pool, case):
    world_size, flags, plans = CASES[case]
    run, state = train_moving(pool, world_size, flags, plans, base=BASE)
    reference, expected = train_moving(pool, world_size, flags, {}, base=BASE)
    _assert_same_run(run, reference)
    _assert_same_tensors(state, expected)
    assert len([name for name in expected if name.endswith("exp_avg_sq")]) > 4 * 8
