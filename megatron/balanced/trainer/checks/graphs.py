"""CUDA graphs that are captured again after a plan has changed, or by other means: rules for all balancers."""

import argparse
from typing import Any

__all__ = ["captured_again", "graph_modules", "map_local_graphs", "names_of"]

_INTERVAL = 100  # iterations between plans, if the given interval is too short for the graph to be replayed


def graph_modules(args: argparse.Namespace) -> tuple[str, list[Any]]:
    """The argument that names the captured modules, and its value."""
    for name in ("cuda_graph_modules", "cuda_graph_scope_deprecated"):
        if given := getattr(args, name, None):
            return name, list(given)
    return "cuda_graph_modules", []


def names_of(modules: list[Any]) -> list[str]:
    return [module if isinstance(module, str) else module.name for module in modules]


def captured_again(args: argparse.Namespace, interval: int) -> tuple[int, str]:
    """Of a graph of iterations: how many iterations a plan stays at least, and a clause for the user that says what a
    change costs. interval: the given number."""
    without = 1 + args.cuda_graph_warmup_steps  # 1: the iteration that captures
    cost = f"{without} iterations run without the graph, and the last of them captures it again"
    return interval if interval > without else max(_INTERVAL, 10 * without), cost


def map_local_graphs(args: argparse.Namespace, given: str, why: str) -> list[str]:
    """Let Transformer Engine capture what Megatron-LM's own graphs would, without experts; without Transformer Engine
    nothing is captured. Returns a note for the user if there were such graphs.

    given: the flag of the balancer. why: what is wrong with these graphs.
    """
    if getattr(args, "cuda_graph_impl", "none") != "local":
        return []
    argument, modules = graph_modules(args)
    if args.transformer_impl != "transformer_engine":
        args.cuda_graph_impl = "none"
        setattr(args, argument, [])
        return [f"{given} switches --cuda-graph-impl local off: {why}"]
    from megatron.core.transformer.enums import CudaGraphModule

    kept = [module for module in modules if not names_of([module])[0].startswith(("full", "moe_preprocess"))]
    kept = [CudaGraphModule.moe_router if names_of([module])[0] == "moe" else module for module in kept]
    whole = ["attn", *["mamba"] * bool(args.hybrid_layer_pattern), "moe_router" if args.num_experts else "mlp"]
    kept = list(dict.fromkeys(kept)) or [CudaGraphModule[name] for name in whole]
    setattr(args, argument, kept)
    args.cuda_graph_impl = "transformer_engine"
    return [
        f"{given} uses --cuda-graph-impl transformer_engine --cuda-graph-modules {' '.join(names_of(kept))} in "
        f"the place of --cuda-graph-impl local: {why}"
    ]
