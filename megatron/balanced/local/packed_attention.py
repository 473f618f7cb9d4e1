"""Attention over packed documents without Transformer Engine. Megatron-LM's own modules do not have it."""

from itertools import pairwise
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention

from megatron.balanced.local.latent_attention import LatentDotProductAttention

__all__ = ["PackedDotProductAttention", "PackedLatentDotProductAttention", "packed_layers"]


class PackedDotProductAttention(DotProductAttention):
    """Megatron's own attention over documents packed into one sequence. Each document attends only to itself."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """query [t, heads, head_dim], key and value [t, kv_heads, head_dim] -> [t, heads x head_dim].

        Without `packed_seq_params` the shapes are upstream's, [s, b, heads, head_dim]. Padding behind a document
        attends as its tokens do.
        """
        if packed_seq_params is None:
            return super().forward(query, key, value, attention_mask, **kwargs)
        padded = packed_seq_params.cu_seqlens_q_padded
        bounds = (packed_seq_params.cu_seqlens_q if padded is None else padded).tolist()
        outputs = [
            super(PackedDotProductAttention, self).forward(
                query[start:stop, None], key[start:stop, None], value[start:stop, None], None, **kwargs
            )
            for start, stop in pairwise(bounds)
            if stop > start
        ]
        return torch.cat(outputs).squeeze(1)


class PackedLatentDotProductAttention(PackedDotProductAttention, LatentDotProductAttention):
    """The attention of `--multi-latent-attention` over documents packed into one sequence."""


def packed_layers(config: Any, vp_stage: int | None = None, attention: type = PackedDotProductAttention) -> Any:
    """The layer spec of the model chunk `vp_stage` from Megatron's own modules, with core attention of the class
    `attention`."""
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = attention
    return spec
