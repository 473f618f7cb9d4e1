"""Twins of modules: the same modules, with other parameters or further experts.

A twin shares everything with its module but the attributes that differ. So what a loop has done to the module holds for
the twin, and what is no parameter of the model is none of the twin's.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.experts import TEGroupedMLP

from megatron.balanced.experts.parameters import is_grouped_linear, is_packed

__all__ = ["pack", "twin_of", "with_further_experts"]


def twin_of[Module: torch.nn.Module](module: Module, **changes: Any) -> Module:
    """A module that shares the parameters, hooks and submodules of `module`, but for attributes that differ."""
    twin: Module = object.__new__(type(module))
    twin.__dict__.update(module.__dict__, **changes)
    twin.__dict__.pop("_compiled_call_impl", None)  # which has the parameters of `module`
    return twin


def with_further_experts(experts: Any, replicas: Sequence[Sequence[torch.Tensor]]) -> Any:
    """A twin of the experts of an MoE layer with further experts.

    replicas: [further expert] -> its parameters, in the order of `home_parameters`.
    """
    if isinstance(experts, TEGroupedMLP):
        return _with_further_weights(experts, replicas)
    homes, own = list(experts.local_experts), list(experts.local_experts[0].parameters())
    further = [_with_parameters(homes[0], dict(zip(own, replica, strict=True))) for replica in replicas]
    by_place = {str(place): expert for place, expert in enumerate([*homes, *further])}
    modules = experts._modules | {"local_experts": twin_of(experts.local_experts, _modules=by_place)}
    return twin_of(experts, _modules=modules, num_local_experts=len(by_place))


def _with_parameters(module: torch.nn.Module, of_replica: dict[Any, torch.Tensor]) -> Any:
    """A twin of `module` and its submodules with other parameters. of_replica: parameter -> the one in its place."""
    parameters = {name: None if own is None else of_replica[own] for name, own in module._parameters.items()}
    modules = {
        name: None if own is None else _with_parameters(own, of_replica) for name, own in module._modules.items()
    }
    return twin_of(module, _parameters=parameters, _modules=modules)


def _with_further_weights(experts: TEGroupedMLP, replicas: Sequence[Sequence[torch.Tensor]]) -> Any:
    """A twin of grouped experts whose linear layers, and adapters of these, have the parameters of `replicas` too."""
    total = experts.num_local_experts + len(replicas)
    parts = [iter(replica) for replica in replicas]  # in the order of `home_parameters`
    pairs: list[tuple[Any, Any]] = []  # of modules and their twins

    def extend(module: Any) -> Any:
        changes: dict[str, Any] = {}
        if is_grouped_linear(module):
            for place, replica in enumerate(parts, experts.num_local_experts):
                changes[f"weight{place}"] = next(replica)
                changes[f"bias{place}"] = next(replica) if module.use_bias else module.bias0
            changes |= {
                "num_gemms": total,
                # Quantizers are made for each weight, at the first use.
                "fp8_initialized": False,
                "fp8_meta_tensors_initialized": False,
                "fp8_meta": {"fp8_checkpoint": False, "fp8_group": None},
                "quantizers": {"scaling_fwd": [], "scaling_bwd": []},
            }
        elif is_packed(module):
            changes = {"_parameters": {}, "further": [next(replica) for replica in parts]}
        if "num_local_experts" in vars(module):
            changes["num_local_experts"] = total
        submodules = {name: None if own is None else extend(own) for name, own in module._modules.items()}
        pairs.append((module, twin_of(module, _modules=submodules, **changes)))
        return pairs[-1][1]

    modules = dict(experts._modules)
    for name, module in experts._modules.items():
        if name in ("quantization_padding", "quantization_unpadding"):
            padding: Any = module
            modules[name] = type(padding)(total, align_size=padding.align_size)
        elif module is not None:
            modules[name] = extend(module)
    pack(pairs)
    return twin_of(experts, _modules=modules, num_local_experts=total, _fused_ops=None, _pairs=pairs)


def pack(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Join parameters that pack those of all home experts with those of replicas, for the next pass."""
    for module, twin in pairs:
        if is_packed(module):
            vars(twin)["weight"] = torch.cat([module.weight, torch.stack(twin.further)])
