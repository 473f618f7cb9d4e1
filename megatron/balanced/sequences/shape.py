"""The sizes of a model's attention for the sequence planner, from the model's config."""

from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from balancing.pipeline.pattern import read_pattern
from balancing.sequences import AttentionShape
from megatron.balanced.sequences.attention import window_of
from megatron.balanced.sequences.travelling import latent_shape

__all__ = ["shape_of"]


def shape_of(model: TransformerConfig, pattern: str | None = None) -> AttentionShape:
    """The sizes of a model.

    model: its config. pattern: of its layers, if it is a hybrid model.
    """
    ffn = model.ffn_hidden_size
    if model.num_moe_experts:
        ffn = model.moe_ffn_hidden_size * model.moe_router_topk
    window, predicted = window_of(model), range(model.mtp_num_layers or 0)
    # Layers of multi-token prediction have numbers of their own.
    numbers = [*range(1, model.num_layers + 1), *(1 if model.mtp_use_repeated_layer else n + 1 for n in predicted)]
    if pattern is not None:
        numbers, ffn = _layers_of_pattern(model, pattern)
    kv_heads, sizes = model.num_query_groups, (model.kv_channels, model.kv_channels)
    if isinstance(model, MLATransformerConfig):
        kv_heads, sizes = model.num_attention_heads, (model.qk_head_dim + model.qk_pos_emb_head_dim, model.v_head_dim)
    return AttentionShape(
        hidden=model.hidden_size,
        heads=model.num_attention_heads,
        kv_heads=kv_heads,
        layers=len(numbers),
        ffn_hidden=ffn,
        head_size=sizes[0],
        value_size=sizes[1],
        window=window[0] if window else None,
        windowed_layers=sum(is_layer_window_attention(window or (), model.window_attn_skip_freq, n) for n in numbers),
        latent=latent_shape(model),
    )


def _layers_of_pattern(model: TransformerConfig, text: str) -> tuple[list[int], int]:
    """The numbers of the layers with attention, from 1; and the width of a token's MLPs and routed experts, divided by
    the number of these layers."""
    pattern = read_pattern(text)
    numbers = [number + 1 for number in pattern.attention]
    width = pattern.symbols.count("-") * model.ffn_hidden_size
    if model.num_moe_experts:
        width += pattern.symbols.count("E") * model.moe_ffn_hidden_size * model.moe_router_topk
    return numbers, round(width / max(len(numbers), 1))
