"""Which attention of a finished model may be balanced: causal, a plain softmax, with the sizes of the model.

The engine computes nothing else. A vision tower attends in both directions, and some models have a core attention of
their own, for instance with capped scores, or compute it in 8 bits. Such layers run as the loop has them. They could
not be balanced even with another mask: a rank whose micro-batch has no images does not call a tower at all, and the
others would wait for it.
"""

from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from megatron.balanced.sequences.shape import head_sizes

__all__ = ["not_causal", "why_alone"]

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)
# Modules of the classes that compute such attention. Subclasses elsewhere may cap scores, or choose windows by layer.
_PLAIN = {
    "megatron.core.transformer.dot_product_attention",
    "megatron.core.extensions.transformer_engine",
    "megatron.balanced.local.latent_attention",
    "megatron.balanced.local.packed_attention",
}


def why_alone(attention: Any, model: Any) -> str:
    """Why a layer must run as the loop has it; "" if it may be balanced.

    attention: Megatron's module. model: config of the model.
    """
    core = attention.core_attention
    # Megatron-LM's own modules hide nothing with padding_causal unless they are given a mask.
    causal = (AttnMaskType.causal,) if isinstance(core, DotProductAttention) else _CAUSAL
    for module in (attention, core):
        mask = getattr(module, "attn_mask_type", None)
        if isinstance(mask, AttnMaskType) and mask not in causal:
            return f"attention with the mask {mask.name}, not causal"
    # A class may have no forward pass: Megatron-LM has none over context-parallel ranks without Transformer Engine.
    made_by = {type(core).__init__.__module__, type(core).forward.__module__}
    if "forward" in vars(core) or not (made_by <= _PLAIN or type(core).forward is torch.nn.Module.forward):
        return f"{type(core).__name__} computes attention in a way of its own"
    config = attention.config
    if config.fp4 or (config.fp8 and config.fp8_recipe != "blockwise"):  # that recipe leaves attention in 16 bits
        for name in ("fp8_dot_product_attention", "fp8_multi_head_attention"):
            if getattr(config, name, False):
                return f"attention in 8 bits ({name})"
    if head_sizes(config) != head_sizes(model):
        return "heads or windows of other sizes than in the model's config"
    return ""


def not_causal(name: str, mask: AttnMaskType | None, bias: Any) -> str:
    """Why a call of core attention cannot be balanced; "" if it can.

    name: name of the layer. mask: of the call; None for that of the layer. bias: that is added to scores, or None.
    """
    wrong = f"the mask {mask.name}" if mask is not None and mask not in _CAUSAL else "" if bias is None else "a bias"
    return wrong and (
        f"{name} was called with {wrong}, and balanced attention is causal, without bias; give the layer its "
        "attn_mask_type before the SequenceBalancer is made, or train without one"
    )
