"""Every layout trains the same model: PP, TP, EP, DP and recompute against one rank, in float64 on the CPU.

All runs of a model start from one checkpoint, since Megatron's initial weights depend on the layout.
"""

import itertools
from pathlib import Path

import pytest

from tests.support.sampled import sampled
from tests.support.training import EXACT, MOCK_DATA, MODEL, MOE, Run, differences, train

TOLERANCE = 1e-12  # of losses, relative, and of each parameter tensor, in norm

PP = "--pipeline-model-parallel-size"
TP2 = "--tensor-model-parallel-size 2"
SP = f"{TP2} --sequence-parallel"
EP = "--expert-model-parallel-size"
ETP = "--expert-tensor-parallel-size"
SHARDED = "--use-distributed-optimizer"
FULL = "--recompute-granularity full"
OVERLAPS = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"

# ranks, flags
DENSE = {
    "PP 2": (2, f"{PP} 2"),
    "PP 4": (4, f"{PP} 4"),
    "PP 2, interleaved": (2, f"{PP} 2 --num-virtual-stages-per-pipeline-rank 2"),
    "TP 2": (2, TP2),
    "TP 2, sequence parallel": (2, SP),
    "DP 2": (2, ""),
    "DP 2, gradient overlap": (2, "--overlap-grad-reduce"),
    "DP 2, distributed optimizer": (2, SHARDED),
    "DP 2, both overlaps": (2, OVERLAPS),
    "DP 2, TP 2, sequence parallel, both overlaps": (4, f"{SP} {OVERLAPS}"),
    "DP 2, PP 2, interleaved, both overlaps": (4, f"{PP} 2 --num-virtual-stages-per-pipeline-rank 2 {OVERLAPS}"),
    "recompute, full": (1, f"{FULL} --recompute-method uniform --recompute-num-layers 1"),
    "recompute, selective": (1, "--recompute-granularity selective"),
    "PP 2, recompute, full": (2, f"{PP} 2 {FULL} --recompute-method block --recompute-num-layers 1"),
}
EXPERTS = {
    "EP 2": (2, f"{EP} 2"),
    "EP 4": (4, f"{EP} 4"),
    "EP 2, TP 2, ETP 1": (2, f"{SP} {EP} 2 {ETP} 1"),
    "EP 1, TP 2, ETP 1": (2, f"{SP} {EP} 1 {ETP} 1"),
    "EP 2, TP 2, ETP 2": (4, f"{SP} {EP} 2 {ETP} 2"),
    "EP 2, DP 2, both overlaps": (4, f"{EP} 2 {OVERLAPS}"),
}
LATENT = {
    "TP 2": (2, TP2),
    "TP 2, sequence parallel": (2, SP),
    "PP 2, recomputed projections": (2, f"{PP} 2 --recompute-granularity selective --recompute-modules mla_up_proj"),
}
EXPERTS_ALLTOALL = {
    "PP 2, EP 2, TP 2, ETP 1": (4, f"{PP} 2 {SP} {EP} 2 {ETP} 1"),
    "EP 2, full recompute": (
        2,
        f"{EP} 2 {FULL} --recompute-method uniform --recompute-num-layers 1",
    ),
    "EP 2, recomputed experts": (2, f"{EP} 2 --recompute-granularity selective --recompute-modules moe"),
}
MOE_LOSSES = "--moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 --moe-shared-expert-intermediate-size 32"
MODELS = {
    "dense": "",
    "untied": "--untie-embeddings-and-output-weights --normalization RMSNorm --swiglu --group-query-attention "
    "--num-query-groups 2 --disable-bias-linear",
    "experts": f"{' '.join(MOE)} {MOE_LOSSES}",
    # As DeepSeek-V3: values smaller than keys, a part of the keys shared by all heads, YaRN.
    "latent": "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 6 --qk-layernorm --rotary-scaling-factor 4 --mscale-all-dim 1.0 --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights",
}


def _flags(model: str, layout: str) -> str:
    tensor_ranks = 2 if TP2 in layout else 1
    # Weights far from zero: attention that prefers some tokens, experts that differ.
    common = f"{MODELS[model]} --init-method-std 0.1 --lr 2e-3 --make-vocab-size-divisible-by {128 // tensor_ranks}"
    return f"{' '.join(EXACT)} {common} {layout}"


class Reference:
    """A model's weights to start from, and its run on one rank."""

    def __init__(self, pool, corpus: list[str], model: str, folder: Path) -> None:
        self.pool, self.base, self.model, self.folder = pool, [*MODEL, *corpus], model, folder
        # With a learning rate of 0, one iteration writes the initial weights.
        save = f"--lr 0 --train-iters 1 --save {folder} --save-interval 1"
        train(pool, 1, _flags(model, save), base=self.base)
        self.run = self.train(1, "")

    def train(self, world_size: int, layout: str) -> Run:
        start = f"--load {self.folder} --finetune --no-load-optim --no-load-rng"
        flags = f"{_flags(self.model, layout)} {start}"
        return train(self.pool, world_size, flags, base=self.base, parameters=True)

    def check(self, world_size: int, layout: str) -> None:
        run = self.train(world_size, layout)
        losses, parameters = differences(run, self.run)
        assert losses <= TOLERANCE
        assert parameters <= TOLERANCE


@pytest.fixture(scope="module")
def references(pool, corpus, tmp_path_factory):
    made: dict[str, Reference] = {}

    def reference(model: str) -> Reference:
        if model not in made:
            made[model] = Reference(pool, corpus, model, tmp_path_factory.mktemp(model))
        return made[model]

    return reference


@pytest.mark.parametrize(
    "layout",
    sampled(
        DENSE,
        "DP 2, TP 2, sequence parallel, both overlaps",
        "DP 2, PP 2, interleaved, both overlaps",
    ),
)
def test_dense(references, layout):
    references("dense").check(*DENSE[layout])


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["PP 2, interleaved", "TP 2, sequence parallel"])
def test_untied_embeddings_and_grouped_queries(references, layout):
    references("untied").check(*DENSE[layout])


@pytest.mark.parametrize("layout", sampled(LATENT, "TP 2"))
def test_multi_latent_attention(references, layout):
    references("latent").check(*LATENT[layout])


@pytest.mark.parametrize(
    "layout, dispatcher",
    sampled(
        itertools.product(EXPERTS, ("alltoall", "allgather")),
        ("EP 2, DP 2, both overlaps", "allgather"),
    ),
)
def test_experts(references, layout, dispatcher):
    world_size, flags = EXPERTS[layout]
    references("experts").check(world_size, f"{flags} --moe-token-dispatcher-type {dispatcher}")


@pytest.mark.parametrize("layout", sampled(EXPERTS_ALLTOALL, "PP 2, EP 2, TP 2, ETP 1"))
def test_experts_together_with_others(references, layout):
    world_size, flags = EXPERTS_ALLTOALL[layout]
    references("experts").check(world_size, f"{flags} --moe-token-dispatcher-type alltoall")


def test_validation_has_micro_batches_of_its_own_size(pool):
    flags = "--skip-train --eval-interval 1 --eval-iters 2 --micro-batch-size 2 --split 50,50,0 --eval-micro-batch-size"
    base = [*MODEL, *MOCK_DATA, *EXACT, *flags.split()]
    one, two = (train(pool, 2, TP2, base=[*base, size]).validation for size in "12")
    assert one and one == pytest.approx(two, rel=1e-6)  # which Megatron-LM sums in float32


def test_comparison_sees_a_small_change(references):
    """A learning rate that differs by one part in a million is found, so equal layouts are equal for a reason."""
    reference = references("dense")
    run = reference.train(1, "--lr 1.000001e-3")
    losses, parameters = differences(run, reference.run)
    assert losses > 100 * TOLERANCE
    assert parameters > 100 * TOLERANCE


def test_training_learns(references):
    for model in ("dense", "experts", "latent"):
        losses = references(model).run.losses
        assert losses[-1] < losses[0] - 0.05, model
