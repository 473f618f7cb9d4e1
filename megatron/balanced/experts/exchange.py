"""Makes the MoE layers of a finished model balanced, by changing the class of modules, as torch's `fully_shard` does.

Parameters keep their names, hooks and sharded state. So data parallelism, optimizers and checkpoints may be made before
or after.
"""

from collections.abc import Iterable

import torch
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import unwrap_model

from megatron.balanced.experts.moe_layer import BalancedMoELayer
from megatron.balanced.experts.products import ProductsOfSequentialMLP, ProductsOfTEGroupedMLP
from megatron.balanced.experts.replicated import ReplicatedSequentialMLP, ReplicatedTEGroupedMLP
from megatron.balanced.shared.tail import runs_several_times

__all__ = ["balance_layer", "moe_layers", "restore_layers"]

_BALANCED = {SequentialMLP: ReplicatedSequentialMLP, TEGroupedMLP: ReplicatedTEGroupedMLP}
_WITH_TORCH = {SequentialMLP: ProductsOfSequentialMLP, TEGroupedMLP: ProductsOfTEGroupedMLP}


def moe_layers(chunk: torch.nn.Module) -> dict[str, MoELayer]:
    """The plain MoE layers of a model chunk by name, but for those that run several times in a pass: these have no
    replicas."""
    modules = unwrap_model([chunk])[0].named_modules()
    return {name: module for name, module in modules if type(module) is MoELayer and not runs_several_times(module)}


def balance_layer(layer: MoELayer, slots: int, late_slots: int = 0, gemm: str = "megatron") -> BalancedMoELayer:
    """Make one layer of Megatron-LM dispatch to replicas.

    slots, late_slots: as in `BalancedMoELayer.prepare`.
    gemm: "torch" for PyTorch's grouped products; all other names stand for Megatron-LM's.
    """
    experts = layer.experts
    plain = {*vars(layer)}, {*vars(experts)}
    layer.__class__ = BalancedMoELayer
    experts.__class__ = (_WITH_TORCH if gemm == "torch" else _BALANCED).get(type(experts), type(experts))
    experts.prepare()
    layer.prepare(slots, late_slots)
    layer.added = {*vars(layer), "added", "trained_share"} - plain[0]
    experts.added = {
        *vars(experts),
        "added",
        "slots",
        "late_slots",
        "late",
        "position",
        "active",
        "when_computed",
    } - plain[1]
    return layer


def restore_layers(layers: Iterable[BalancedMoELayer]) -> None:
    """Turn balanced layers into Megatron's own again. Their slots have been closed."""
    plain = {balanced: own for kinds in (_BALANCED, _WITH_TORCH) for own, balanced in kinds.items()}
    for layer in layers:
        layer.active = False
        layer.experts.restore()
        for module, kind in ((layer.experts, plain[type(layer.experts)]), (layer, MoELayer)):
            for name in module.added:
                vars(module).pop(name, None)
            module.__class__ = kind
