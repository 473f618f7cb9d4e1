"""Layers that move where messages of one micro-batch overlap compute of another (`--overlap-moe-expert-parallel-comm`).

Megatron-LM then runs each layer in parts, and the forward pass of one micro-batch alternates with the backward pass of
another.
"""

import gc
import weakref
from functools import cache, wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from balancing.layers import LayerSeconds, StagePlan
from balancing.pipeline import Schedule
from tests.layers.test_balance import _decisions
from tests.support.events import events_in
from tests.support.moving import Plans, move_at, train_moving
from tests.support.sampled import sampled
from tests.support.set_clock import SetClock, TwoStreams, slow_parts
from tests.support.settings import settings
from tests.support.training import EXACT, MOCK_DATA, MODEL, MOE, RankRun, Run, differences, train_rank

BASE = [
    *MODEL,
    *MOCK_DATA,
    *EXACT,
    *MOE,
    *"--moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall --init-method-std 0.1".split(),
    *"--expert-model-parallel-size 2 --ddp-bucket-size 2000 --global-batch-size 8".split(),
]
INTERLEAVED = "--pipeline-model-parallel-size 2 --num-layers 5 --pipeline-model-parallel-layout"
FIVE = f"{INTERLEAVED} Et|tt|t|tL"
IN_PARTS = "--overlap-moe-expert-parallel-comm"
GRADIENTS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
THERE_AND_BACK: Plans = {1: ((2, 1), (1, 1)), 3: ((1, 1), (1, 2))}
# As in benchmarks/recipes/moe_recipes.json, with smaller sizes.
QWEN3 = (
    "--normalization RMSNorm --untie-embeddings-and-output-weights --qk-layernorm --group-query-attention "
    "--num-query-groups 2 --num-experts 8 --moe-ffn-hidden-size 32 --moe-router-topk 4"
)
DEEPSEEK_V3 = (
    "--normalization RMSNorm --untie-embeddings-and-output-weights --qk-layernorm --multi-latent-attention "
    "--q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6 --num-experts 8 "
    "--moe-layer-freq [0]+[1]*4 --moe-shared-expert-intermediate-size 32 --moe-router-topk 3 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-router-pre-softmax --moe-router-group-topk 2 "
    "--moe-router-num-groups 4 --moe-router-topk-scaling-factor 2.5 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --mtp-num-layers 1 --recompute-granularity selective --recompute-modules "
    "mla_up_proj mlp"
)

# ranks, flags, plans
CASES = {
    "gradients and parameters overlapped": (4, f"{FIVE} {GRADIENTS}", THERE_AND_BACK),
    "Qwen3, embedding and loss count as layers": (
        4,
        f"{GRADIENTS} {QWEN3} --pipeline-model-parallel-size 2 --num-layers 6 "
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
        "--num-layers-per-virtual-pipeline-stage 2",
        {1: ((2, 1), (1, 2)), 2: ((1, 2), (2, 1))},
    ),
    "DeepSeek-V3, layer of prediction beside the last": (
        4,
        f"{GRADIENTS} {DEEPSEEK_V3} {INTERLEAVED} Et|tt|t|tmL",
        THERE_AND_BACK,
    ),
    # The final norm follows the last layer.
    "DeepSeek-V3, layer of prediction behind all others": (
        8,
        f"--use-distributed-optimizer {DEEPSEEK_V3} --pipeline-model-parallel-size 4 --num-layers 8 "
        "--moe-layer-freq [0]+[1]*7 --pipeline-model-parallel-layout Ett|t|t|t|t|t|tm|L",
        {1: ((1, 1), (2, 1), (1, 1), (1, 0)), 2: ((1, 1), (1, 1), (1, 2), (1, 0))},
    ),
    "expert-data parallel 2": (8, f"{FIVE} {GRADIENTS}", THERE_AND_BACK),
    "optimizer not distributed": (4, FIVE, THERE_AND_BACK),
}


@cache
def _whole(pool: Any, ranks: int, flags: str) -> tuple[Run, dict[str, np.ndarray]]:
    """Without moves, each layer as a whole."""
    return train_moving(pool, ranks, flags, {}, base=BASE)


@pytest.mark.parametrize(
    "case",
    sampled(CASES, "gradients and parameters overlapped"),
)
def test_a_move_of_layers_in_parts_changes_no_number(pool, case):
    ranks, flags, plans = CASES[case]
    run, state = train_moving(pool, ranks, f"{flags} {IN_PARTS}", plans, base=BASE)
    whole, expected = _whole(pool, ranks, flags)
    assert max(differences(run, whole)) <= 1e-12
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(state[name], tensor, rtol=1e-9, atol=1e-12 * np.abs(tensor).max(), err_msg=name)


@pytest.mark.exhaustive
def test_layers_in_parts_and_replicas_of_experts(pool, tmp_path):
    flags = f"{FIVE} {GRADIENTS} --train-iters 6"
    both = f"{flags} {IN_PARTS} --balance-experts {settings('experts', min_gain=0)} --balance-report {tmp_path}"
    runs = [train_moving(pool, 4, both, {2: ((2, 1), (1, 1)), 4: ((1, 1), (1, 2))}, base=BASE)[0] for _ in range(2)]
    replicated = {line["iteration"] for line in events_in(tmp_path, action="replicate")}
    assert replicated >= {2, 4, 6}, "too little was replicated before, between and after the moves"
    assert max(differences(runs[0], _whole(pool, 4, flags)[0])) <= 1e-12
    assert runs[0].losses == runs[1].losses, "a run does not repeat"
    for name, tensor in runs[0].parameters.items():
        assert np.array_equal(tensor, runs[1].parameters[name]), name


# Seconds of parts, forward and backward.
ATTENTION, EXPERTS = (0.01, 0.02), (0.04, 0.08)
MESSAGES = {"dispatch": (0.03, 0.05), "combine": (0.07, 0.09)}


def _costs(layer: int) -> dict[str, tuple[float, float]]:
    return {"attention": ATTENTION, "experts": EXPERTS if layer < 2 else (0.02, 0.08), **MESSAGES}


def _train_with_slow_parts(argv: list[str], clock: type[SetClock]) -> RankRun:
    slow_parts(clock().install(), _costs)
    return train_rank(argv, False)


def _layers(report: Path) -> list[dict[str, Any]]:
    return events_in(report, balancer="layers", unit="layer")


def test_where_nothing_overlaps_messages_are_all_exposed(pool, tmp_path):
    """A CPU runs in order. In the report, which has every part of the model."""
    flags = f"--num-layers 3 --train-iters 3 {IN_PARTS} --mtp-num-layers 1 --untie-embeddings-and-output-weights"
    pool.run(2, _train_with_slow_parts, [*BASE, *flags.split(), "--balance-report", str(tmp_path)], SetClock)
    lines = _layers(tmp_path)
    assert len(lines) == 3
    for line in lines:
        assert line["layers"] == ["embedding", 0, 1, 2, "mtp", "head"]
        assert line["exposed_s"] == pytest.approx([0.0, 0.24, 0.24, 0.24, 0.24, 0.0])
        assert line["forward_s"] == pytest.approx([0.0, 0.15, 0.15, 0.13, 0.15, 0.0])
        assert line["backward_s"] == pytest.approx([0.0, 0.24, 0.24, 0.24, 0.24, 0.0])
    busy = [line["busy_s"] for line in events_in(tmp_path, unit="stage")]
    assert busy == [pytest.approx([4 * (0.05 + 0.05 + 0.03 + 0.05 + 4 * 0.1)])] * 3


def test_what_no_computation_hides_is_a_cost_of_its_layer(pool, tmp_path):
    """A forward pass of one micro-batch in turn with a backward of another, as Megatron-LM orders them on two streams,
    seconds / 100; * is exposed:

        computes  attention 1 |        | experts back 8 | experts 4 |   | attention back 2 |  | attention of the next
        sends     combine back 9 (8*)  | dispatch 3     | dispatch back 5 (1*) | combine 7 (5*) | combine back ...
    """
    flags = f"--num-layers 3 --train-iters 3 {IN_PARTS} --untie-embeddings-and-output-weights"
    pool.run(2, _train_with_slow_parts, [*BASE, *flags.split(), "--balance-report", str(tmp_path)], TwoStreams)
    lines = _layers(tmp_path)
    assert len(lines) == 3
    for line in lines:
        assert line["layers"] == ["embedding", 0, 1, 2, "head"]
        # Layer 2, whose experts take 2, runs forward while layer 0 runs backward and hides less of its dispatch.
        assert line["forward_s"] == pytest.approx([0.0, 0.05 + 0.05, 0.05 + 0.05, 0.03 + 0.05, 0.0])
        assert line["backward_s"] == pytest.approx([0.0, 0.1 + 0.11, 0.1 + 0.09, 0.1 + 0.09, 0.0])
        assert line["exposed_s"] == pytest.approx([0.0, 0.16, 0.14, 0.14, 0.0])
    busy = [line["busy_s"] for line in events_in(tmp_path, unit="stage")]
    assert busy == [pytest.approx([4 * (0.05 + 0.05 + 0.03 + 3 * 0.1)])] * 3


def _train_willing(argv: list[str]) -> RankRun:
    from megatron.balanced.layers import planning

    planning._BANDWIDTH, planning._FIXED_SECONDS = 1e18, 0.0
    return _train_with_slow_parts(argv, TwoStreams)


@pytest.mark.exhaustive
def test_layers_in_parts_settle_by_their_share_of_the_step(pool, tmp_path):
    flags = (
        f"{INTERLEAVED} Ett|t|t|tL {IN_PARTS} --train-iters 5 --balance-layers-once --layer-balance-interval 3 "
        f"--balance-report {tmp_path} --global-batch-size 16 {settings('layers', min_gain=0.01)}"
    )
    pool.run(4, _train_willing, [*BASE, *flags.split()])
    (decision,) = _decisions(tmp_path)
    assert (decision["iteration"], decision["action"]) == (4, "move")
    assert decision["layout_before"] == "Ett|t|t|tL"
    line = _layers(tmp_path)[0]
    assert min(line["exposed_s"][1:-1]) > 0.14
    of_layers = (np.array(line["forward_s"]) + line["backward_s"])[1:-1]
    shares = [of_layers[[0, 1, 3]].sum(), of_layers[[2, 4]].sum()]
    assert decision["stage_cost_before"] == pytest.approx(shares), "the gate and the report differ"
    assert max(decision["stage_cost_after"]) == pytest.approx(of_layers[[0, 2, 3]].sum())
    cost = LayerSeconds(np.array(line["forward_s"][1:-1]), np.array(line["backward_s"][1:-1]))
    before, after = StagePlan.from_counts(((2, 1), (1, 1))), StagePlan.from_counts(((1, 2), (1, 1)))
    in_parts = [cost.step_seconds(plan, 8, schedule=Schedule(in_parts=True)) for plan in (before, after)]
    assert in_parts[1] > 1.02 * cost.step_seconds(after, 8), "warm-up is one forward pass longer in parts"
    assert [decision["predicted_step_before"], decision["predicted_step_after"]] == pytest.approx(in_parts)


def _left_over(argv: list[str], plans: Plans) -> tuple[int, list[str]]:
    """How many nodes of schedules and modules of layers that left this rank had; and those of them that are there when
    the next step begins, although nothing collects garbage."""
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan as Plan

    from megatron.balanced.layers import balancer, mover

    seen: list[tuple[weakref.ref, str]] = []
    left: list[str] = []
    build, change = Plan._build_callable_nodes, mover.change_layers

    @wraps(build)
    def built(self: Any, *args: Any, **named: Any) -> None:
        build(self, *args, **named)
        for name in ("pre_dispatch_computation", "mlp", "moe_dispatch", "moe_combine"):
            seen.append((weakref.ref(getattr(self, name)), name))

    @wraps(change)
    def changed(plan: Any, models: Any, *args: Any, **kwargs: Any) -> Any:
        before = [layer for model in models for layer in model.decoder.layers]
        result = change(plan, models, *args, **kwargs)
        after = {layer for model in models for layer in model.decoder.layers}
        left_now = [part for layer in before if layer not in after for part in layer.modules()]
        seen.extend((weakref.ref(part), type(part).__name__) for part in left_now)
        return result

    Plan._build_callable_nodes, mover.change_layers = built, changed
    move_at(plans)
    between_steps = balancer.LayerBalancer.between_steps

    def checked(self: Any, step: int) -> None:
        left.extend(name for reference, name in seen if reference() is not None)
        between_steps(self, step)

    balancer.LayerBalancer.between_steps = checked
    gc.disable()
    try:
        train_rank(argv, False)
    finally:
        gc.enable()
    return len(seen), left


@pytest.mark.exhaustive
def test_nothing_of_a_schedule_survives_its_step(pool):
    flags = f"{FIVE} {GRADIENTS} {IN_PARTS} --balance-layers"
    for many, left in pool.run(4, _left_over, [*BASE, *flags.split()], THERE_AND_BACK):
        assert many > 4 * 4 * 2 * 4
        assert not left
