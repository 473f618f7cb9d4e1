"""Attention over documents that are spread over context-parallel ranks (`--balance-sequences`).

A plan says where every token is. It reaches the layers as Megatron-LM's packed-sequence parameters do, through every
pipeline stage and recomputation. Two modules read it: core attention, which hands queries, keys and values to the
engine (`balancing.sequences.engine.attention`), and the rotary embedding, whose rows follow each token's position in
its document wherever the token is. Megatron-LM's own modules know one layout only, the zig-zag of Transformer Engine.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = ["DocumentRotaryEmbedding", "PlannedSequences", "SequenceCoreAttention"]


@dataclass
class PlannedSequences(PackedSeqParams):
    """One micro-batch as a context-parallel rank holds it.

    attention: query, key, value [tokens, heads, head_dim], softmax_scale -> [tokens, heads, head_dim].
    positions: int [rows], of each row in its document. tokens: how many rows are tokens; the rest are padding.
    """

    attention: Callable[..., torch.Tensor] | None = None
    positions: torch.Tensor | None = None
    tokens: int = 0


class SequenceCoreAttention(MegatronModule):
    """Core attention of one layer. It has no parameters and no state."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, *unused: Any, softmax_scale: float | None = None, **kw: Any
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> torch.Tensor:
        """query [rows, 1, heads, head_dim], key and value [rows, 1, kv_heads, head_dim] -> [rows, 1, heads x head_dim].

        Padding attends to nothing and is attended to by nothing; its output is 0.
        """
        assert isinstance(packed_seq_params, PlannedSequences) and packed_seq_params.attention is not None
        tokens, rows = packed_seq_params.tokens, query.shape[0]
        inputs = [part.squeeze(1)[:tokens] for part in (query, key, value)]
        output = packed_seq_params.attention(*inputs, softmax_scale=self.softmax_scale).flatten(1)
        if tokens < rows:
            output = torch.nn.functional.pad(output, (0, 0, 0, rows - tokens))
        return output.unsqueeze(1)


class DocumentRotaryEmbedding(torch.nn.Module):
    """A model's rotary embedding, with one row for each local token of a planned micro-batch.

    longest: positions that a document may have.
    """

    def __init__(self, original: torch.nn.Module, longest: int) -> None:
        super().__init__()
        self.original, self.longest = original, longest

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Any,
        config: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> Any:
        """What `forward` is called with: the planned micro-batch itself."""
        assert isinstance(packed_seq_params, PlannedSequences)
        return packed_seq_params

    def forward(self, planned: PlannedSequences, **unused: Any) -> Any:
        """Angles [rows, 1, 1, dim]; with YaRN its scale beside them, as the original gives it."""
        table = self.original(self.longest, packed_seq=True)
        if isinstance(table, tuple):
            return table[0][planned.positions], *table[1:]
        return table[planned.positions]
