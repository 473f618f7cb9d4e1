"""What CUDA graphs may hold beside replicas of experts (`--cuda-graph-impl transformer_engine`).

A graph repeats the kernels that it captured, on the same addresses and shapes and without any Python. Attention, dense
layers and routers can be part of one. Everything behind the router cannot: each micro-batch is split anew over the
instances of its experts, the host plans from its load, and transfers of replicas start there.
"""

import argparse
from typing import Any

__all__ = ["captures_experts", "leave_out_preprocessing"]

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
