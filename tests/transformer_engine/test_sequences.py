"""Documents spread over ranks, in a model of Transformer Engine's layers but for its attention."""

import argparse

import pytest

from megatron.balanced.trainer.sequence_rules import why_of_one_size
from tests.experts.test_fusion import _train_fused
from tests.support.moving import train_moving
from tests.support.sampled import sampled
from tests.support.settings import settings
from tests.support.training import join
from tests.support.transformer_engine.model import EXPERTS, assert_close
from tests.transformer_engine import test_captured_iterations

MULTI_LATENT = (
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 8 --qk-layernorm --rotary-scaling-factor 4 --normalization RMSNorm --disable-bias-linear"
)
CP2 = "--context-parallel-size 2 --balance-sequences --attention-backend auto"
PACKED = "--dataloader-inter-document-masking --eod-mask-loss --calculate-per-token-loss"

# model, ranks, flags
CASES = {
    "CP 2": ("", 2, CP2),
    "CP 2, TP 2, sequence parallel": ("", 4, f"{CP2} --tensor-model-parallel-size 2 --sequence-parallel"),
    "CP 2, PP 2, EP 2, all three balancers": (
        EXPERTS,
        4,
        f"{CP2} --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --moe-grouped-gemm --balance-experts "
        f"{settings('experts', min_gain=0)} --balance-layers",
    ),
    "CP 2, TP 2, windows and sinks": (
        "--window-size 5,0 --window-attn-skip-freq 2 --softmax-type learnable",
        4,
        f"{CP2} --tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "CP 2, TP 2, multi-latent attention": (
        MULTI_LATENT,
        4,
        f"{CP2} --tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "CP 2, PP 2, multi-latent attention, keys and values": (
        MULTI_LATENT,
        4,
        f"{CP2} --pipeline-model-parallel-size 2 --fill-with-weight-gradients",
    ),
}
ALWAYS = "CP 2, PP 2, EP 2, all three balancers", "CP 2, PP 2, multi-latent attention, keys and values"


@pytest.mark.parametrize("case", sampled(CASES, *ALWAYS))
def test_spread_documents_equal_one_rank(model_of, case):
    """Of which Transformer Engine's own unfused attention computes the documents. Latents are normed before they
    travel, and gradients of their norm and projection have a part of each rank."""
    model, ranks, flags = CASES[case]
    model = model_of(model)
    if "--balance-layers" in flags:
        run, _ = train_moving(model.pool, ranks, "", {2: ((1,), (3,))}, base=model.argv(f"{PACKED} {flags}"))
    else:
        run = model.train(ranks, f"{PACKED} {flags}")
    assert_close(run, model.alone(PACKED), 1e-5, 1e-4)


def test_received_latents_count_in_the_first_micro_batch(model_of):
    """Where weight gradients are added to buffers by products, which overwrite in the first micro-batch."""
    model, flags = model_of(MULTI_LATENT), f"{PACKED} --train-iters 2"
    fused = model.pool.run(2, _train_fused, model.argv(f"{flags} {CP2}"))
    assert_close(join([run for run, *_ in fused]), model.alone(flags), 1e-5, 1e-4)


LAYERS = "--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router moe_preprocess"
GRAPHS = {
    "of layers": f"--expert-model-parallel-size 2 --moe-grouped-gemm {LAYERS}",
    "of iterations": (
        f"{test_captured_iterations.LAYOUT} {test_captured_iterations.CAPACITY} --moe-paged-stash "
        f"{test_captured_iterations.ITERATIONS} --train-iters 4"
    ),
}


@pytest.mark.parametrize("graphs", GRAPHS)
def test_graphs_are_switched_off_once_for_all_balancers(model_of, tmp_path, graphs):
    """Megatron-LM reads all micro-batches ahead where an iteration may run again."""
    model, balanced = model_of(test_captured_iterations.MODEL), f"{CP2} --balance-experts --balance-report {tmp_path}"
    argv = model.argv(f"{PACKED} {GRAPHS[graphs]} {balanced}")
    results = model.pool.run(2, test_captured_iterations._train, argv)
    assert all(not seen["graphs"] for _, seen in results)
    told = [line for output in model.pool.output for line in output.splitlines() if line.startswith("> --")]
    (line,) = [line for line in told if "graph" in line or "moe_preprocess" in line]
    assert line.startswith("> --balance-sequences switches --cuda-graph-impl") and "the host launches" in line
    assert_close(join([run for run, _ in results]), model.alone(f"{PACKED} --moe-grouped-gemm"), 1e-5, 1e-4)


def test_hybridep_gets_as_many_tokens_from_each_rank():
    flags = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}
    args = argparse.Namespace(pipeline_model_parallel_size=1, num_experts=4, **flags)
    assert "--moe-flex-dispatcher-backend hybridep needs the same number of tokens" in (why_of_one_size(args) or "")
    args.moe_hybridep_pad_uneven_dispatch_inputs = True
    assert why_of_one_size(args) is None
