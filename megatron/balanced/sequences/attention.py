"""Attention over documents that are spread over ranks (`--balance-sequences`).

A plan says which rank holds each token. It reaches the layers as Megatron-LM's packed-sequence parameters, through
every pipeline stage and recomputation. Two modules read it. Core attention passes queries, keys and values to the
engine (`balancing.sequences.engine.attention`). The rotary embedding uses each token's position in its document.
Megatron-LM's own modules support only one layout, the zig-zag of Transformer Engine.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from megatron.core import mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import MoETransformerLayer
from megatron.core.transformer.utils import is_layer_window_attention

from megatron.balanced.sequences.latents import Latents, latents_of
from megatron.balanced.sequences.states import DocumentOrder

__all__ = [
    "DocumentRotaryEmbedding",
    "PlannedMoELayer",
    "PlannedSequences",
    "SequenceCoreAttention",
    "of_documents",
    "window_of",
]


@dataclass
class PlannedSequences(PackedSeqParams):
    """One micro-batch as a rank holds it.

    attention: query, key, value [tokens, heads, head_dim], softmax_scale, sink, and if ranks exchange latents, latent
        and projection -> [tokens, heads, head_dim].
    windowed: the same for layers with a sliding window.
    longest: positions of the longest possible document.
    positions: int32 [rows], position of each row in its document.
    angles: rotary angles of the rows, cached because the layers of multi-latent attention share them.
    tokens: number of rows that are tokens; the rest are padding.
    weigh: loss mask [row] -> weight of each row in the loss, if Megatron-LM averages the loss over micro-batches.
    prediction: inputs and labels of multi-token prediction (`megatron.balanced.sequences.prediction`).
    sample: int32 [rows], sample of each row, numbered within the micro-batch; None if no router needs it.
    samples, origins: number of samples, and number of Megatron-LM's micro-batches that they are from, in equal parts.
    order: how rows are sorted by document, for layers that pass a state from token to token; None without such layers.
    sharing: if the domain is split into groups, the process group of the ranks that hold this micro-batch. Each of them
        has the rows of one tensor-parallel rank.
    """

    attention: Callable[..., torch.Tensor] | None = None
    windowed: Callable[..., torch.Tensor] | None = None
    longest: int = 0
    positions: torch.Tensor | None = None
    tokens: int = 0
    angles: Any = None
    weigh: Callable[[torch.Tensor], torch.Tensor] | None = None
    prediction: Any = None
    sample: torch.Tensor | None = None
    samples: int = 0
    origins: int = 1
    order: DocumentOrder | None = None
    sharing: Any = None


class SequenceCoreAttention(MegatronModule):
    """Core attention of one layer. Its only parameter is the sink of `--softmax-type learnable`, under Megatron-LM's
    name."""

    latest: ClassVar[PlannedSequences | None] = None  # micro-batch of the last call; the same layer's router reads it

    def __init__(
        self, config: TransformerConfig, layer_number: int, *unused: Any, softmax_scale: float | None = None, **kw: Any
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.windowed = is_layer_window_attention(window_of(config) or (), config.window_attn_skip_freq, layer_number)
        self.tp_group = mpu.get_tensor_model_parallel_group(check_initialized=False)
        self.latents: Latents | None = None  # of the keys and values of the next call
        self.softmax_offset: torch.Tensor | None = None
        if config.softmax_type != "vanilla":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            scores = torch.zeros(heads, device=torch.cuda.current_device(), dtype=config.params_dtype)
            learned = config.softmax_type == "learnable"
            self.softmax_offset = torch.nn.Parameter(scores) if learned else scores
            if learned and config.perform_initialization and config.transformer_impl == "local":
                config.init_method(self.softmax_offset)  # Transformer Engine leaves it at 0

    sharded_state_dict = DotProductAttention.sharded_state_dict

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

        Multi-latent attention leaves out the dimension of 1, and its values have a head_dim of their own. Padding
        attends to nothing, and nothing attends to it; its output is 0.
        """
        assert isinstance(packed_seq_params, PlannedSequences)
        SequenceCoreAttention.latest = packed_seq_params
        attend = packed_seq_params.windowed if self.windowed else packed_seq_params.attention
        assert attend is not None
        tokens, rows = packed_seq_params.tokens, query.shape[0]
        inputs = [(part.squeeze(1) if part.dim() == 4 else part)[:tokens] for part in (query, key, value)]
        latents, self.latents = self.latents, None
        sent = {} if latents is None else {"latent": latents.tokens[:tokens], "projection": latents.weight}
        output = attend(*inputs, softmax_scale=self.softmax_scale, sink=self.softmax_offset, **sent).flatten(1)
        if tokens < rows:
            output = torch.nn.functional.pad(output, (0, 0, 0, rows - tokens))
        return output.unsqueeze(1)


class PlannedMoELayer(MoETransformerLayer):
    """A layer of a hybrid model that has only experts. It sets the micro-batch that its router reads, since the
    attention before it may be on another stage."""

    def forward(self, *args: Any, packed_seq_params: PackedSeqParams | None = None, **kwargs: Any) -> Any:
        SequenceCoreAttention.latest = packed_seq_params
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)


def window_of(config: Any) -> tuple[int, int] | None:
    """`--window-size` of Megatron-LM's arguments or config, (tokens before, tokens after); None if it hides nothing."""
    return config.window_size if config.window_size and config.window_size[0] >= 0 else None


class DocumentRotaryEmbedding(torch.nn.Module):
    """A rotary embedding with one row for each local token of a planned micro-batch.

    original: that of the model, or of a layer with multi-latent attention.
    """

    def __init__(self, original: torch.nn.Module) -> None:
        super().__init__()
        self.original = original

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Any,
        config: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> Any:
        """The argument of `forward`: the planned micro-batch itself."""
        assert isinstance(packed_seq_params, PlannedSequences)
        return packed_seq_params

    def forward(self, planned: PlannedSequences, **unused: Any) -> Any:
        """Angles [rows, 1, 1, dim]; with YaRN (angles, scale), as from the original."""
        table = self.original(planned.longest, packed_seq=True)
        if isinstance(table, tuple):
            return table[0][planned.positions], *table[1:]
        return table[planned.positions]


class _LatentRotaryEmbedding(DocumentRotaryEmbedding):
    """Rotary embedding of a layer with multi-latent attention, for queries [rows, heads, dim]. Layers share angles."""

    def forward(self, planned: PlannedSequences, **unused: Any) -> Any:
        """Angles [rows, 1, dim]; with YaRN (angles, scale)."""
        if planned.angles is None:
            found = super().forward(planned)
            scaled = isinstance(found, tuple)
            planned.angles = (found[0].squeeze(1), *found[1:]) if scaled else found.squeeze(1)
        return planned.angles


def of_documents(attention: type, *, latents: bool) -> type:
    """A subclass of a class of multi-latent attention. Each layer's rotary embedding uses positions in documents.

    latents: whether ranks exchange latents instead of keys and values.
    """

    class OfDocuments(attention):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.rotary_pos_emb = _LatentRotaryEmbedding(self.rotary_pos_emb)

        def get_query_key_value_tensors(
            self, hidden_states: torch.Tensor, states: Any, positions: Any, packed_seq_params: Any, **rest: Any
        ) -> tuple[torch.Tensor, ...]:
            """Queries, keys and values. If ranks exchange latents, core attention gets those of the keys and values."""
            found = super().get_query_key_value_tensors(hidden_states, states, positions, packed_seq_params, **rest)
            if latents:
                self.core_attention.latents = latents_of(self, found[4])
            return found

    return OfDocuments
