"""Makes the MoE layers of a finished model balanced, by changing the class of modules, as torch's `fully_shard` does.

Parameters keep their names, hooks and sharded state. So data parallelism, optimizers and checkpoints may be made before
or after.
"""

from collections.abc import Iterable

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import unwrap_model

from megatron.balanced.experts.moe_layer import BalancedMoELayer
from megatron.balanced.experts.replicated import ReplicatedSequentialMLP, ReplicatedTEGroupedMLP
from megatron.balanced.shared.tail import runs_several_times

__all__ = ["balance_layer", "balance_layers", "restore_layers"]

_BALANCED = {SequentialMLP: ReplicatedSequentialMLP, TEGroupedMLP: ReplicatedTEGroupedMLP}


def balance_layers(chunks: Iterable[torch.nn.Module], slots: int) -> list[BalancedMoELayer]:
    """Make the plain MoE layers of model chunks dispatch to replicas, in `slots` slots a rank. Returns these layers.

    A layer that runs several times in a pass has no replicas.

    Raises ValueError for experts that cannot have replicas.
    """
    modules = [module for model in unwrap_model(list(chunks)) for module in model.modules()]
    layers = [module for module in modules if type(module) is MoELayer and not runs_several_times(module)]
    for layer in layers:
        if type(layer.experts) not in _BALANCED or not _has_own_linears(layer.experts):
            raise ValueError(
                f"experts of class {type(layer.experts).__name__} cannot have replicas; use SequentialMLP without "
                "Transformer Engine, or grouped GEMM with it (moe_grouped_gemm)"
            )
    return [balance_layer(layer, slots) for layer in layers]


def balance_layer(layer: MoELayer, slots: int) -> BalancedMoELayer:
    """Make one layer of Megatron-LM dispatch to replicas, in `slots` slots a rank."""
    layer.__class__ = BalancedMoELayer
    layer.experts.__class__ = _BALANCED.get(type(layer.experts), type(layer.experts))
    layer.experts.prepare()
    layer.prepare(slots)
    return layer


def restore_layers(layers: Iterable[BalancedMoELayer]) -> None:
    """Turn balanced layers into Megatron's own again. Their slots have been closed."""
    plain = {balanced: own for own, balanced in _BALANCED.items()}
    for layer in layers:
        layer.active = False
        layer.__class__ = MoELayer
        layer.experts.__class__ = plain[type(layer.experts)]


def _has_own_linears(experts: torch.nn.Module) -> bool:
    """Whether sequential experts have linear layers of megatron.core. Those of Transformer Engine add gradients to
    buffers, which replicas do not have."""
    names = ("linear_fc1", "linear_fc2")
    own = ColumnParallelLinear, RowParallelLinear
    linears = [getattr(expert, name) for expert in getattr(experts, "local_experts", ()) for name in names]
    return all(isinstance(linear, own) for linear in linears)
