"""The tail of a model, which Megatron-LM builds behind the layers of its body: layers of multi-token prediction.

Balancers and hooks ask here where the tail is, what is in it, and how its layers are numbered. They know no more of it.
Plans call it by the same name (`balancing.pipeline.fixed_parts`).
"""

from typing import Any

import torch
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_config import TransformerConfig

from balancing.pipeline.fixed_parts import NAMES

__all__ = [
    "TAIL_FIELD",
    "computations",
    "layer_index",
    "layer_numbers",
    "layers_with_tail",
    "moe_layers_in_tail",
    "own_modules",
    "part_of",
    "runs_several_times",
    "tail_chunk",
    "tail_layers",
    "tail_of",
]


TAIL_FIELD = "mtp_num_layers"  # of a config: the layers of the tail, or None


def tail_layers(config: TransformerConfig) -> int:
    """Layers of the tail."""
    return config.mtp_num_layers or 0


def layers_with_tail(config: TransformerConfig) -> int:
    """Layers of the whole model, those of the tail behind the others."""
    return config.num_layers + tail_layers(config)


def layer_numbers(config: TransformerConfig) -> list[int]:
    """The numbers of all layers as Megatron-LM's modules have them, from 1. Those of the tail begin again at 1."""
    several = config.mtp_use_repeated_layer
    return [*range(1, config.num_layers + 1), *(1 if several else n + 1 for n in range(tail_layers(config)))]


def tail_chunk(config: TransformerConfig) -> int | None:
    """The model chunk with the tail, counted along the pipeline; None for the last one."""
    layout = config.pipeline_model_parallel_layout
    if not tail_layers(config) or layout is None:
        return None
    return [LayerType.mtp in chunk for row in zip(*layout.layout, strict=True) for chunk in row].index(True)


def tail_of(model: torch.nn.Module) -> torch.nn.Module | None:
    """The tail of a model chunk; None if it is in another one."""
    return getattr(model, "mtp", None)


def own_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """What the chunk with the tail holds for it: the tail, and on another stage than the first an embedding."""
    tail = tail_of(model)
    if tail is None:
        return []
    return [tail] if model.pre_process else [tail, model.embedding]


def part_of(layer: torch.nn.Module) -> int | str:
    """How reports call a layer: by its number in the body of the model, from 0, or as part of the tail."""
    return NAMES[-1] if isinstance(layer, MultiTokenPredictionLayer) else layer.layer_number - 1


def computations(plan: Any) -> tuple[Any, Any, Any]:
    """The nodes that compute, of a layer that runs in parts. plan: Megatron-LM's `TransformerLayerSchedulePlan`."""
    return plan.pre_dispatch_computation, plan.mlp, plan.mtp_post_process


def layer_index(moe_layer: Any) -> int:
    """Number of an MoE layer in the whole model, from 0. Layers of the tail come behind those of the body."""
    behind = moe_layer.config.num_layers if moe_layer.is_mtp_layer else 0
    return moe_layer.layer_number - 1 + behind


def moe_layers_in_tail(config: TransformerConfig, moe_at_the_end: bool) -> int:
    """MoE layers of the tail that can have replicas. They run once in a pass.

    moe_at_the_end: whether the last layer of the body has experts. Layers of the tail are built like it.
    """
    return tail_layers(config) if moe_at_the_end and not config.mtp_use_repeated_layer else 0


def runs_several_times(moe_layer: Any) -> bool:
    """Whether an MoE layer runs several times in a pass (`mtp_use_repeated_layer`)."""
    return bool(moe_layer.is_mtp_layer and getattr(moe_layer.config, "mtp_use_repeated_layer", False))
