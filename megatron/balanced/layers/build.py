"""Construction of layers while training runs, as Megatron-LM constructs them at its start.

A new layer is uninitialized: its weights and buffers come from another rank. Its position, whether it has experts, and
its precision are decided by the functions that Megatron's builder uses.
"""

import argparse
import contextlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.fp8_utils import get_fp8_context, is_float8tensor
from megatron.core.tensor_parallel import get_cuda_rng_tracker, set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import _get_block_submodules
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import get_pg_rank
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig, default_layer_spec

from balancing.layers.layout import to_layout
from balancing.layers.stage_plan import StagePlan
from megatron.balanced.layers.quantized import start_scaling
from megatron.balanced.layers.state import Inventory, layer_of, named_parameters

__all__ = ["change_layers", "complete_ends", "set_layout"]

# Attributes that train() sets on the model's config after the model is built. Some layers copy their config.
_SET_LATER = (
    "grad_scale_func",
    "no_sync_func",
    "grad_sync_func",
    "param_sync_func",
    "finalize_model_grads_func",
    "timers",
)


_OF_EVERY_MODULE = {*vars(torch.nn.Module()), "config"}


def set_layout(
    plan: StagePlan, chunks: Iterable[torch.nn.Module], spec: GPTModelConfig, args: argparse.Namespace
) -> None:
    """Write the layout of `plan` to all places that Megatron-LM reads it from.

    chunks: the model chunks of this rank, whose modules' configs are changed.
    spec: the config that the model was built from.
    args: Megatron's arguments, which checkpoints record.
    """
    text = to_layout(plan)
    layout = PipelineParallelLayerLayout(text, plan.stages)
    layout.validate_layer_layout(plan.layers, plan.mtp_layers or None)
    args.pipeline_model_parallel_layout = text
    spec.transformer.pipeline_model_parallel_layout = layout
    for chunk in chunks:
        for module in chunk.modules():
            config = getattr(module, "config", None)
            if hasattr(config, "pipeline_model_parallel_layout"):
                config.pipeline_model_parallel_layout = layout


def change_layers(
    plan: StagePlan,
    models: Sequence[torch.nn.Module],
    spec: GPTModelConfig,
    inventories: Sequence[Inventory],
    *,
    without_memory: bool = False,
) -> tuple[list[tuple[torch.nn.Module, int]], list[torch.nn.Module]]:
    """Give this rank's model chunks the layers of `plan`, after `set_layout`.

    plan: the layers of all chunks after the move.
    models: the chunks of this rank.
    spec: the config that the model was built from.
    inventories: of all ranks.
    without_memory: give weights that require gradients one element of memory, until they are placed in a buffer.

    Returns the new layers, uninitialized, each with the number of its chunk; and the final norm, if it came along with
    the last layer, as it does in models with multi-token prediction.
    """
    arrived, norms = [], []
    frozen = set().union(*(inventory.frozen for inventory in inventories))
    stage = mpu.get_pipeline_model_parallel_rank()
    for chunk, model in enumerate(models):
        block = model.decoder
        present = {layer.layer_number - 1: layer for layer in block.layers}
        block.submodules = _get_block_submodules(block.config, _layer_spec(model, spec), block.vp_stage, stage)
        layers = []
        for position, number in enumerate(plan.chunks[stage][chunk]):
            layer = present.get(number)
            if layer is None:
                layer = _build(block, position)
                assert layer.layer_number == number + 1, "the layout gives another layer than the plan"
                arrived.append((layer, chunk))
                for parameter in layer.parameters() if without_memory else ():
                    if not is_float8tensor(parameter):
                        parameter.data = parameter.data.new_empty(()).expand(parameter.shape)
            layers.append(layer)
        block.layers = torch.nn.ModuleList(layers)
        block.num_layers_per_pipeline_rank = len(layers)
        if not block.has_final_layernorm_in_this_stage():
            block.final_layernorm = None
        elif block.final_layernorm is None:
            block.final_layernorm = _build_norm(block)
            norms.append(block.final_layernorm)
    for name, parameter in named_parameters(models):
        if name in frozen:
            parameter.requires_grad_(False)
            if not is_float8tensor(parameter) and not parameter.is_contiguous():  # no buffer will have it
                parameter.data = torch.empty_like(parameter.data, memory_format=torch.contiguous_format)
    layers = {layer.layer_number - 1: layer for layer, _ in arrived}
    _register_buffers(layers, inventories)
    for path, known in [each for inventory in inventories for each in inventory.scaling.items()]:
        if (layer := layers.get(layer_of(path))) is not None:
            start_scaling(layer.get_submodule(path.partition(".")[2]), known)
    return arrived, norms


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


def _build(block: torch.nn.Module, position: int) -> torch.nn.Module:
    """Build a layer of `block` as Megatron-LM does, uninitialized and without drawing random numbers."""
    config = block.config
    number = position + get_transformer_layer_offset(config, block.vp_stage, get_pg_rank(block.pg_collection.pp))
    with torch.no_grad():  # so that Transformer Engine keeps no copy of the initial weights in a higher precision
        quantized = get_fp8_context(config, number, is_init=True)
    with _uninitialized(config), quantized:
        layer = build_module(
            block.submodules.layer_specs[position],
            config=config,
            layer_number=position + 1,
            pg_collection=block.pg_collection,
            vp_stage=block.vp_stage,
        )
    return _finished(layer, config).train(block.training)


def _build_norm(block: torch.nn.Module) -> torch.nn.Module:
    """Build the final norm of `block` as Megatron-LM does."""
    config = block.config
    with _uninitialized(config):
        norm = block.submodules.layer_norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
    return _finished(norm, config).train(block.training)


@contextlib.contextmanager
def _uninitialized(config: Any) -> Iterator[None]:
    """A context to build modules without initial values, random numbers, and copies of what train() set on `config`."""
    saved = {name: getattr(config, name) for name in (*_SET_LATER, "perform_initialization")}
    states = torch.get_rng_state(), torch.cuda.get_rng_state(), get_cuda_rng_tracker().get_states()
    for name in saved:
        setattr(config, name, None)
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(config, name, value)
        torch.set_rng_state(states[0])
        torch.cuda.set_rng_state(states[1])
        get_cuda_rng_tracker().set_states(states[2])


def _finished(module: torch.nn.Module, config: Any) -> torch.nn.Module:
    """Give `module` the attributes, device and precision that Megatron-LM gives a model after building it."""
    for parameter in module.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    module.cuda(torch.cuda.current_device())
    if config.fp16 or config.bf16:
        module.half() if config.fp16 else module.bfloat16()
        for part in module.modules():
            if hasattr(part, "_maintain_float32_expert_bias"):
                part._maintain_float32_expert_bias()
    return module


def complete_ends(stages: int, model: torch.nn.Module, spec: GPTModelConfig) -> list[torch.nn.Module]:
    """Make `model` the chunk of its stage in a pipeline of `stages` stages, which was longer before.

    A stage that has become the last one gets the final norm and the head, from a model without layers that Megatron-LM
    builds for this stage. All ranks that stay call it together, after their process groups are set. Returns the new
    modules, uninitialized.
    """
    config = model.config
    before = config.pipeline_model_parallel_layout
    config.pipeline_model_parallel_layout = PipelineParallelLayerLayout("E" + "|" * (stages - 1) + "L", stages)
    try:
        with _uninitialized(config):
            fresh = GPTModelBuilder(spec).build_model(model.pg_collection)
    finally:
        config.pipeline_model_parallel_layout = before
    _finished(fresh, config)
    if fresh.pre_process:  # its weights may no longer be tied to a copy on another stage, or now be
        weight, example = model.embedding.word_embeddings.weight, fresh.embedding.word_embeddings.weight
        for name in ("shared_embedding", "zero_out_wgrad"):
            if hasattr(weight, name):
                delattr(weight, name)
            if hasattr(example, name):
                setattr(weight, name, getattr(example, name))
    if model.post_process or not fresh.post_process:
        return []
    arrived = []
    for kept, built, part in ((model, fresh, "output_layer"), (model.decoder, fresh.decoder, "final_layernorm")):
        kept.__dict__.update({name: value for name, value in vars(built).items() if name not in _OF_EVERY_MODULE})
        setattr(kept, part, getattr(built, part).train(kept.training))
        arrived.append(getattr(kept, part))
    return arrived


def _register_buffers(layers: dict[int, torch.nn.Module], inventories: Sequence[Inventory]) -> None:
    """Register every buffer that the layer had on its old rank, also those that other code added later."""
    for inventory in inventories:
        for name, (shape, dtype, persistent) in inventory.buffers.items():
            layer = layers.get(layer_of(name))
            if layer is not None:
                path = name.rpartition("@")[0].partition(".")[2]
                owner, _, attribute = path.rpartition(".")
                empty = torch.empty(shape, dtype=dtype, device=torch.cuda.current_device())
                layer.get_submodule(owner).register_buffer(attribute, empty, persistent=persistent)
