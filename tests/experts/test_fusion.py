"""Fused gradient accumulation, Megatron-LM's default where Apex is installed, with replicas of experts.

Apex's kernel is stood in for by what it computes, so that the paths around it are those of a GPU.
"""

import json
from types import SimpleNamespace
from typing import Any

from tests.support.training import MOCK_DATA, MODEL, RankRun, assert_same, join, train_rank

BASE = (
    "--swiglu --disable-bias-linear --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32 "
    "--moe-shared-expert-intermediate-size 32 --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 "
    "--num-layers 2 --global-batch-size 4 --train-iters 8 --overlap-grad-reduce "
    # Tied, the output layer's gradient and the embedding's are added in another order where one is fused.
    "--untie-embeddings-and-output-weights"
).split()


def accumulate_fused() -> list[int]:
    """From now on this rank is on a machine with Apex. Returns a list of one number, how often the kernel ran."""
    from megatron.core.tensor_parallel import layers

    from megatron.balanced.trainer import arguments

    ran = [0]

    def accumulate(rows: Any, gradient: Any, total: Any) -> None:
        ran[0] += 1
        total.add_(gradient.t().matmul(rows))

    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
    layers._grad_accum_fusion_available = True
    of_this_host = arguments._defaults_of_this_host
    arguments._defaults_of_this_host = lambda: of_this_host() | {"gradient_accumulation_fusion": True}
    return ran


def _train_fused(argv: list[str]) -> tuple[RankRun, dict[str, bool], int]:
    """Train this rank as on a machine with Apex: the run, which linear layers fuse, and how often the kernel ran."""
    from megatron.training import training

    ran, fuses = accumulate_fused(), {}
    build = training.setup_model_and_optimizer

    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        built = build(*args, **kwargs)
        for name, module in built[0][0].named_modules():
            if hasattr(module, "gradient_accumulation_fusion"):
                fuses[name] = module.gradient_accumulation_fusion
        return built

    training.setup_model_and_optimizer = setup_model_and_optimizer
    return train_rank(argv, True), fuses, ran[0]


def test_all_but_experts_with_replicas_accumulate_fused(pool, tmp_path):
    """Layers fuse but those experts, and every number is that of the run without fusion, bit for bit."""
    argv = [*MODEL, *MOCK_DATA, *BASE, "--balance-experts", "--balance-report", str(tmp_path)]
    ranks = pool.run(2, _train_fused, argv)
    moves = [json.loads(line)["action"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert moves.count("replicate") > 4, "hardly anything was replicated, so nothing was tested"
    for _, fuses, ran in ranks:
        replicated = {name for name in fuses if ".local_experts." in name}
        assert len(replicated) == 2 * 4 * 2  # layers, experts of a rank, products
        assert {name for name, fused in fuses.items() if not fused} == replicated
        assert any("shared_experts" in name for name in fuses)
        others = len(fuses) - len(replicated)
        assert ran == others * 2 * 8  # micro-batches, iterations
    assert_same(join([run for run, _, _ in ranks]), join(pool.run(2, train_rank, argv, True)))
