"""The layers of one model chunk, for GPT and hybrid models: how to build one, and what to set when it has others.

A GPT model has one layer spec for each place of a chunk and reads the layout from its config. A hybrid model
(`--hybrid-layer-pattern`) has one for each kind of layer, and its pattern has the layout.
"""

import argparse
import contextlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import _get_block_submodules
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import get_pg_rank
from megatron.training.models.base import ModelConfig
from megatron.training.models.gpt import GPTModelConfig, default_layer_spec
from megatron.training.models.hybrid import HybridModelConfig

from balancing.layers.layout import to_layout
from balancing.layers.pattern import read_pattern
from balancing.layers.stage_plan import StagePlan

__all__ = ["StackOfChunk", "layout_flag", "layout_text", "set_layout", "stack_of", "without_layers"]


def layout_flag(args: argparse.Namespace) -> str:
    """The flag of Megatron-LM that has the layers of each stage."""
    return "--hybrid-layer-pattern" if args.hybrid_layer_pattern else "--pipeline-model-parallel-layout"


def layout_text(args: argparse.Namespace, plan: StagePlan) -> str:
    """The value of `layout_flag` for `plan`."""
    if args.hybrid_layer_pattern:
        return read_pattern(args.hybrid_layer_pattern).text(plan)
    return to_layout(plan)


def set_layout(plan: StagePlan, chunks: Iterable[torch.nn.Module], spec: ModelConfig, args: argparse.Namespace) -> None:
    """Write the layout of `plan` to all places that Megatron-LM reads it from.

    chunks: the model chunks of this rank, whose modules' configs are changed.
    spec: the config that the model was built from.
    args: Megatron's arguments, which checkpoints record.
    """
    text = layout_text(args, plan)
    if isinstance(spec, HybridModelConfig):
        args.hybrid_layer_pattern = spec.hybrid_layer_pattern = text
        for chunk in chunks:
            for module in chunk.modules():
                if hasattr(module, "hybrid_layer_pattern"):
                    module.hybrid_layer_pattern = text
        return
    layout = PipelineParallelLayerLayout(text, plan.stages)
    layout.validate_layer_layout(plan.layers, plan.mtp_layers or None)
    args.pipeline_model_parallel_layout = text
    spec.transformer.pipeline_model_parallel_layout = layout
    for chunk in chunks:
        for module in chunk.modules():
            config = getattr(module, "config", None)
            if hasattr(config, "pipeline_model_parallel_layout"):
                config.pipeline_model_parallel_layout = layout


@contextlib.contextmanager
def without_layers(spec: ModelConfig, config: Any, stages: int) -> Iterator[None]:
    """A context in which `spec` and `config`, of the transformer, describe a pipeline of `stages` stages without
    layers."""
    owner: Any
    if isinstance(spec, HybridModelConfig):
        owner, name, empty = spec, "hybrid_layer_pattern", "|" * (stages - 1)
    else:
        owner, name = config, "pipeline_model_parallel_layout"
        empty = PipelineParallelLayerLayout("E" + "|" * (stages - 1) + "L", stages)
    before = getattr(owner, name)
    setattr(owner, name, empty)
    try:
        yield
    finally:
        setattr(owner, name, before)


class StackOfChunk:
    """The layers of a chunk of a GPT model, after `set_layout`.

    model: the chunk, unwrapped. spec: the config that the model was built from.
    """

    norm = "final_layernorm"

    def __init__(self, model: torch.nn.Module, spec: ModelConfig) -> None:
        self.block = block = model.decoder
        stage = mpu.get_pipeline_model_parallel_rank()
        block.submodules = _get_block_submodules(block.config, _layer_spec(model, spec), block.vp_stage, stage)

    def build(self, position: int, number: int) -> torch.nn.Module:
        """Build layer `number` of the model, from 0, at `position` of the chunk as Megatron-LM does."""
        block = self.block
        config = block.config
        number = position + get_transformer_layer_offset(config, block.vp_stage, get_pg_rank(block.pg_collection.pp))
        with torch.no_grad():  # so that Transformer Engine keeps no copy of the initial weights in a higher precision
            quantized = get_fp8_context(config, number, is_init=True)
        with quantized:
            return build_module(
                block.submodules.layer_specs[position],
                config=config,
                layer_number=position + 1,
                pg_collection=block.pg_collection,
                vp_stage=block.vp_stage,
            )

    def holds(self, numbers: Sequence[int]) -> None:
        """The chunk now has the layers `numbers`."""
        self.block.num_layers_per_pipeline_rank = len(numbers)

    @property
    def has_norm(self) -> bool:
        """Whether the final norm belongs to this chunk now."""
        return self.block.has_final_layernorm_in_this_stage()

    def build_norm(self) -> torch.nn.Module:
        """Build the final norm as Megatron-LM does."""
        config = self.block.config
        return self.block.submodules.layer_norm(
            config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
        )


class HybridStackOfChunk(StackOfChunk):
    """The layers of a chunk of a hybrid model, after `set_layout`. The final norm stays with the head."""

    norm = "final_norm"

    def __init__(self, model: torch.nn.Module, spec: ModelConfig) -> None:
        self.block, self._spec = model.decoder, model.hybrid_stack_spec
        self._symbols = read_pattern(spec.hybrid_layer_pattern).symbols

    def build(self, position: int, number: int) -> torch.nn.Module:
        block = self.block
        with torch.no_grad():
            alone = build_module(
                self._spec,
                block.config,
                pre_process=False,
                post_process=False,
                layer_type_list=[self._symbols[number]],
                pp_layer_offset=number,
                pg_collection=block.pg_collection,
                name="decoder",
            )
        return alone.layers[0]

    def holds(self, numbers: Sequence[int]) -> None:
        super().holds(numbers)
        self.block.layer_type_list = [self._symbols[number] for number in numbers]

    @property
    def has_norm(self) -> bool:
        return hasattr(self.block, self.norm)


def stack_of(spec: ModelConfig) -> type[StackOfChunk]:
    """The class of the layers of a chunk of a model that was built from `spec`."""
    return HybridStackOfChunk if isinstance(spec, HybridModelConfig) else StackOfChunk


def _layer_spec(model: torch.nn.Module, config: GPTModelConfig) -> Any:
    """The spec of the layers of a chunk in the present layout, as Megatron-LM's builder determines it."""
    spec = config.transformer_layer_spec
    if spec is None:
        spec = default_layer_spec(config, model.vp_stage)
    elif not isinstance(spec, ModuleSpec) and callable(spec):
        takes_stage = "vp_stage" in inspect.signature(spec).parameters
        spec = spec(config, vp_stage=model.vp_stage) if takes_stage else spec(config)
    if config.attention_backend == AttnBackend.local and hasattr(spec, "submodules"):
        spec.submodules.self_attention.submodules.core_attention = DotProductAttention
    return spec
