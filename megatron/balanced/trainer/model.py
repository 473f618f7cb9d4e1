"""The GPT or hybrid model as Megatron-LM builds it, with our modules in its layer spec.

Megatron's local spec (its own modules, no Transformer Engine) has no norm for sequence parallelism and no attention for
packed documents. The layer spec fills in the missing modules, those of the balancers and those of an extension of the
model; nothing is patched.
"""

import argparse
import copy
import dataclasses
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import FusedMLASelfAttention, MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import MoETransformerLayer
from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args
from megatron.training.models.gpt import GPTModelConfig, default_layer_spec
from megatron.training.models.hybrid import HybridModelConfig

from balancing.experts.config import ExpertConfig
from balancing.sequences.config import SequenceConfig
from megatron.balanced.cpu.device import is_cpu
from megatron.balanced.local.hybrid_stack import local_stack_spec
from megatron.balanced.local.latent_attention import LatentDotProductAttention, LatentSelfAttention
from megatron.balanced.local.mamba import ScannedMambaMixer
from megatron.balanced.local.packed_attention import PackedDotProductAttention, PackedLatentDotProductAttention
from megatron.balanced.sequences.attention import SequenceCoreAttention
from megatron.balanced.sequences.latents import with_document_positions
from megatron.balanced.sequences.mamba import with_whole_documents
from megatron.balanced.sequences.prediction import LAYERS_OF_TAIL
from megatron.balanced.sequences.router import PackedRouter, PlannedMoELayer, SampleRouter
from megatron.balanced.shared.tail import layers_with_tail
from megatron.balanced.trainer.prediction import has_tail, without_repeated
from megatron.balanced.trainer.sequence_rules import packs_samples_of_losses, routes_by_sample

__all__ = ["LayerSpecs", "SequenceParallelNorm", "model_config", "replaces_in_tail"]


class SequenceParallelNorm:
    """torch's LayerNorm or RMSNorm under sequence parallelism.

    The norm itself is local to a token. Every tensor-parallel rank sees a part of the tokens, so gradients of its
    weights must be summed over these ranks. Megatron does so for parameters marked `sequence_parallel`.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> torch.nn.Module:
        alone = copy.copy(config)
        alone.sequence_parallel = False
        norm = WrappedTorchNorm(alone, hidden_size, eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def _fill_in(value: Any, replacements: dict[Any, Any]) -> Any:
    """Replace modules everywhere in `value`, a part of a layer spec. Specs are changed in place."""
    if isinstance(value, type):
        return replacements.get(value, value)
    if isinstance(value, partial):
        keywords = {name: _fill_in(part, replacements) for name, part in value.keywords.items()}
        return partial(replacements.get(value.func, value.func), *value.args, **keywords)
    if isinstance(value, list):
        return [_fill_in(part, replacements) for part in value]
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            setattr(value, field.name, _fill_in(getattr(value, field.name), replacements))
    return value


class LayerSpecs:
    """The layer specs that Megatron would choose, with modules replaced. Used as the layer spec of a model config.

    replacements: module -> module, in the layers of the model.
    in_tail: the same for the layers of the tail (`megatron.balanced.shared.tail`).
    """

    def __init__(self, replacements: dict[Any, Any], in_tail: dict[Any, Any]) -> None:
        self._replacements, self._in_tail = replacements, in_tail

    def __call__(self, config: GPTModelConfig, vp_stage: int | None) -> Any:  # Megatron inspects these parameter names
        block = default_layer_spec(config, vp_stage)
        if isinstance(block, ModuleSpec) and config.transformer.transformer_impl == "local":
            # One spec for all layers of a dense model. The block's spec also names the final norm.
            layers = get_num_layers_to_build(config.transformer, vp_stage=vp_stage)
            block = TransformerBlockSubmodules(layer_specs=[block] * layers, layer_norm=WrappedTorchNorm)
        if isinstance(block, TransformerBlockSubmodules):
            block.layer_norm = _fill_in(block.layer_norm, self._replacements)
            for layer in block.layer_specs:
                _fill_in(layer, self._replacements)
            return block
        return _fill_in(block, self._replacements)

    def fill_in_tail(self, spec: Any) -> None:
        """Put the replacements into `spec`, the spec of one layer of the tail."""
        _fill_in(spec, self._in_tail)


def _on_own_linears(*args: Any, submodules: Any, **kwargs: Any) -> SequentialMLP:
    """Sequential experts made of Megatron's own linear layers, whatever the spec has. A replica runs the modules of a
    home expert with other weights, and modules of Transformer Engine do not allow that."""
    own = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return SequentialMLP(*args, submodules=own, **kwargs)


def _core_attention(args: argparse.Namespace) -> type:
    """The class of core attention in Megatron's own layer spec."""
    if args.transformer_impl == "local":
        return DotProductAttention
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    return TEDotProductAttention


def _replacements(
    args: argparse.Namespace, experts: ExpertConfig, sequences: SequenceConfig
) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Replacements of Megatron's modules in layers of the model, and in those of its tail."""
    fitting: dict[Any, Any] = {}  # equivalent to the modules that they replace, in every layer
    if "M" in (args.hybrid_layer_pattern or "") and is_cpu():
        fitting[MambaMixer] = ScannedMambaMixer
    if sequences.enabled:
        fitting[_core_attention(args)] = SequenceCoreAttention
        fitting |= LAYERS_OF_TAIL
        fitting[MambaMixer] = with_whole_documents(fitting.get(MambaMixer, MambaMixer))
    elif args.transformer_impl == "local":
        packs, latent = args.sft or args.dataloader_inter_document_masking, args.multi_latent_attention
        if latent:
            fitting[DotProductAttention] = PackedLatentDotProductAttention if packs else LatentDotProductAttention
        elif packs:
            fitting[DotProductAttention] = PackedDotProductAttention
    if args.transformer_impl == "local" and args.multi_latent_attention:
        fitting[MLASelfAttention] = LatentSelfAttention
    if sequences.enabled and args.multi_latent_attention:
        for attention in (MLASelfAttention, FusedMLASelfAttention):
            fitting[attention] = with_document_positions(fitting.get(attention, attention))
    if args.transformer_impl == "local" and args.sequence_parallel:
        fitting[WrappedTorchNorm] = SequenceParallelNorm
    if routes_by_sample(args, sequences) or (sequences.micro_batches and args.moe_router_enable_expert_bias):
        fitting[TopKRouter], fitting[MoETransformerLayer] = SampleRouter, PlannedMoELayer
    elif packs_samples_of_losses(args) and args.sequence_parallel and not sequences.enabled:
        fitting[TopKRouter] = partial(PackedRouter, tokens_per_sample=args.seq_length)
    replicated: dict[Any, Any] = {}
    if experts.enabled and args.transformer_impl != "local":
        replicated[SequentialMLP] = _on_own_linears
    return fitting | replicated, fitting | without_repeated(args, replicated)


def replaces_in_tail(args: argparse.Namespace, experts: ExpertConfig, sequences: SequenceConfig) -> bool:
    """Whether layers of the tail of a GPT model have other modules than Megatron's. Parameters as in `model_config`."""
    return (
        has_tail(args)
        and args.spec is None
        and args.hybrid_layer_pattern is None
        and bool(_replacements(args, experts, sequences)[1])
    )


def model_config(
    args: argparse.Namespace,
    experts: ExpertConfig,
    sequences: SequenceConfig,
    modules: Mapping[type, type] = MappingProxyType({}),
    *,
    fills: bool = False,
) -> GPTModelConfig | HybridModelConfig:
    """The model that the flags describe, as the config from which `megatron.training.pretrain` builds it.

    args: Megatron-LM's arguments.
    experts, sequences: the settings of these balancers.
    modules: Megatron-LM's module -> its replacement by the model's extension
        (`megatron.balanced.trainer.model_extension`).
    fills: whether --fill-with-weight-gradients is on.
    """
    replacements, in_tail = _replacements(args, experts, sequences)
    replacements |= modules
    config = _config(args, replacements, in_tail)
    if args.num_experts:
        config.pre_wrap_hooks.append(partial(_log_every_layer, config.transformer))
    if fills and args.transformer_impl != "local":
        # Set after the checks of Megatron-LM, which refuses it without overlap_moe_expert_parallel_comm.
        config.transformer.delay_wgrad_compute = True
    return config


def _config(
    args: argparse.Namespace, replacements: dict[Any, Any], in_tail: dict[Any, Any]
) -> GPTModelConfig | HybridModelConfig:
    if args.hybrid_layer_pattern is not None:
        config = hybrid_config_from_args(args)
        if args.spec is None:
            config.hybrid_stack_spec = _fill_in(_stack_spec(config), replacements)
        return config
    config = gpt_config_from_args(args)
    config.rope_scaling_factor = args.rope_scaling_factor  # which Megatron-LM 0.19.2 forgets
    if replacements and args.spec is None:
        config.transformer_layer_spec = LayerSpecs(replacements, in_tail)
    return config


def _stack_spec(config: HybridModelConfig) -> ModuleSpec:
    """The spec of the layers of a hybrid model. The caller may change it."""
    if config.transformer.transformer_impl == "local":
        return local_stack_spec(config.transformer)
    return copy.deepcopy(hybrid_stack_spec)


def _log_every_layer(config: TransformerConfig, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Prepare Megatron-LM's log of router losses on all ranks as routers do. Megatron-LM 0.19.2 leaves it to routers,
    so a last stage without MoE layers, which logs, would not add the losses up over ranks. There and in stages of
    hybrid models, the log would also have one element per MoE layer instead of one per layer. Returns `chunks`, as
    Megatron's model hooks must."""
    tracker, groups = get_moe_metrics_tracker(), get_default_pg_collection()
    # Loss -> the ranks over which it is added up, or averaged, and whether data-parallel ranks are averaged as well.
    known = {
        "load_balancing_loss": (groups.tp_cp, None, True),
        "seq_load_balancing_loss": (groups.tp_cp, None, True),
        "global_load_balancing_loss": (groups.tp_dp_cp, None, False),
        "z_loss": (None, groups.tp_dp_cp, True),
    }
    for name, ways in known.items():
        tracker.ensure_initialized(name, layers_with_tail(config))
        entry = tracker.metrics[name]
        entry.reduce_group, entry.avg_group, entry.needs_dp_avg = ways
    return chunks
