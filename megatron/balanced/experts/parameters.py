"""The parameters of the experts of an MoE layer, by expert, whatever a loop has added to them.

A parameter travels to a replica if it belongs to one expert. Grouped linear layers have a weight for each expert.
Adapters of Megatron-Bridge may pack those of all experts of a rank into one parameter.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.experts import TEGroupedMLP

from megatron.balanced.shared.process_groups import gather_objects

__all__ = [
    "BRIDGE",
    "Row",
    "home_parameters",
    "is_grouped_linear",
    "is_packed",
    "named_parameters",
    "owner",
    "trained_parameters",
]

BRIDGE = "megatron.bridge.peft"
_PACKED = ("_GroupedExpertAdapterWeight", "PackedPerExpertLinear")  # modules of Megatron-Bridge


class Row(NamedTuple):
    """An expert's part of a parameter that packs those of all experts of a rank: `parameter[number]`."""

    parameter: torch.nn.Parameter
    number: int


def is_grouped_linear(module: torch.nn.Module) -> bool:
    """Whether `module` is a grouped linear layer of Transformer Engine, with a weight for each expert."""
    return hasattr(module, "num_gemms") and "weight0" in module._parameters


def is_packed(module: torch.nn.Module) -> bool:
    """Whether the parameter `weight` of `module` packs those of all experts, [expert, ...]."""
    return type(module).__module__.startswith(BRIDGE) and type(module).__name__ in _PACKED


def home_parameters(experts: Any) -> list[list[Any]]:
    """[home expert] -> its parameters. A part of a packed parameter is a leaf in its memory, with its `Row` as `row`.
    experts: number of experts of an MoE layer."""
    return [[p for _, p in named_parameters(experts, number)] for number in range(experts.num_local_experts)]


def named_parameters(experts: Any, number: int) -> Iterator[tuple[str, Any]]:
    """The parameters of home expert `number`, with names that do not tell which one it is."""
    if not isinstance(experts, TEGroupedMLP):
        yield from experts.local_experts[number].named_parameters()
        return
    for path, module in experts.named_modules():
        if is_grouped_linear(module):
            for kind in ("weight", "bias") if module.use_bias else ("weight",):
                yield f"{path}.{kind}", getattr(module, f"{kind}{number}")
        elif is_packed(module):
            weight: Any = module.weight
            part = weight.detach()[number].requires_grad_(weight.requires_grad)
            part.row = Row(weight, number)
            yield f"{path}.weight", part


def owner(parameter: Any) -> torch.nn.Parameter:
    """The parameter of the model that one of `home_parameters` is, or is a part of."""
    return parameter.row.parameter if hasattr(parameter, "row") else parameter


def trained_parameters(
    homes: Sequence[Sequence[Sequence[torch.Tensor]]], hosts: dist.ProcessGroup
) -> list[list[tuple[bool, ...]]]:
    """[layer][expert of the group][parameter] -> whether it trains. All ranks of the group call it together.

    homes: [layer][home expert] -> its parameters.
    hosts: the ranks of the expert-parallel group on gloo.
    """
    by_rank = gather_objects([[tuple(p.requires_grad for p in expert) for expert in layer] for layer in homes], hosts)
    return [[expert for rank in by_rank for expert in rank[layer]] for layer in range(len(homes))]
