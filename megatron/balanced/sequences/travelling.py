"""Whether ranks exchange a layer's keys and values, or the latents from which these are projected."""

from typing import Any

from balancing.sequences.sequence_plan import LatentShape

__all__ = ["latent_shape"]


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
    windows = model.window_size and model.window_size[0] >= 0
    apart = windows or recomputed or model.delay_wgrad_compute
    if not getattr(model, "multi_latent_attention", False) or model.fp8 or model.fp4 or apart:
        return None
    return LatentShape(model.kv_lora_rank, model.qk_pos_emb_head_dim, model.tensor_model_parallel_size)
