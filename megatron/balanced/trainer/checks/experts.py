"""Checks of the flags of expert balancing, at start-up.

Megatron-LM's own modules and dispatchers run the replicas. Flags that replace these, or that reduce an expert's
gradient before those of its replicas were added, would give wrong numbers or a hang, so they are refused
(`megatron.balanced.shared.incompatible`).
"""

import argparse
import dataclasses

from balancing.experts.config import ExpertConfig
from balancing.experts.split.placed_split import MOST_RANKS
from megatron.balanced.shared.captured_schedule import captures_iterations
from megatron.balanced.shared.incompatible import EXPERTS, LATE, OWN_EXPERTS, check_compatible, shown, switch_off
from megatron.balanced.trainer.checks.graphs import captured_again, graph_modules, map_local_graphs, names_of
from megatron.balanced.trainer.dry_run import assumes_gpus
from megatron.balanced.trainer.prediction import note_on_experts

__all__ = [
    "captures_experts",
    "check_experts",
    "leave_out_preprocessing",
    "with_captured_iterations",
]

_WHY_NO_GRAPH = "a graph would repeat the routing of the captured micro-batch"
_USE_GRAPHS_OF = "use --cuda-graph-modules attn moe_router"


def check_experts(args: argparse.Namespace, experts: ExpertConfig) -> tuple[ExpertConfig, list[str]]:
    """Return the settings of expert balancing in force, and notes for the user, one line each.

    Called before Megatron validates `args`. Balancing is switched off where there is nothing to balance. Raises
    ValueError for flags that cannot work.
    """
    _check_numbers(args)
    _check_fusions(args)
    _check_flex(args)
    _check_latent(args)
    if not experts.enabled:
        return experts, []
    if why := _nothing_to_balance(args):
        return dataclasses.replace(experts, enabled=False), [f"--balance-experts has nothing to balance: {why}"]
    asked, experts = experts, experts.fitted(args.num_experts, args.expert_model_parallel_size)
    notes = []
    if experts.replica_slots != asked.replica_slots:
        notes.append(
            f"--balance-experts sets --expert-replica-slots {experts.replica_slots}: --num-experts {args.num_experts} "
            f"over --expert-model-parallel-size {args.expert_model_parallel_size} leave no more on other ranks"
        )
    grouped = args.transformer_impl != "local" and args.moe_grouped_gemm
    features = (EXPERTS,) if grouped else (EXPERTS, OWN_EXPERTS)
    check_compatible(args, features, "--balance-experts", captures_experts(args))
    if experts.late_slots:
        check_compatible(args, LATE, f"experts.late_slots {experts.late_slots}")
    notes += map_local_graphs(args, "--balance-experts", _WHY_NO_GRAPH)
    notes += leave_out_preprocessing(args)
    if captures_iterations(args):
        experts, more = with_captured_iterations(args, experts)
        notes += more
    notes += switch_off(args, EXPERTS, "--balance-experts")
    notes += note_on_experts(args)
    if args.transformer_impl == "local" and args.moe_grouped_gemm:
        notes.append(
            "--moe-grouped-gemm without Transformer Engine's layers: experts are grouped by PyTorch's product where "
            f'experts.gemm chooses it ("{experts.gemm}" is given)'
        )
    if args.transformer_impl != "local" and not args.moe_grouped_gemm:
        notes.append(
            "--balance-experts runs experts on Megatron-LM's own linear layers instead of Transformer Engine's; with "
            "--moe-grouped-gemm it uses Transformer Engine's"
        )
    return experts, notes


def _check_numbers(args: argparse.Namespace) -> None:
    experts, ranks = args.num_experts, args.expert_model_parallel_size
    if ranks > 1 and not experts:
        raise ValueError(f"--expert-model-parallel-size {ranks} needs --num-experts, which is not given")
    if experts and experts % ranks:
        raise ValueError(
            f"--num-experts {experts} is not a multiple of --expert-model-parallel-size {ranks}; "
            f"use {-(-experts // ranks) * ranks} experts, or a size that divides {experts}"
        )


def _check_fusions(args: argparse.Namespace) -> None:
    from megatron.core.transformer.moe import moe_utils

    needs = {"moe_permute_fusion": "fused_permute_with_probs", "moe_router_fusion": "fused_topk_with_score_function"}
    for flag, function in needs.items():
        if getattr(args, flag) and getattr(moe_utils, function) is None:
            raise ValueError(
                f"{shown(flag, True)} needs Transformer Engine, which is not installed or too old; drop it"
            )


def _check_latent(args: argparse.Namespace) -> None:
    """Check that there are linear layers for the projections around latent experts."""
    from megatron.core.transformer.moe import moe_layer

    if args.moe_latent_size and not moe_layer.HAVE_TE and not assumes_gpus():
        raise ValueError(
            f"--moe-latent-size {args.moe_latent_size} needs Transformer Engine's linear layers, and it is not "
            "installed; drop it"
        )


def _check_flex(args: argparse.Namespace) -> None:
    """Check that the package of the chosen backend of the flex dispatcher can be imported."""
    from megatron.core.transformer.moe import fused_a2a

    packages = {
        "deepep": ("fused_dispatch", "DeepEP (the package deep_ep)"),
        "hybridep": ("hybrid_ep_dispatch", "HybridEP (the package deep_ep of DeepEP's branch hybrid-ep)"),
        "ncclep": ("nccl_ep_dispatch", "a Transformer Engine that was built with NCCL EP"),
    }
    if args.moe_token_dispatcher_type != "flex" or assumes_gpus():
        return
    function, package = packages[args.moe_flex_dispatcher_backend]
    if getattr(fused_a2a, function) is None:
        raise ValueError(
            f"--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend {args.moe_flex_dispatcher_backend} needs "
            f"{package}, which is not installed; install it, or use --moe-token-dispatcher-type alltoall"
        )


def _nothing_to_balance(args: argparse.Namespace) -> str | None:
    if args.skip_train:
        return "--skip-train trains no step"
    if not args.num_experts:
        return "the model has no experts (--num-experts)"
    if args.expert_model_parallel_size == 1:
        return "with --expert-model-parallel-size 1 every rank has all experts"
    return None


def captures_experts(args: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Flags that would put experts into a CUDA graph: the flag as the user gave it, reason, way out."""
    if getattr(args, "cuda_graph_impl", "none") == "local":
        return []  # `map_local_graphs` leaves experts out
    _, modules = graph_modules(args)
    names = names_of(modules)
    captured = [name for name in names if name.startswith("full") or name == "moe"]
    if captured:
        return [(f"--cuda-graph-modules {name}", _WHY_NO_GRAPH, _USE_GRAPHS_OF) for name in captured]
    graphs = getattr(args, "cuda_graph_impl", "none") == "transformer_engine"
    if not names and (graphs or getattr(args, "external_cuda_graph", False)):
        return [("CUDA graphs of whole layers", _WHY_NO_GRAPH, _USE_GRAPHS_OF)]
    return []


def leave_out_preprocessing(args: argparse.Namespace) -> list[str]:
    """Remove `moe_preprocess` from the modules to capture. Returns a note for the user if it was one of them."""
    argument, modules = graph_modules(args)
    names = names_of(modules)
    if "moe_preprocess" not in names:
        return []
    setattr(args, argument, [module for module, name in zip(modules, names, strict=True) if name != "moe_preprocess"])
    return ["--balance-experts leaves moe_preprocess out of CUDA graphs: tokens are assigned to replicas there"]


def with_captured_iterations(args: argparse.Namespace, config: ExpertConfig) -> tuple[ExpertConfig, list[str]]:
    """The settings for CUDA graphs of whole iterations, and notes for the user.

    Raises ValueError if the host decides on experts during a forward pass, or when to place replicas.
    """
    flag = f"--cuda-graph-impl {args.cuda_graph_impl}"
    budget, fuser = args.moe_expert_rank_capacity_factor, args.use_transformer_engine_op_fuser
    hybridep = args.moe_token_dispatcher_type == "flex" and args.moe_flex_dispatcher_backend == "hybridep"
    if not (hybridep and budget and fuser and args.moe_grouped_gemm and args.transformer_impl != "local"):
        raise ValueError(
            f"--balance-experts is incompatible with {flag} where the host reads how many tokens experts get; add "
            "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep "
            "--moe-expert-rank-capacity-factor 1.5 --moe-grouped-gemm --use-transformer-engine-op-fuser, or use "
            "--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router"
        )
    if getattr(args, "moe_enable_routing_replay", False):
        raise ValueError(
            f"--balance-experts is incompatible with {flag} and --moe-enable-routing-replay: with known routing, "
            "replicas are placed in each iteration, but a graph repeats the placement that it captured; use "
            "--cuda-graph-impl none"
        )
    if args.expert_model_parallel_size > MOST_RANKS or config.planner == "prophet":
        raise ValueError(
            f"--balance-experts is incompatible with {flag} where the host divides tokens over instances: with "
            f"--expert-model-parallel-size {args.expert_model_parallel_size} above {MOST_RANKS}, and with "
            "experts.planner prophet; use --cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router"
        )
    interval, after = captured_again(args, config.plan_interval)
    note = (
        f"--balance-experts with {flag} places replicas after the first iteration and every {interval} iterations "
        f"(experts.plan_interval); after a change {after}"
    )
    return dataclasses.replace(config, plan_interval=interval), [note]
