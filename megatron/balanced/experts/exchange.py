"""Adds replicas to the MoE layers of a finished model by changing the class of modules, as torch's `fully_shard` does.

Parameters keep their names, hooks and sharded state. So data parallelism, optimizers and checkpoints may be made before
or after.
"""

from collections.abc import Iterable

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import unwrap_model

from megatron.balanced.experts.moe_layer import BalancedMoELayer, ReplicatedSequentialMLP
from megatron.balanced.experts.te_grouped_mlp import ReplicatedTEGroupedMLP

__all__ = ["balance_layers", "use_balanced", "use_plain"]

_BALANCED = {SequentialMLP: ReplicatedSequentialMLP, TEGroupedMLP: ReplicatedTEGroupedMLP}


def balance_layers(chunks: Iterable[torch.nn.Module], slots: int) -> list[BalancedMoELayer]:
    """Make the MoE layers of model chunks dispatch to replicas, in `slots` slots a rank. Returns these layers.

    Raises ValueError for experts that cannot have replicas.
    """
    layers = [module for model in unwrap_model(list(chunks)) for module in model.modules() if type(module) is MoELayer]
    for layer in layers:
        if type(layer.experts) not in _BALANCED or not _has_own_linears(layer.experts):
            raise ValueError(
                f"experts of class {type(layer.experts).__name__} cannot have replicas; use SequentialMLP without "
                "Transformer Engine, or grouped GEMM with it (moe_grouped_gemm)"
            )
    use_balanced(layers)
    for layer in layers:
        layer.prepare(slots)
        layer._gathers_counts = False  # the dispatcher is not patched, so it gathers counts itself
        experts = layer.experts
        experts.ends_after_backward_dw = experts.config.delay_wgrad_compute
        if isinstance(experts, ReplicatedSequentialMLP):
            for linear in experts.modules():  # fused accumulation needs gradient buffers, which replicas lack
                if getattr(linear, "gradient_accumulation_fusion", False):
                    linear.gradient_accumulation_fusion = False
    return layers


def _has_own_linears(experts: torch.nn.Module) -> bool:
    """Whether sequential experts have linear layers of megatron.core. Those of Transformer Engine add gradients to
    buffers, which replicas do not have."""
    names = ("linear_fc1", "linear_fc2")
    own = ColumnParallelLinear, RowParallelLinear
    linears = [getattr(expert, name) for expert in getattr(experts, "local_experts", ()) for name in names]
    return all(isinstance(linear, own) for linear in linears)


def use_balanced(layers: Iterable[MoELayer]) -> None:
    """Make `layers` dispatch to replicas."""
    for layer in layers:
        layer.__class__ = BalancedMoELayer
        layer.experts.__class__ = _BALANCED.get(type(layer.experts), type(layer.experts))


def use_plain(layers: Iterable[BalancedMoELayer]) -> None:
    """Turn `layers` of `balance_layers` into Megatron's own until `use_balanced`. They keep their replica state."""
    plain = {balanced: own for own, balanced in _BALANCED.items()}
    for layer in layers:
        layer.token_dispatcher = layer._logical
        layer.__class__ = MoELayer
        layer.experts.__class__ = plain[type(layer.experts)]
