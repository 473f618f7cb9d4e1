"""Latents of multi-latent attention, which travel between ranks in the place of keys and values.

Megatron-LM projects the keys and values of a rank's own tokens as always. The engine sends what they were projected
from, after its norm, and projects what it receives with the same weight (`engine.latents`). The weight's gradient thus
has two parts on each rank. Neither is counted twice: data and context parallelism add up all.
"""

from typing import Any, NamedTuple

import torch
from megatron.core import mpu
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

__all__ = ["Latents", "latents_of"]


class Latents(NamedTuple):
    """tokens: [rows, latent], after the norm. weight: of `linear_kv_up_proj`, for this rank's heads."""

    tokens: torch.Tensor
    weight: torch.Tensor


def latents_of(attention: Any, compressed: torch.Tensor) -> Latents:
    """What travels of a layer.

    attention: Megatron's, which has `linear_kv_up_proj`.
    compressed: its input, [rows, latent], or [rows / TP, latent] with sequence parallelism.
    """
    config, projection = attention.config, attention.linear_kv_up_proj
    norm = getattr(projection, "layer_norm_weight", None)  # Transformer Engine's norm and projection in one module
    if norm is not None:
        norm = norm + 1 if config.layernorm_zero_centered_gamma else norm
        size, eps = compressed.shape[-1:], config.layernorm_epsilon
        if config.normalization == "RMSNorm":
            compressed = torch.nn.functional.rms_norm(compressed, size, norm, eps)
        else:
            compressed = torch.nn.functional.layer_norm(compressed, size, norm, projection.layer_norm_bias, eps)
    # Gradients of latents are those of this rank's heads alone.
    process_group = mpu.get_tensor_model_parallel_group()
    if config.sequence_parallel:
        compressed = gather_from_sequence_parallel_region(compressed, group=process_group)
    else:
        compressed = copy_to_tensor_model_parallel_region(compressed, group=process_group)
    weight = projection.weight
    fused = config.gradient_accumulation_fusion and getattr(weight, "main_grad", None) is not None
    return Latents(compressed, _IntoMainGradient.apply(weight) if fused else weight)


class _IntoMainGradient(torch.autograd.Function):
    """A weight whose gradient is added to `main_grad`, as Megatron-LM's fused linear layers do it. Its projection of
    own tokens marks it as added."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        ctx.weight.main_grad.add_(grad)
