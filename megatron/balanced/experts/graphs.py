"""What CUDA graphs may hold beside replicas of experts.

A graph repeats the kernels that it captured, on the same addresses and shapes and without any Python. With
`--cuda-graph-impl transformer_engine`, attention, dense layers and routers can be part of one. Everything behind the
router cannot: each micro-batch is split anew over the instances of its experts, the host plans from its load, and
transfers of replicas start there.

With `--cuda-graph-impl full_iteration` one graph holds all forward and backward passes of an iteration. The split of
each micro-batch is part of it, since it is computed on the device, and so are the transfers of replicas. The placement
is not: it is one of the host's decisions that the graph repeats. So it changes every plan_interval iterations,
and the graph is captured again if it did. Late replicas, which follow from the load of one micro-batch, there are none.
Megatron-LM runs --cuda-graph-warmup-steps iterations without a graph before a capture; that is what a change costs.
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from balancing.experts.config import ExpertConfig
from balancing.experts.split.placed_split import MOST_RANKS, kernels_split

__all__ = [
    "captures_experts",
    "captures_iterations",
    "check_kernels",
    "graph_of_iterations",
    "leave_out_preprocessing",
    "with_captured_iterations",
]

_INTERVAL = 100  # iterations between placements, where the given interval leaves no iteration to the graph

_WHY = "a graph would repeat where the tokens of the captured micro-batch went"
_INSTEAD = "use --cuda-graph-modules attn moe_router"


def _modules(args: argparse.Namespace) -> tuple[str, list[Any]]:
    """The argument that names the captured modules, and its value."""
    for name in ("cuda_graph_modules", "cuda_graph_scope_deprecated"):
        if given := getattr(args, name, None):
            return name, list(given)
    return "cuda_graph_modules", []


def _named(modules: list[Any]) -> list[str]:
    return [module if isinstance(module, str) else module.name for module in modules]


def captures_experts(args: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Flags by which a graph would hold experts, each as the user gave it, with why not and the way out."""
    _, modules = _modules(args)
    names = _named(modules)
    found = [name for name in names if name.startswith("full") or name == "moe"]
    if found:
        return [(f"--cuda-graph-modules {name}", _WHY, _INSTEAD) for name in found]
    graphs = getattr(args, "cuda_graph_impl", "none") == "transformer_engine"
    if not names and (graphs or getattr(args, "external_cuda_graph", False)):
        return [("CUDA graphs of whole layers", _WHY, _INSTEAD)]
    return []


def leave_out_preprocessing(args: argparse.Namespace) -> list[str]:
    """Take `moe_preprocess` out of the modules that graphs hold. Returns a note for the user if it was one of them."""
    argument, modules = _modules(args)
    names = _named(modules)
    if "moe_preprocess" not in names:
        return []
    setattr(args, argument, [module for module, name in zip(modules, names, strict=True) if name != "moe_preprocess"])
    return ["--balance-experts leaves moe_preprocess out of CUDA graphs: it decides there where tokens go"]


def captures_iterations(args: argparse.Namespace) -> bool:
    """Whether one graph holds all passes of an iteration."""
    return getattr(args, "cuda_graph_impl", "none") == "full_iteration"


def with_captured_iterations(args: argparse.Namespace, config: ExpertConfig) -> tuple[ExpertConfig, list[str]]:
    """The settings with graphs of whole iterations, and notes for the user.

    Raises ValueError where the host decides about experts in a forward pass, or when to place replicas.
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
            f"--balance-experts is incompatible with {flag} and --moe-enable-routing-replay: known routing places "
            "replicas in each iteration, and a graph repeats the placement that it captured; use --cuda-graph-impl none"
        )
    if args.expert_model_parallel_size > MOST_RANKS or config.planner == "prophet":
        raise ValueError(
            f"--balance-experts is incompatible with {flag} where the host divides tokens over instances: with "
            f"--expert-model-parallel-size {args.expert_model_parallel_size} above {MOST_RANKS}, and with "
            "experts.planner prophet; use --cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router"
        )
    notes = []
    without = 1 + args.cuda_graph_warmup_steps  # that which captures runs once more
    if config.plan_interval <= without:
        config = dataclasses.replace(config, plan_interval=max(_INTERVAL, 10 * without))
    notes.append(
        f"--balance-experts with {flag} places replicas after the first iteration and every "
        f"{config.plan_interval} iterations (experts.plan_interval); a change costs {without} iterations "
        "without a replay, of which the last captures"
    )
    return config, notes


def check_kernels(layers: Iterable[Any]) -> None:
    """Raise ValueError where the host would divide the tokens of a layer, and a graph of iterations could not.

    layers: MoE layers with replicas (`BalancedMoELayer`), complete and on their device.
    """
    if not all(kernels_split(layer.placement, layer.device) for layer in layers):
        raise ValueError(
            "--balance-experts is incompatible with --cuda-graph-impl full_iteration where Triton's kernels, which "
            "divide tokens on the GPU, do not work (a warning says why); use --cuda-graph-impl none"
        )


def graph_of_iterations(schedule: Any, before: Callable[[], None]) -> Any:
    """Megatron-LM's `FullCudaGraphWrapper`, which captures and replays whole iterations, and from now on calls `before`
    at the beginning of what it captures or runs without a graph.

    schedule: the schedule of micro-batches in Megatron-LM's wrappers, of which one captures.
    """
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper  # with torch's device, which flags choose

    while not isinstance(schedule, FullCudaGraphWrapper):
        schedule = schedule.forward_backward_func
    run = schedule.forward_backward_func

    def forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        before()
        return run(*args, **kwargs)

    schedule.forward_backward_func = forward_backward_func
    return schedule
