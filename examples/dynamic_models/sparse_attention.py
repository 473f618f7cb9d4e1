"""Dynamic sparse attention as Megatron-LM's core attention."""

import contextlib
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.dot_product_attention import DotProductAttention

from examples.dynamic_models.config import DynamicsConfig
from examples.dynamic_models.schemes.sparse_attention import block_sparse_attention

__all__ = ["sparse_attention"]


class SparseDotProductAttention(DotProductAttention):
    """Attention of each block of queries to a few blocks of keys, installed through the layer spec."""

    dynamics: DynamicsConfig

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **unused: Any,
    ) -> torch.Tensor:
        """query [s, b, heads, d], key and value [s, b, kv_heads, d] -> [s, b, heads x d]. Causal."""
        groups = query.shape[2] // key.shape[2]
        if groups > 1:
            key, value = key.repeat_interleave(groups, dim=2), value.repeat_interleave(groups, dim=2)
        config = self.dynamics
        with contextlib.nullcontext() if self.config.sequence_parallel else get_cuda_rng_tracker().fork():
            output = block_sparse_attention(
                *(tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)),
                block=config.sparse_attention_block,
                keep=config.sparse_attention_keep,
                method=config.sparse_attention,
                dropout=self.attention_dropout,
            )
        return output.permute(2, 0, 1, 3).flatten(2).contiguous()


def sparse_attention(config: DynamicsConfig) -> type[SparseDotProductAttention]:
    """The core attention class for a model with these flags."""
    return type("SparseDotProductAttention", (SparseDotProductAttention,), {"dynamics": config})
