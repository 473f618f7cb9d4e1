"""Flags of published recipes at toy size: `--balance-experts` changes no number of the same run without it."""

import json
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.support.training import EXACT, MOCK_DATA, MODEL, Run, train

SIZES = "--num-layers 2 --global-batch-size 4 --train-iters 4 --expert-model-parallel-size 2"
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
}
SAMPLE = {"DeepSeek-V3"}


def balanced_run(pool: Any, folder: Any, ranks: int, flags: str, least: int = 4) -> Run:
    """Train with replicas, of which at least `least` times a layer's plan has some."""
    base = [*MODEL, *MOCK_DATA, *EXACT, *SIZES.split(), *flags.split()]
    run = train(pool, ranks, f"--balance-experts --expert-min-gain 0 --balance-report {folder}", base=base,
                parameters=True)  # fmt: skip
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    replicated = [line for line in lines if line["action"] == "replicate"]
    assert len(replicated) >= least, "hardly anything was replicated, so nothing was tested"
    assert np.mean([line["imbalance_after"] - line["imbalance_before"] for line in replicated]) < 0
    return run


@cache
def _plain_run(pool: Any, ranks: int, flags: str) -> Run:
    return train(pool, ranks, flags, base=[*MODEL, *MOCK_DATA, *EXACT, *SIZES.split()], parameters=True)


def assert_same(run: Run, reference: Run) -> None:
    np.testing.assert_allclose(run.losses, reference.losses, rtol=1e-12, atol=0)
    assert run.parameters.keys() == reference.parameters.keys()
    for name, value in reference.parameters.items():
        difference = np.linalg.norm(run.parameters[name] - value)
        assert difference <= 1e-12 * np.linalg.norm(value), f"{name}: {difference / np.linalg.norm(value)}"


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.exhaustive) for name in RECIPES]
)
def test_recipes_train_alike_with_replicas(pool, tmp_path, recipe):
    ranks, flags = RECIPES[recipe]
    assert_same(balanced_run(pool, tmp_path, ranks, flags), _plain_run(pool, ranks, flags))
