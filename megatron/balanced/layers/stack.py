"""The layers of one model chunk, for GPT and hybrid models: how to build one, and what to set when layers change.

A GPT model has one layer spec for each place in a chunk and reads the layout from its config. A hybrid model
(`--hybrid-layer-pattern`) has one spec for each kind of layer, and its pattern is the layout.
"""

from collections.abc import Sequence

import torch
from megatron.core import mpu
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_block import _get_block_submodules
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import get_pg_rank

from balancing.pipeline.pattern import read_pattern
from megatron.balanced.layers.quantized import forget_initial
from megatron.balanced.layers.source import LayerSource

__all__ = ["StackOfChunk", "stack_of"]


class StackOfChunk:
    """The layers of a chunk of a GPT model, after `LayerSource.set_layout`.

    model: the chunk, unwrapped.
    source: of its layers.
    """

    norm = "final_layernorm"

    def __init__(self, model: torch.nn.Module, source: LayerSource) -> None:
        self.block = block = model.decoder
        stage = mpu.get_pipeline_model_parallel_rank()
        block.submodules = _get_block_submodules(block.config, source.layer_spec(model.vp_stage), block.vp_stage, stage)

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
        """Record that the chunk now has the layers `numbers`."""
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
    """The layers of a chunk of a hybrid model, after `LayerSource.set_layout`. The final norm stays with the head."""

    norm = "final_norm"

    def __init__(self, model: torch.nn.Module, source: LayerSource) -> None:
        self.block, self._spec = model.decoder, model.hybrid_stack_spec
        assert source.pattern is not None
        self._symbols = read_pattern(source.pattern).symbols

    def build(self, position: int, number: int) -> torch.nn.Module:
        block = self.block
        alone = build_module(  # with gradients, or Transformer Engine makes 8-bit weights without columns
            self._spec,
            block.config,
            pre_process=False,
            post_process=False,
            layer_type_list=[self._symbols[number]],
            pp_layer_offset=number,
            pg_collection=block.pg_collection,
            name="decoder",
        )
        for parameter in alone.parameters():
            forget_initial(parameter)
        return alone.layers[0]

    def holds(self, numbers: Sequence[int]) -> None:
        super().holds(numbers)
        self.block.layer_type_list = [self._symbols[number] for number in numbers]

    @property
    def has_norm(self) -> bool:
        return hasattr(self.block, self.norm)


def stack_of(source: LayerSource) -> type[StackOfChunk]:
    """The class for a GPT model or for a hybrid model, whichever `source` is of."""
    return StackOfChunk if source.pattern is None else HybridStackOfChunk
