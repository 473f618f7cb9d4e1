"""The GPT model as Megatron-LM builds it, with the modules it lacks where Transformer Engine is not there.

Megatron's local spec (its own modules, no Transformer Engine) refuses sequence parallelism, for want of a norm, and
packed documents, for want of an attention. Both are filled in through the layer spec; nothing is patched.
"""

import argparse
import copy
import dataclasses
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.models.gpt import GPTModelConfig, default_layer_spec

__all__ = ["PackedDotProductAttention", "SequenceParallelNorm", "model_config"]


class SequenceParallelNorm:
    """torch's LayerNorm or RMSNorm under sequence parallelism.

    The norm itself is local to a token. Only its weights need care: every tensor-parallel rank sees a part of the
    tokens, so their gradients must be summed over the group, which Megatron does for parameters marked
    `sequence_parallel`.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> torch.nn.Module:
        alone = copy.copy(config)
        alone.sequence_parallel = False
        norm = WrappedTorchNorm(alone, hidden_size, eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class PackedDotProductAttention(DotProductAttention):
    """Megatron's own attention for several documents packed into one sequence: each attends to itself alone."""

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

        Without `packed_seq_params` the shapes are upstream's, [s, b, heads, head_dim].
        """
        if packed_seq_params is None:
            return super().forward(query, key, value, attention_mask, **kwargs)
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        outputs = [
            super(PackedDotProductAttention, self).forward(
                query[start:stop, None], key[start:stop, None], value[start:stop, None], None, **kwargs
            )
            for start, stop in zip(bounds, bounds[1:], strict=False)
            if stop > start
        ]
        return torch.cat(outputs).squeeze(1)


def _fill_in(spec: Any, replacements: dict[Any, Any]) -> None:
    """Replace modules in place, everywhere in a layer spec."""
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if isinstance(value, type) and value in replacements:
            setattr(spec, field.name, replacements[value])
        elif isinstance(value, ModuleSpec):
            _fill_in(value, replacements)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            _fill_in(value, replacements)


def _local_layer_spec(config: GPTModelConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Megatron's local spec with the missing modules filled in."""
    block = default_layer_spec(config, vp_stage)
    if isinstance(block, ModuleSpec):  # a dense model has one spec for all layers
        layers = get_num_layers_to_build(config.transformer, vp_stage=vp_stage)
        block = TransformerBlockSubmodules(layer_specs=[block] * layers, layer_norm=WrappedTorchNorm)
    replacements: dict[Any, Any] = {DotProductAttention: PackedDotProductAttention}
    if config.transformer.sequence_parallel:
        replacements[WrappedTorchNorm] = SequenceParallelNorm
    for holder in (block, *block.layer_specs):
        _fill_in(holder, replacements)
    return block


def model_config(args: argparse.Namespace) -> GPTModelConfig:
    """The model that the flags describe, as a config that `megatron.training.pretrain` builds from."""
    config = gpt_config_from_args(args)
    packed = args.sft or args.dataloader_inter_document_masking
    if args.transformer_impl == "local" and args.spec is None and (packed or args.sequence_parallel):
        config.transformer_layer_spec = _local_layer_spec
    return config
