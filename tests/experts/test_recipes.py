"""Flags of published recipes at toy size, with whatever `--balance all` switches on for them, small buckets and both
overlaps: no number of the same run without balancers changes."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from benchmarks.replaced import replace_name
from tests.support.events import events_in
from tests.support.sampled import sampled
from tests.support.settings import settings
from tests.support.stand_ins.flex_buffers import train_flex
from tests.support.stand_ins.fused_moe import train_fused
from tests.support.training import EXACT, MOCK_DATA, MODEL, RankRun, Run, assert_close, join

SIZES = "--num-layers 2 --global-batch-size 4 --train-iters 4 --expert-model-parallel-size 2"
OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000"
GATED = "--swiglu --disable-bias-linear --normalization RMSNorm --untie-embeddings-and-output-weights --qk-layernorm"
# As in benchmarks/recipes/moe_recipes.json, with smaller sizes.
DEEPSEEK_V3 = (
    f"{GATED} --multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 6 --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0 --num-experts 8 "
    "--moe-layer-freq [0]+[1]*1 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-router-topk 3 --moe-router-pre-softmax "
    "--moe-aux-loss-coeff 1e-4 --moe-router-group-topk 2 --moe-router-num-groups 4 "
    "--moe-router-topk-scaling-factor 2.5 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 1e-3 --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1"
)
DEEPEP = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep"
HYBRIDEP = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep"
NCCLEP = (
    "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ncclep --moe-expert-rank-capacity-factor 2.0 "
    "--micro-batch-size 2"
)
FUSED = "--moe-permute-fusion --moe-router-fusion"
QWEN3 = (
    f"{GATED} --group-query-attention --num-query-groups 2 --num-experts 8 --moe-ffn-hidden-size 32 "
    "--moe-router-topk 4 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3"
)

# ranks, flags; what is not the sample runs with --exhaustive
RECIPES = {
    "DeepSeek-V3": (2, f"{DEEPSEEK_V3} --moe-token-dispatcher-type alltoall"),
    "DeepSeek-V3, TP 2": (
        2,
        f"{DEEPSEEK_V3} --moe-token-dispatcher-type alltoall --tensor-model-parallel-size 2 --sequence-parallel "
        "--expert-tensor-parallel-size 1",
    ),
    "DeepSeek-V3, PP 2": (
        4,
        f"{DEEPSEEK_V3} --moe-token-dispatcher-type alltoall --pipeline-model-parallel-size 2 --num-layers 4 "
        "--moe-layer-freq [0]+[1]*3 --recompute-granularity selective --recompute-modules mla_up_proj mlp",
    ),
    "DeepSeek-V3, fused": (2, f"{DEEPSEEK_V3} --moe-token-dispatcher-type alltoall {FUSED}"),
    "Qwen3, fused": (2, f"{QWEN3} --moe-token-dispatcher-type alltoall {FUSED}"),
    "Qwen3, fused, TP 2": (
        4,
        f"{QWEN3} --moe-token-dispatcher-type alltoall {FUSED} --tensor-model-parallel-size 2 --sequence-parallel "
        "--expert-tensor-parallel-size 2",
    ),
    "Qwen3, interleaved, gathers in the optimizer's step": (
        4,
        f"{QWEN3} --moe-token-dispatcher-type alltoall --pipeline-model-parallel-size 2 --num-layers 4 "
        "--num-layers-per-virtual-pipeline-stage 1 --overlap-param-gather-with-optimizer-step --ckpt-format torch",
    ),
    "Qwen3, fused, recomputed": (
        2,
        f"{QWEN3} --moe-token-dispatcher-type alltoall {FUSED} --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1",
    ),
    "DeepSeek-V3, DeepEP": (2, f"{DEEPSEEK_V3} {DEEPEP} {FUSED} --moe-router-dtype fp32"),
    "DeepSeek-V3, HybridEP": (2, f"{DEEPSEEK_V3} {HYBRIDEP} {FUSED} --moe-router-dtype fp32"),
    "Qwen3, DeepEP, unfused": (2, f"{QWEN3} {DEEPEP}"),
    "Qwen3, HybridEP, shared experts overlapped": (
        2,
        f"{QWEN3} {HYBRIDEP} {FUSED} --moe-shared-expert-intermediate-size 32 --moe-shared-expert-overlap",
    ),
    "Qwen3, HybridEP, TP 2": (
        4,
        f"{QWEN3} {HYBRIDEP} {FUSED} --moe-permute-fusion-into-hybridep --tensor-model-parallel-size 2 "
        "--sequence-parallel --expert-tensor-parallel-size 2",
    ),
    "Qwen3, DeepEP, TP 2": (
        4,
        f"{QWEN3} {DEEPEP} {FUSED} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2",
    ),
    "Qwen3, HybridEP, recomputed": (
        2,
        f"{QWEN3} {HYBRIDEP} {FUSED} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "Qwen3, NCCL EP": (2, f"{QWEN3} {NCCLEP} {FUSED} --global-batch-size 8 --train-iters 3"),
    "DeepSeek-V3, padded": (
        2,
        f"{DEEPSEEK_V3} --moe-token-dispatcher-type alltoall {FUSED} --moe-router-padding-for-quantization",
    ),
    "Qwen3, padded, unfused": (
        2,
        f"{QWEN3} --moe-token-dispatcher-type alltoall --moe-router-padding-for-quantization",
    ),
    "Qwen3, DeepEP, padded": (2, f"{QWEN3} {DEEPEP} {FUSED} --moe-router-padding-for-quantization"),
}
# The routers of Megatron-LM: other scores, losses, biases and tokens that are left out.
ROUTERS = {
    "sigmoid": "--moe-router-score-function sigmoid",
    "square root of softplus, expert bias": "--moe-router-score-function sqrtsoftplus --moe-router-enable-expert-bias",
    "groups": "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5",
    "sinkhorn": "--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0",
    "quantile balancing": "--moe-router-load-balancing-type quantile_balancing --moe-aux-loss-coeff 0 "
    "--moe-router-quantile-balancing-ema 0.9",
    "loss over all batches": "--moe-router-load-balancing-type global_aux_loss",
    "two losses": "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1e-2 1e-3",
    "no loss": "--moe-router-load-balancing-type none",
    "jitter": "--moe-input-jitter-eps 0.1",
    "biased by force": "--moe-router-force-biased 1.0",
    "drops by position": "--moe-expert-capacity-factor 1.0 --moe-token-drop-policy position",
    "one expert a token, probabilities on the input": "--moe-router-topk 1 --moe-router-pre-softmax "
    "--moe-apply-probs-on-input",
}
SAMPLE = {
    "quantile balancing",
    "DeepSeek-V3, PP 2",
    "DeepSeek-V3, padded",
    "DeepSeek-V3, HybridEP",
    "Qwen3, DeepEP, unfused",
}


def _train_padded(argv: list[str], keep_parameters: bool) -> RankRun:
    """Train with `--moe-router-padding-for-quantization` in float64, as with a number format of 16 rows."""
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron.balanced.experts.replicated import ReplicatedSequentialMLP

    check, forward = TransformerConfig.__post_init__, ReplicatedSequentialMLP.forward
    rows: list[int] = []

    def post_init(config: Any) -> None:
        padding, config.moe_router_padding_for_quantization = config.moe_router_padding_for_quantization, False
        check(config)  # which refuses the flag without fp8 or fp4
        config.moe_router_padding_for_quantization = padding

    def noted(
        self: Any, permuted_local_hidden_states: Any, tokens_per_expert: Any, permuted_probs: Any, *buffers: Any
    ) -> Any:
        rows.extend(tokens_per_expert.tolist())
        return forward(self, permuted_local_hidden_states, tokens_per_expert, permuted_probs, *buffers)

    TransformerConfig.__post_init__ = post_init
    ReplicatedSequentialMLP.forward = noted
    token_dispatcher.get_align_size_for_quantization = lambda config: 16
    run = (train_flex if "flex" in argv else train_fused)(argv, keep_parameters)
    if "--balance" in argv:
        assert rows and not any(count % 16 for count in rows), "a physical expert has rows that are no multiple"
    return run


def _rank_of(argv: list[str]) -> Callable[[list[str], bool], RankRun]:
    """The body of a rank that has the stand-ins which the flags need."""
    if "--moe-router-padding-for-quantization" in argv:
        return _train_padded
    return train_flex if "flex" in argv else train_fused


def _train(pool: Any, ranks: int, flags: str) -> Run:
    argv = [*MODEL, *MOCK_DATA, *EXACT, *SIZES.split(), *OVERLAPS.split(), *flags.split()]
    return join(pool.run(ranks, _rank_of(argv), argv, True))


def balanced_run(pool: Any, folder: Any, ranks: int, flags: str, least: int = 4) -> Run:
    """Train with replicas, of which at least `least` times a layer's plan has some."""
    run = _train(pool, ranks, f"{flags} --balance all {settings('experts', min_gain=0)} --balance-report {folder}")
    replicated = events_in(folder, action="replicate")
    assert len(replicated) >= least, "hardly anything was replicated, so nothing was tested"
    assert np.mean([line["imbalance_after"] - line["imbalance_before"] for line in replicated]) < 0
    return run


@cache
def _plain_run(pool: Any, ranks: int, flags: str) -> Run:
    return _train(pool, ranks, flags)


@pytest.mark.parametrize("recipe", sampled(RECIPES, *SAMPLE & RECIPES.keys()))
def test_recipes_train_alike_with_replicas(pool, tmp_path, recipe):
    ranks, flags = RECIPES[recipe]
    assert_close(balanced_run(pool, tmp_path, ranks, flags), _plain_run(pool, ranks, flags))


@pytest.mark.parametrize("router", sampled(ROUTERS, *SAMPLE & ROUTERS.keys()))
def test_every_router_keeps_its_numbers(pool, tmp_path, router):
    flags = f"{QWEN3} --moe-token-dispatcher-type alltoall {ROUTERS[router]}"
    assert_close(balanced_run(pool, tmp_path, 2, flags), _plain_run(pool, 2, flags))


def _operations(argv: list[str]) -> dict[str, int]:
    """Operations of ours for one micro-batch and layer with replicas, forward: before and behind Megatron-LM's
    dispatcher, without those that it starts itself."""
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from torch.utils._python_dispatch import TorchDispatchMode

    from megatron.balanced.experts.moe_layer import BalancedMoELayer

    started, inner, found = 0, 0, {"preprocess": 0, "postprocess": 0}
    views = {"view", "t", "transpose", "slice", "select", "unsqueeze", "detach", "alias", "expand", "as_strided"}

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal started
            started += func.name().removeprefix("aten::").partition(".")[0].lstrip("_") not in views
            return func(*args, **(kwargs or {}))

    def count(name: str) -> None:
        theirs, ours = getattr(MoELayer, name), getattr(BalancedMoELayer, name)

        def of_megatron(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal inner
            before = started
            result = theirs(self, *args, **kwargs)
            inner += started - before
            return result

        def whole(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal started, inner
            started = inner = 0
            with Counted():
                result = ours(self, *args, **kwargs)
            if self.training and self.token_dispatcher is self._physical:
                found[name] = max(found[name], started - inner)
            return result

        replace_name(MoELayer, name, of_megatron)
        replace_name(BalancedMoELayer, name, whole)

    count("preprocess")
    count("postprocess")
    _rank_of(argv)(argv, False)
    return found


# flags, and how many operations ours are at most before and behind the dispatcher
LAUNCHES = {
    "alltoall": ("--moe-token-dispatcher-type alltoall", 18, 8),
    "alltoall, fused": (f"--moe-token-dispatcher-type alltoall {FUSED}", 18, 0),
    "alltoall, fused, padded": (
        f"--moe-token-dispatcher-type alltoall {FUSED} --moe-router-padding-for-quantization",
        19,
        0,
    ),
    "DeepEP": (f"{DEEPEP} {FUSED}", 18, 0),
    "HybridEP": (f"{HYBRIDEP} {FUSED}", 18, 0),
}


@pytest.mark.parametrize("case", sampled(LAUNCHES, "alltoall, fused"))
def test_operations_around_the_dispatcher(pool, case):
    flags, before, behind = LAUNCHES[case]
    balanced = f"{SIZES} {QWEN3} {flags} --balance-experts {settings('experts', min_gain=0)}"
    argv = [*MODEL, *MOCK_DATA, *EXACT, *balanced.split()]
    for found in pool.run(2, _operations, argv):
        assert found == {"preprocess": before, "postprocess": behind}
