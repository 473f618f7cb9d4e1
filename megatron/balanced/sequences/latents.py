"""Multi-latent attention: latents, which ranks exchange instead of keys and values, and positions in documents.

Megatron-LM projects the keys and values of a rank's own tokens as always. The engine sends the normalised latents, and
projects received latents with the same weight (`engine.latents`). So the weight's gradient has two parts on each rank,
of own and of received tokens. Data and context parallelism add up all parts, each once.
"""

from typing import Any, NamedTuple

import torch
from megatron.core import mpu
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from megatron.balanced.sequences.attention import DocumentRotaryEmbedding, PlannedSequences
from megatron.balanced.sequences.shape import latent_shape

__all__ = ["Latents", "adds_to_gradient", "latents_of", "with_document_positions"]


class Latents(NamedTuple):
    """tokens: [rows, latent], after the norm. weight: of `linear_kv_up_proj`, for this rank's heads."""

    tokens: torch.Tensor
    weight: torch.Tensor

    def first(self, tokens: int) -> dict[str, torch.Tensor]:
        """Arguments of `SequenceAttention` for the first `tokens` rows."""
        return {"latent": self.tokens[:tokens], "projection": self.weight}


def latents_of(attention: Any, compressed: torch.Tensor) -> Latents | None:
    """The latents of a layer; None if keys and values must be sent, since its projection is not a weight alone: it has
    an adapter, a parametrization, or hooks that see outputs or gradients.

    attention: Megatron's module, which has `linear_kv_up_proj`.
    compressed: input of this projection, [rows, latent], or [rows / TP, latent] with sequence parallelism.
    """
    config, projection = attention.config, attention.linear_kv_up_proj
    if not _is_plain(projection):
        return None
    norm = getattr(projection, "layer_norm_weight", None)  # Transformer Engine's norm and projection in one module
    if norm is not None:
        bias, stored = getattr(projection, "layer_norm_bias", None), compressed.dtype
        if config.layernorm_zero_centered_gamma:  # in bf16 a small gamma would vanish beside the 1
            wide = torch.promote_types(stored, torch.float32)
            compressed, norm, bias = compressed.to(wide), norm.to(wide) + 1, None if bias is None else bias.to(wide)
        size, eps = compressed.shape[-1:], config.layernorm_epsilon
        if config.normalization == "RMSNorm":
            compressed = torch.nn.functional.rms_norm(compressed, size, norm, eps).to(stored)
        else:
            compressed = torch.nn.functional.layer_norm(compressed, size, norm, bias, eps).to(stored)
    # Gradients of latents are those of this rank's heads only, so they must be summed over tensor-parallel ranks.
    process_group = mpu.get_tensor_model_parallel_group()
    if config.sequence_parallel:
        compressed = gather_from_sequence_parallel_region(compressed, group=process_group)
    else:
        compressed = copy_to_tensor_model_parallel_region(compressed, group=process_group)
    weight = projection.weight
    fused = config.gradient_accumulation_fusion and getattr(weight, "main_grad", None) is not None
    return Latents(compressed, _IntoMainGradient.apply(weight) if fused else weight)


def adds_to_gradient(attention: Any) -> None:
    """Let the projection of keys and values add to `main_grad` in the first micro-batch, too. Called before it runs:
    Transformer Engine would overwrite what received tokens, whose gradient comes first, have added."""
    projection = attention.linear_kv_up_proj
    if getattr(projection, "is_first_microbatch", None) and _is_plain(projection):
        projection.is_first_microbatch = False


def _is_plain(projection: torch.nn.Module) -> bool:
    """Whether a projection is Megatron-LM's, and nothing was added to it."""
    names = {name for name, _ in projection.named_parameters()}
    hooks = projection._forward_hooks or projection._backward_hooks or projection._backward_pre_hooks
    return (
        type(projection).__module__.startswith("megatron.core.")
        and names <= {"weight", "layer_norm_weight", "layer_norm_bias"}
        and "forward" not in vars(projection)
        and not hooks
        and getattr(projection, "te_quant_params", None) is None
    )


class _IntoMainGradient(torch.autograd.Function):
    """A weight whose gradient is added to `main_grad`, as in Megatron-LM's fused linear layers. Megatron-LM's own
    projection marks the gradient as added."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        ctx.weight.main_grad.add_(grad)


class _LatentRotaryEmbedding(DocumentRotaryEmbedding):
    """Rotary embedding of a layer with multi-latent attention, for queries [rows, heads, dim]. Layers share angles."""

    def forward(self, planned: PlannedSequences, **unused: Any) -> Any:
        """Angles [rows, 1, dim]; with YaRN (angles, scale)."""
        assert planned.positions is not None
        if planned.positions.angles is None:
            angles = super().forward(planned)
            scaled = isinstance(angles, tuple)
            planned.positions.angles = (angles[0].squeeze(1), *angles[1:]) if scaled else angles.squeeze(1)
        return planned.positions.angles


def with_document_positions(attention: type) -> type:
    """A subclass of a class of multi-latent attention. Each layer's rotary embedding uses positions in documents."""

    class InDocuments(attention):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.rotary_pos_emb = _LatentRotaryEmbedding(self.rotary_pos_emb)
            self.sends_latents = latent_shape(self.config) is not None  # by the config that the engine reads, too

        def get_query_key_value_tensors(
            self, hidden_states: torch.Tensor, states: Any, positions: Any, packed_seq_params: Any, **rest: Any
        ) -> tuple[torch.Tensor, ...]:
            """Queries, keys and values. If ranks exchange latents, core attention gets those of the keys and values."""
            if self.sends_latents:
                adds_to_gradient(self)
            tensors = super().get_query_key_value_tensors(hidden_states, states, positions, packed_seq_params, **rest)
            if self.sends_latents:
                self.core_attention.in_place_of_kv = latents_of(self, tensors[4])
            return tensors

    return InDocuments
