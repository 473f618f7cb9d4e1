"""Moves of layers of dynamic models: the state of a scheme moves with its layer, and no number changes."""

import pytest

from tests.layers.test_balance import _decisions, _train_willing
from tests.layers.test_move import _assert_same_run, _assert_same_tensors, _peeks_at_buffers
from tests.support.events import events_in
from tests.support.moving import Plans, train_moving
from tests.support.sampled import sampled
from tests.support.set_clock import SetClock, slow_layers
from tests.support.settings import EARLY_EXIT, HASH_ATTENTION, PLASTICITY, scheme_flags
from tests.support.training import EXACT, MOCK_DATA, MODEL, MOE, RankRun, differences, train

PP2 = "--pipeline-model-parallel-size 2"
OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
UNTIED = "--untie-embeddings-and-output-weights"
EXACTLY = " ".join(EXACT)
BASE = [*MODEL, *MOCK_DATA, *"--init-method-std 0.1 --global-batch-size 4".split()]

# Frozen are one layer in iteration 2, two in 3, three in 4, and none from 5 on. Moves come before all that, together
# with freezes, after which one of the stages is frozen as a whole, and together with the thaw.
FREEZE = (
    f"{UNTIED} --freeze-layers 3 --freeze-layers-start 2 --freeze-layers-interval 1 "
    f"{scheme_flags(freeze_layers_until=5)} "
    "--train-iters 7"
)
WHILE_FREEZING: Plans = {1: ((3,), (1,)), 3: ((1,), (3,)), 4: ((3,), (1,)), 5: ((2,), (2,))}
PLASTICITY = f"{UNTIED} --freeze-layers 2 --freeze-layers-interval 1 {PLASTICITY} --train-iters 8"

# ranks, flags, plans
CASES = {
    "freezing, PP 2, DP 2, both overlaps": (4, f"{EXACTLY} {PP2} {OVERLAPS} {FREEZE}", WHILE_FREEZING),
    "freezing, interleaved, mixture of experts": (
        2,
        f"{EXACTLY} {PP2} {' '.join(MOE)} --num-experts 2 --num-layers 5 {UNTIED} "
        "--pipeline-model-parallel-layout Et|t|tt|tL --freeze-layers 3 --freeze-layers-start 1 "
        f"{scheme_flags(freeze_layers_until=4)} --train-iters 5",
        {2: ((2, 1), (1, 1)), 3: ((1, 1), (2, 1)), 4: ((1, 2), (1, 1))},
    ),
    # Comparing with weights of the iteration before, which move in between.
    "freezing by plasticity, both overlaps": (
        2,
        f"{EXACTLY} {PP2} {OVERLAPS} {PLASTICITY}",
        {2: ((1,), (3,)), 4: ((3,), (1,)), 7: ((1,), (3,))},
    ),
    "pruning, mixture of depths, sparse attention": (
        2,
        f"{EXACTLY} {PP2} {scheme_flags(prune_sparsity=0.8, prune_start=1, prune_end=3, prune_interval=1)} "
        f"{scheme_flags(prune_sparse_density=0.6, mixture_of_depths=0.25)} {HASH_ATTENTION} --train-iters 6",
        {2: ((1,), (3,)), 4: ((3,), (1,))},
    ),
    "early exit": (
        2,
        f"{EXACTLY} {PP2} {EARLY_EXIT} --train-iters 5",
        {2: ((1,), (3,)), 3: ((3,), (1,))},
    ),
}


@pytest.mark.parametrize("case", sampled(CASES, "freezing, interleaved, mixture of experts", "early exit"))
def test_a_move_of_a_dynamic_model_changes_no_number(pool, tmp_path, case):
    world_size, flags, plans = CASES[case]
    run, state = train_moving(pool, world_size, f"{flags} --balance-report {tmp_path}", plans, base=BASE)
    reference, expected = train_moving(pool, world_size, flags, {}, base=BASE)
    _assert_same_run(run, reference)
    _assert_same_tensors(state, expected)
    assert len([name for name in expected if name.endswith("exp_avg_sq")]) > 4 * 8
    reported = events_in(tmp_path, balancer="dynamics")
    if "freezing" in case:
        assert [line["action"] for line in reported][-1:] == (["freeze"] if "plasticity" in case else ["unfreeze"])
    else:
        assert max(line["imbalance_before"] for line in reported) > 1
    if case == "early exit":
        tokens = {layer: n for line in reported[-2:] for layer, n in zip(line["layers"], line["tokens"], strict=True)}
        assert sorted(tokens) == [0, 1, 2, 3]
        assert tokens[3] < tokens[0]


@pytest.mark.exhaustive
def test_frozen_layers_are_saved_where_they_moved_to_and_thaw_elsewhere(pool, tmp_path):
    freeze = f"{EXACTLY} {UNTIED} --freeze-layers 3 --freeze-layers-start 1 --train-iters 6 "
    freeze += scheme_flags(freeze_layers_until=5)
    base = [*BASE, *freeze.split(), *"--ckpt-format torch_dist".split()]
    save = f"{PP2} --save {tmp_path} --save-interval 4"
    # At the save the second stage begins with two frozen layers.
    whole, _ = train_moving(pool, 2, save, {2: ((1,), (3,)), 4: ((3,), (1,))}, base=base)
    resumed = train(pool, 1, f"--load {tmp_path} --ckpt-step 4", base=base, parameters=True)
    assert len(resumed.losses) == 2
    resumed.losses[:0] = whole.losses[:4]
    assert max(differences(resumed, whole)) <= 1e-12


def test_frozen_buckets_make_room_for_what_travels(pool):
    flags = f"{PP2} {OVERLAPS} --bf16 --balance-layers {UNTIED} --freeze-layers 3 --train-iters 3"
    for gone in pool.run(2, _peeks_at_buffers, [*BASE, *flags.split()]):
        assert gone
        assert all(gone)


def _train_slowly(argv: list[str]) -> RankRun:
    """Each layer takes ten milliseconds forward, and twenty backward where it has a backward pass."""
    slow_layers(SetClock().install(), lambda layer: (0.01, 0.02))
    return _train_willing(argv)


def test_layers_move_to_where_others_are_frozen(pool, tmp_path):
    flags = (
        f"{PP2} {UNTIED} --num-layers 6 --freeze-layers 3 --freeze-layers-start 3 --balance-layers "
        f"--layer-balance-interval 3 --train-iters 10 --balance-report {tmp_path}"
    )
    pool.run(2, _train_slowly, [*BASE, *flags.split()])
    first, second, move = _decisions(tmp_path)
    for even in (first, second):  # nothing is frozen yet, then one layer, in the last of the iterations averaged
        assert (even["action"], even["layout_before"], even["layout_after"]) == ("keep", "Ettt|tttL", "Ettt|tttL")
    assert (move["iteration"], move["action"]) == (10, "move")
    assert (move["layout_before"], move["layout_after"]) == ("Ettt|tttL", "Et*4|ttL")
    assert move["stage_cost_before"] == pytest.approx([3 * 0.01, 3 * 0.03])
    assert move["stage_cost_after"] == pytest.approx([3 * 0.01 + 0.03, 2 * 0.03])
    assert move["imbalance_before"] == pytest.approx(1.5) and move["imbalance_after"] == pytest.approx(1.0)
    assert (move["predicted_step_before"], move["predicted_step_after"]) == pytest.approx((0.39, 0.30))
