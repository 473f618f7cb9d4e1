"""What the planner and the engine must know of a model's attention, read from the model's config."""

from typing import Any

from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from balancing.kernels.trial import AttentionHeads
from balancing.pipeline.pattern import read_pattern
from balancing.sequences import AttentionShape
from balancing.sequences.sequence_plan import LatentShape
from megatron.balanced.shared.tail import layer_numbers

__all__ = ["attention_shape", "head_sizes", "heads_of_rank", "latent_shape", "layer_kind"]


def attention_shape(model: TransformerConfig, pattern: str | None = None) -> AttentionShape:
    """The sizes of a model.

    model: its config. pattern: of its layers, if it is a hybrid model.
    """
    ffn = model.ffn_hidden_size
    if model.num_moe_experts:
        ffn = model.moe_ffn_hidden_size * model.moe_router_topk
    numbers = layer_numbers(model)
    if pattern is not None:
        numbers, ffn = _layers_of_pattern(model, pattern)
    kv_heads = model.num_attention_heads if isinstance(model, MLATransformerConfig) else model.num_query_groups
    head_size, value_size, window, latent = head_sizes(model)
    return AttentionShape(
        hidden=model.hidden_size,
        heads=model.num_attention_heads,
        kv_heads=kv_heads,
        layers=len(numbers),
        ffn_hidden=ffn,
        head_size=head_size,
        value_size=value_size,
        window=window,
        windowed_layers=sum(layer_kind(model, number) for number in numbers),
        latent=latent,
        tensor_parallel=model.tensor_model_parallel_size,
        item_bytes=model.params_dtype.itemsize,
    )


def head_sizes(model: Any) -> tuple[int, int, int | None, LatentShape | None]:
    """Sizes of a key and a value, keys that a window lets a query see before its own, and `latent_shape`.

    model: its config.
    """
    sizes = model.kv_channels, model.kv_channels
    if isinstance(model, MLATransformerConfig):
        sizes = model.qk_head_dim + model.qk_pos_emb_head_dim, model.v_head_dim
    return *sizes, model.window_size[0] if _has_window(model) else None, latent_shape(model)


def layer_kind(model: Any, number: int) -> int:
    """0 for a layer that sees all tokens, 1 for one with a sliding window: an index into `sequence_plan.layer_kinds`.

    model: its config. number: of the layer, from 1.
    """
    window = model.window_size if _has_window(model) else None
    return int(is_layer_window_attention(window, model.window_attn_skip_freq, number))


def latent_shape(model: Any) -> LatentShape | None:
    """The latent of multi-latent attention; None if ranks exchange keys and values.

    model: its config, or Megatron-LM's arguments, which have the same names.

    Ranks exchange keys and values without multi-latent attention, and in four other cases: with 8-bit or 4-bit
    projections, whose weights the engine does not read; with sliding windows, whose calls have own and received keys;
    if core attention is recomputed without its projection; and if weight gradients are computed outside of the backward
    pass.
    """
    modules = model.recompute_modules or ["core_attn"]
    recomputed = model.recompute_granularity == "selective" and "core_attn" in modules
    apart = _has_window(model) or recomputed or model.delay_wgrad_compute
    if not getattr(model, "multi_latent_attention", False) or model.fp8 or model.fp4 or apart:
        return None
    return LatentShape(model.kv_lora_rank, model.qk_pos_emb_head_dim)


def heads_of_rank(shape: AttentionShape, model: TransformerConfig) -> AttentionHeads:
    """The heads of attention on this rank."""
    sizes = *shape.heads_of_rank, shape.head_size, shape.value_size
    return AttentionHeads(model.params_dtype, *sizes, shape.window is not None)


def _has_window(model: Any) -> bool:
    """Whether layers have a sliding window. model: as in `latent_shape`. A single number is none of Megatron-LM's: some
    models read it in a core attention of their own."""
    return isinstance(model.window_size, tuple | list) and model.window_size[0] >= 0


def _layers_of_pattern(model: TransformerConfig, text: str) -> tuple[list[int], int]:
    """The numbers of the layers with attention, from 1; and the width of a token's MLPs and routed experts, divided by
    the number of these layers."""
    pattern = read_pattern(text)
    numbers = [number + 1 for number in pattern.attention]
    width = pattern.symbols.count("-") * model.ffn_hidden_size
    if model.num_moe_experts:
        width += pattern.symbols.count("E") * model.moe_ffn_hidden_size * model.moe_router_topk
    return numbers, round(width / max(len(numbers), 1))
