"""Rejected flags of balanced experts: one line with the value and the way out, on all ranks."""

import argparse
import contextlib
import enum
import io
from types import SimpleNamespace
from typing import Any

import pytest

from balancing.experts import ReplicaPlacement
from balancing.experts.config import ExpertConfig
from megatron.balanced.experts.graphs import check_kernels
from megatron.balanced.trainer.checks.experts import (
    captures_experts,
    check_experts,
    leave_out_preprocessing,
    with_captured_iterations,
)
from megatron.balanced.trainer.checks.graphs import map_local_graphs
from tests.support.refusals import assert_accepted, assert_refused
from tests.support.settings import settings
from tests.support.training import EXACT, MOCK_DATA, MODEL, train

EXPERTS = (
    "--swiglu --disable-bias-linear --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --num-layers 2 "
    "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --train-iters 3"
).split()
BASE = [*MODEL, *MOCK_DATA, *EXPERTS]
BALANCE = "--balance-experts"

# flags, and the words that the line must have: the value, and the way out
REFUSED = {
    "no experts": ("--num-experts 0", "--expert-model-parallel-size 2", "--num-experts"),
    "experts over ranks": ("--num-experts 5", "--num-experts 5", "--expert-model-parallel-size 2", "use 6"),
    "HybridEP": (
        f"{BALANCE} --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep",
        "--moe-flex-dispatcher-backend hybridep",
        "hybrid-ep",
        "--moe-token-dispatcher-type alltoall",
    ),
    "latent experts": ("--moe-latent-size 16", "--moe-latent-size 16", "Transformer Engine", "drop it"),
    "permute fusion": ("--moe-permute-fusion", "--moe-permute-fusion", "Transformer Engine", "drop it"),
    "router fusion": ("--moe-router-fusion", "--moe-router-fusion", "Transformer Engine", "drop it"),
    "FSDP": (f"{BALANCE} --use-megatron-fsdp", "--use-megatron-fsdp", "--use-distributed-optimizer"),
    "slots": (f"{BALANCE} --expert-replica-slots -1", "--expert-replica-slots -1", "at least 0"),
    "more slots than experts": (f"{BALANCE} --expert-replica-slots 3", "--expert-replica-slots 3", "use at most 2"),
    "planner": (f"{BALANCE} {settings('experts', planner='best')}", "experts.planner best", "quota"),
    "mode": (f"{BALANCE} {settings('experts', replica_mode='mixed')}", "experts.replica_mode mixed", "resident"),
    "plan interval": (f"{BALANCE} {settings('experts', plan_interval=0)}", "experts.plan_interval 0", "at least 1"),
    "gain": (f"{BALANCE} {settings('experts', min_gain=1.5)}", "experts.min_gain 1.5", "below 1"),
    "slots of no balancer": ("--expert-replica-slots 2", "--expert-replica-slots 2 does nothing", "--balance-experts"),
    "settings of no balancer": (
        settings("experts", min_gain=0.1),
        "experts.min_gain 0.1 does nothing without --balance-experts",
    ),
    "products": (f"{BALANCE} {settings('experts', gemm='fast')}", "experts.gemm fast", "auto, megatron, torch"),
    "latent attention with a norm of queries alone": (
        "--multi-latent-attention --qk-layernorm",
        "--qk-layernorm",
        "Transformer Engine",
        "give --q-lora-rank",
    ),
    "graphs of the iteration": (
        f"{BALANCE} --cuda-graph-impl full_iteration",
        "--cuda-graph-impl full_iteration",
        "--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router",
    ),
    "graphs of the iteration, by its old name": (
        f"{BALANCE} --cuda-graph-scope full_iteration",
        "--cuda-graph-impl full_iteration",
        "--cuda-graph-modules attn moe_router",
    ),
    "graphs of whole layers": (
        f"{BALANCE} --cuda-graph-impl transformer_engine",
        "whole layers",
        "--cuda-graph-modules attn moe_router",
    ),
    "graphs of experts": (
        f"{BALANCE} --external-cuda-graph --cuda-graph-modules attn moe",
        "--cuda-graph-modules moe",
        "--cuda-graph-modules attn moe_router",
    ),
}


def test_refused(pool):
    assert_refused(pool, BASE, REFUSED)


def test_layers_of_transformer_engine():
    """Sequential experts are replaced, with a note, grouped ones are not; no other option has to be switched off."""
    args = argparse.Namespace(
        transformer_impl="transformer_engine",
        num_experts=4,
        expert_model_parallel_size=2,
        moe_grouped_gemm=False,
        moe_token_dispatcher_type="alltoall",
        moe_permute_fusion=False,
        moe_latent_size=None,
        moe_router_fusion=False,
        mtp_num_layers=None,
        skip_train=False,
        gradient_accumulation_fusion=True,
    )
    _, (note,) = check_experts(args, ExpertConfig(enabled=True))
    assert "instead of Transformer Engine's" in note
    args.moe_grouped_gemm = args.add_bias_linear = True
    assert check_experts(args, ExpertConfig(enabled=True))[1] == []
    args.transformer_impl = "local"
    _, (note,) = check_experts(args, ExpertConfig(enabled=True))
    assert "experts are grouped by PyTorch's product where experts.gemm chooses it" in note


def test_preprocessing_is_left_out_of_graphs():
    modules = enum.Enum("Modules", "attn moe_router moe_preprocess")
    graphs = [modules.attn, modules.moe_router, modules.moe_preprocess]
    args = argparse.Namespace(
        cuda_graph_impl="transformer_engine", cuda_graph_modules=graphs, external_cuda_graph=False
    )
    assert captures_experts(args) == []
    (note,) = leave_out_preprocessing(args)
    assert "leaves moe_preprocess out" in note
    assert args.cuda_graph_modules == graphs[:2]
    assert leave_out_preprocessing(args) == []


LOCAL_GRAPHS = {
    "whole layers": ([], "attn moe_router"),
    "whole layers of a hybrid model": ([], "attn mamba moe_router"),
    "experts": (["attn", "moe"], "attn moe_router"),
    "preprocessing": (["moe_router", "moe_preprocess"], "moe_router"),
    "whole dense layers": ([], "attn mlp"),
}


def _map(modules: list[str], impl: str, pattern: str | None, experts: int = 8) -> tuple[str, list[str], str]:
    from megatron.core.transformer.enums import CudaGraphModule

    args = argparse.Namespace(
        cuda_graph_impl="local",
        cuda_graph_modules=[CudaGraphModule[name] for name in modules],
        transformer_impl=impl,
        hybrid_layer_pattern=pattern,
        num_experts=experts,
    )
    assert captures_experts(args) == []
    (note,) = map_local_graphs(args, BALANCE, "why")
    assert map_local_graphs(args, BALANCE, "why") == []
    return args.cuda_graph_impl, [module.name for module in args.cuda_graph_modules], note


@pytest.mark.parametrize("case", LOCAL_GRAPHS)
def test_local_graphs_leave_experts_out(pool, case):
    modules, kept = LOCAL_GRAPHS[case]
    pattern, experts = "M*E" if "hybrid" in case else None, 0 if "dense" in case else 8
    ((graphs, left, note),) = pool.run(1, _map, modules, "transformer_engine", pattern, experts)
    assert graphs == "transformer_engine" and left == kept.split()
    assert f"--cuda-graph-modules {kept} in the place of --cuda-graph-impl local" in note


def test_local_graphs_need_transformer_engine(pool):
    """Without it nothing is captured, and a line says so."""
    assert_accepted(pool, BASE, [f"{BALANCE} --cuda-graph-impl local"])
    ((graphs, _, note),) = pool.run(1, _map, ["attn"], "local", None)
    assert graphs == "none" and "switches --cuda-graph-impl local off" in note


def _settled(impl: str, scope: str) -> tuple[str, list[object]]:
    from megatron.balanced.trainer.checks.model import settle_graphs

    args = argparse.Namespace(cuda_graph_impl=impl, cuda_graph_modules=[], cuda_graph_scope_deprecated=[scope])
    settle_graphs(args)
    return args.cuda_graph_impl, args.cuda_graph_scope_deprecated


def test_old_names_of_graphs_of_iterations(pool):
    for impl in ("none", "local"):  # Megatron-LM captures with either
        assert pool.run(1, _settled, impl, "full_iteration") == [("full_iteration", [])]
        assert pool.run(1, _settled, impl, "attn") == [(impl, ["attn"])]


def _captured(interval: int, **changes: Any) -> tuple[ExpertConfig, list[str]]:
    args = argparse.Namespace(
        cuda_graph_impl="full_iteration",
        cuda_graph_warmup_steps=3,
        transformer_impl="transformer_engine",
        moe_grouped_gemm=True,
        moe_token_dispatcher_type="flex",
        moe_flex_dispatcher_backend="hybridep",
        moe_expert_rank_capacity_factor=1.5,
        use_transformer_engine_op_fuser=True,
        expert_model_parallel_size=64,
    )
    vars(args).update(changes)
    return with_captured_iterations(args, ExpertConfig(enabled=True, plan_interval=interval))


def test_placements_change_seldom_where_iterations_are_captured():
    config, (note,) = _captured(1)
    assert config.plan_interval == 100
    assert "every 100 iterations" in note and "after a change 4 iterations run" in note
    assert _captured(5)[0].plan_interval == 5
    assert _captured(4)[0].plan_interval == 100  # no iteration would be replayed
    assert _captured(1, cuda_graph_warmup_steps=20)[0].plan_interval == 210


@pytest.mark.parametrize(
    "interval, changes, words",
    [
        (100, {"moe_enable_routing_replay": True}, ("--moe-enable-routing-replay", "use --cuda-graph-impl none")),
        (100, {"expert_model_parallel_size": 160}, ("--expert-model-parallel-size 160 above 128", "use --cuda-graph")),
        (100, {"use_transformer_engine_op_fuser": False}, ("--use-transformer-engine-op-fuser", "reads")),
        (100, {"moe_expert_rank_capacity_factor": None}, ("--moe-expert-rank-capacity-factor 1.5", "reads")),
        (100, {"moe_flex_dispatcher_backend": "deepep"}, ("--moe-flex-dispatcher-backend hybridep", "reads")),
    ],
)
def test_what_graphs_of_iterations_cannot_have(interval, changes, words):
    with pytest.raises(ValueError) as refusal:
        _captured(interval, **changes)
    assert "\n" not in str(refusal.value)
    for word in words:
        assert word in str(refusal.value)


def test_a_graph_of_iterations_needs_kernels_that_split():
    layer = SimpleNamespace(placement=ReplicaPlacement([0, 1], [[1], [0]]), device=None)
    with pytest.raises(ValueError, match=r"Triton's kernels.*use --cuda-graph-impl none"):
        check_kernels([layer])


def test_the_same_flags_without_the_fault_are_accepted(pool):
    assert_accepted(pool, BASE, [BALANCE, "--moe-grouped-gemm", f"{BALANCE} --bf16"])


# ranks, flags, and why there is nothing to balance
NOTHING = {
    "EP 1": (2, [*EXPERTS, "--expert-model-parallel-size", "1"], "--expert-model-parallel-size 1"),
    "dense": (1, ["--num-layers", "2", "--train-iters", "3"], "no experts"),
}


@pytest.mark.parametrize("case", NOTHING)
def test_nothing_to_balance_is_said_and_runs(pool, case):
    ranks, flags, why = NOTHING[case]
    base = [*MODEL, *MOCK_DATA, *flags]
    run = train(pool, ranks, BALANCE, base=base)
    told = [line for output in pool.output for line in output.splitlines() if "nothing to balance" in line]
    assert len(told) == 1
    assert why in told[0]
    assert run.losses == train(pool, ranks, base=base).losses
    assert len(run.losses) == 3


def test_experts_of_a_repeated_prediction_layer_are_left_out(pool):
    """They run unbalanced, with a note, and no number changes."""
    base = [*BASE, *EXACT, "--mtp-num-layers", "2", "--mtp-use-repeated-layer"]
    balanced = train(pool, 2, BALANCE, base=base)
    assert sum("leaves out the experts of --mtp-use-repeated-layer" in output for output in pool.output) == 1
    reference = train(pool, 2, base=base)
    assert max(abs(a - b) / b for a, b in zip(balanced.losses, reference.losses, strict=True)) <= 1e-12


def _start(argv: list[str], free: dict[int, int]) -> tuple[object, str]:
    """Start training on this rank with `free` bytes of memory, where given. Returns the exit code and stderr."""
    import os

    import torch

    from megatron.balanced.trainer.arguments import parse_arguments

    rank = int(os.environ["RANK"])
    if rank in free:
        torch.cuda.mem_get_info = lambda device=None: (free[rank], 2 * free[rank])
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        try:
            args, config = parse_arguments(argv)

            from megatron.balanced.trainer.train import train

            train(args, config)
        except SystemExit as stop:
            return stop.code, stderr.getvalue()
    return "none", stderr.getvalue()


def _assert_ends(pool, argv: list[str], free: dict[int, int], *words: str) -> None:
    (code, said), (other_code, other_said) = pool.run(2, _start, argv, free)
    assert (code, other_code) == (2, 2), said
    lines = [line for line in (said + other_said).splitlines() if "error" in line]
    assert len(lines) == 1, lines
    assert lines[0].startswith("pretrain_gpt.py: error: ")
    assert "Traceback" not in said + other_said
    for word in words:
        assert word in lines[0], lines[0]


def test_slots_that_do_not_fit(pool):
    """On one rank alone: all stop together. A slot of these experts takes 36,864 bytes a layer with its gradient."""
    argv = [*BASE, BALANCE, "--num-experts", "14", "--expert-replica-slots", "7"]
    resident = [*argv, *settings("experts", replica_mode="resident").split()]
    # The ranks of this machine share its memory, so that half of it is a rank's. Adam will want some 0.6 MiB.
    words = ["--expert-replica-slots 7", "0.5 MiB", "0.3 MiB", "4 would fit", "experts.replica_mode shared"]
    _assert_ends(pool, resident, {1: 2 * 970_000}, *words)
    _assert_ends(pool, argv, {0: 2 * 1_000}, "--expert-replica-slots 7", "0 would fit")


def test_what_megatron_finds_wrong_with_the_model(pool):
    _assert_ends(pool, [*BASE, BALANCE, "--moe-router-topk", "1"], {}, "--moe-router-pre-softmax")
