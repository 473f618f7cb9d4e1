"""What travels between ranks of a layer's keys and values: themselves, or the latents that they are projected from."""

from typing import Any

from balancing.sequences.sequence_plan import LatentShape

__all__ = ["latent_shape"]


def latent_shape(model: Any) -> LatentShape | None:
    """The latent of multi-latent attention, which travels; None where keys and values do. model: its config, or
    Megatron-LM's arguments, which have the same names.

    That is with 8-bit or 4-bit projections, whose weights the engine does not read; with sliding windows, whose calls
    have own and received keys; where core attention is recomputed alone, apart from what it is projected from; and
    where gradients of weights are computed apart from the backward pass.
    """
    modules = model.recompute_modules or ["core_attn"]
    recomputed = model.recompute_granularity == "selective" and "core_attn" in modules
    windows = model.window_size and model.window_size[0] >= 0
    apart = windows or recomputed or model.delay_wgrad_compute
    if not getattr(model, "multi_latent_attention", False) or model.fp8 or model.fp4 or apart:
        return None
    return LatentShape(model.kv_lora_rank, model.qk_pos_emb_head_dim, model.tensor_model_parallel_size)
