"""Attention over documents that are spread over ranks (`--balance-sequences`).

A plan says which rank holds each token. It reaches the layers as Megatron-LM's packed-sequence parameters, through
every pipeline stage and recomputation. Two modules read it. Core attention passes queries, keys and values to the
engine (`balancing.sequences.engine.attention`). The rotary embedding uses each token's position in its document.
Megatron-LM's own modules support only one layout, the zig-zag of Transformer Engine.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model

from balancing.sequences import SequenceAttention
from balancing.sequences.engine.captured import CapturedAttention, Graphs
from megatron.balanced.sequences.mamba import DocumentOrder
from megatron.balanced.sequences.mask import not_causal
from megatron.balanced.sequences.planner import Programs
from megatron.balanced.sequences.shape import layer_kind

__all__ = [
    "BatchAttention",
    "CurrentBatch",
    "DocumentPositions",
    "DocumentRotaryEmbedding",
    "PlannedSequences",
    "SampleRows",
    "SequenceCoreAttention",
    "use_document_positions",
]


class InPlaceOfKV(Protocol):
    """What ranks exchange of a layer in place of keys and values."""

    def first(self, tokens: int) -> dict[str, torch.Tensor]:
        """Arguments of `SequenceAttention` for the first `tokens` rows."""


class BatchAttention(NamedTuple):
    """Attention of one micro-batch on this rank.

    by_kind: for each kind of layers (`layer_kinds`); None if the model has no such layers.
    tokens: number of rows that are tokens; the rest are padding.
    """

    by_kind: tuple[SequenceAttention | None, ...]
    tokens: int

    @classmethod
    def of(
        cls, programs: Programs, process_group: dist.ProcessGroup, tokens: int, *, graphs: Graphs | None, **options: Any
    ) -> "BatchAttention":
        """process_group: the ranks of the plan. graphs: that capture the passes; None for none. options: of
        `SequenceAttention`."""
        made_by = SequenceAttention if graphs is None else partial(CapturedAttention, graphs=graphs)
        options["process_group"] = process_group
        made = {id(kind): made_by(kind[0], program=kind[1], **options) for kind in programs if kind}
        return cls(tuple(made.get(id(kind)) for kind in programs), tokens)

    @property
    def kinds(self) -> list[SequenceAttention]:
        """One for each kind of layers with a plan of its own."""
        return [attention for attention in dict.fromkeys(self.by_kind) if attention is not None]

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        kind: int,
        softmax_scale: float | None,
        sink: torch.Tensor | None,
        in_place_of_kv: InPlaceOfKV | None = None,
    ) -> torch.Tensor:
        """The output [rows, heads x value_size] of core attention in one layer.

        query [rows, heads, head_size], key [rows, kv_heads, head_size] and value [rows, kv_heads, value_size] may have
        a dimension of 1 after the first. Padding attends to nothing, and nothing attends to it; its output is 0.

        kind: the kind of the layer, an index into `by_kind`.
        softmax_scale, sink: as in `SequenceAttention`; a sink may have more dimensions.
        in_place_of_kv: what is sent in place of key and value; None if these are sent.
        """
        attention = self.by_kind[kind]
        assert attention is not None
        inputs = [(part.squeeze(1) if part.dim() == 4 else part)[: self.tokens] for part in (query, key, value)]
        sent = {} if in_place_of_kv is None else in_place_of_kv.first(self.tokens)
        sink = None if sink is None else sink.flatten()
        output = attention(*inputs, softmax_scale=softmax_scale, sink=sink, **sent).flatten(1)
        padding = query.shape[0] - self.tokens
        return torch.nn.functional.pad(output, (0, 0, 0, padding)) if padding else output


@dataclass
class DocumentPositions:
    """Where the rows of a micro-batch are in their documents.

    rows: int32 [row], position of the row's token in its document; 0 in padding.
    longest: positions of the longest possible document.
    angles: rotary angles of the rows, cached because the layers of multi-latent attention share them.
    """

    rows: torch.Tensor
    longest: int
    angles: Any = None


class SampleRows(NamedTuple):
    """The samples that the rows of a micro-batch were drawn in, for losses of routers.

    rows: int32 [row], sample of each row, numbered within the micro-batch.
    samples, origins: number of samples, and number of Megatron-LM's micro-batches that they are from, in equal parts.
    process_group: if the domain is split into groups, the ranks that hold this micro-batch. Each of them has the rows
        of one tensor-parallel rank.
    """

    rows: torch.Tensor
    samples: int
    origins: int
    process_group: dist.ProcessGroup | None


@dataclass
class PlannedSequences(PackedSeqParams):
    """One micro-batch as a rank holds it.

    attention, positions: for every layer with attention.
    order: how rows are sorted by document, for layers that pass a state from token to token; None without such layers.
    samples: for routers with losses of samples; None without such routers.
    prediction: inputs and labels of further tokens (`megatron.balanced.sequences.prediction`); None without these.
    """

    attention: BatchAttention | None = None
    positions: DocumentPositions | None = None
    order: DocumentOrder | None = None
    samples: SampleRows | None = None
    prediction: Any = None


class CurrentBatch:
    """The micro-batch that passes through a layer."""

    planned: PlannedSequences | None = None


class SequenceCoreAttention(MegatronModule):
    """Core attention of one layer. Its only parameter is the sink of `--softmax-type learnable`, under Megatron-LM's
    name."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        *unused: Any,
        softmax_scale: float | None = None,
        **kw: Any,
    ) -> None:
        super().__init__(config=config)
        self.name = f"the attention of layer {layer_number}"
        if refused := not_causal(self.name, attn_mask_type, None):
            raise ValueError(refused)
        self.softmax_scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.kind = layer_kind(config, layer_number)
        self.tp_group = mpu.get_tensor_model_parallel_group(check_initialized=False)
        self.current = CurrentBatch()
        self.in_place_of_kv: InPlaceOfKV | None = None  # of the next call
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
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> torch.Tensor:
        """query [rows, 1, heads, head_dim], key and value [rows, 1, kv_heads, head_dim] -> [rows, 1, heads x head_dim].

        Multi-latent attention leaves out the dimension of 1, and its values have a head_dim of their own.
        """
        assert isinstance(packed_seq_params, PlannedSequences) and packed_seq_params.attention is not None
        if refused := not_causal(self.name, attn_mask_type, attention_bias):
            raise ValueError(refused)
        self.current.planned = packed_seq_params
        in_place_of_kv, self.in_place_of_kv = self.in_place_of_kv, None
        output = packed_seq_params.attention.attend(
            query,
            key,
            value,
            kind=self.kind,
            softmax_scale=self.softmax_scale,
            sink=self.softmax_offset,
            in_place_of_kv=in_place_of_kv,
        )
        return output.unsqueeze(1)


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
        assert planned.positions is not None
        table, rows = self.original(planned.positions.longest, packed_seq=True), planned.positions.rows
        if isinstance(table, tuple):
            return table[0][rows], *table[1:]
        return table[rows]


def use_document_positions(chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Replace the rotary embeddings of a model by ones with positions in documents. Returns `chunks`, as Megatron's
    model hooks must. Data parallelism keeps a table of the modules that it wraps, so they are replaced before."""
    for model in unwrap_model(chunks):
        if getattr(model, "rotary_pos_emb", None) is not None:
            model.rotary_pos_emb = DocumentRotaryEmbedding(model.rotary_pos_emb)
    return chunks
