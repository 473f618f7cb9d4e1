"""Multi-latent attention without Transformer Engine (`--multi-latent-attention`, `--transformer-impl local`).

Queries, keys and values are projected up from compressed ones. All heads share the part of each key that carries the
position (DeepSeek-V2, arXiv 2405.04434, section 2.1). Megatron-LM's layer spec with its own modules does not train,
since its core attention only takes values of the keys' size. With tensor parallelism, two gradients are also wrong. The
gradient of the shared part of the keys lacks the heads of other ranks. Without sequence parallelism, the gradient of
the queries' norm is multiplied by the number of ranks.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

__all__ = ["LatentDotProductAttention", "LatentSelfAttention"]


class LatentDotProductAttention(DotProductAttention):
    """Megatron's own attention with values of another size than queries and keys."""

    def __init__(self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """query and key [s, b, heads, head_dim], value [s, b, heads, v_head_dim] -> [s, b, heads x v_head_dim]."""
        self.hidden_size_per_partition = value.shape[-2] * value.shape[-1]
        return super().forward(query, key, value, *args, **kwargs)


class LatentSelfAttention(MLASelfAttention):
    """Megatron's multi-latent attention, with the right gradients under tensor parallelism."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.config.q_lora_rank is not None and not self.config.sequence_parallel:
            # Megatron adds up the gradients of every `q_layernorm` over tensor-parallel ranks, but here they are equal.
            for parameter in self.q_layernorm.parameters():
                parameter.average_gradients_across_tp_domain = True

    def _qkv_down_projection(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compressed queries, and compressed keys and values with the keys' shared part, of all tensor-parallel ranks.

        hidden_states: [s, b, hidden], or [s / TP, b, hidden] with sequence parallel, as are the results.
        """
        queries, keys_values = super()._qkv_down_projection(hidden_states)
        if self.tp_group.size() == 1:
            return queries, keys_values
        keys_values = gather_from_tensor_model_parallel_region(keys_values)
        if self.config.sequence_parallel:
            # The shared part is gathered by tokens where it is used, which adds up its gradients over ranks.
            return queries, scatter_to_sequence_parallel_region(keys_values)
        compressed, shared = keys_values.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1)
        return queries, torch.cat([compressed, copy_to_tensor_model_parallel_region(shared)], dim=-1)
