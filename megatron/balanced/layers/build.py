"""Builds layers while training runs, as Megatron-LM builds them at the start.

A new layer is uninitialized, since its weights and buffers come from another rank. The functions of Megatron's own
builder decide its position, its precision and whether it has experts. What the loop has changed of it comes from its
old rank (`megatron.balanced.layers.structure`).
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.tensor_parallel import get_cuda_rng_tracker, set_defaults_if_not_set_tensor_model_parallel_attributes

from balancing.pipeline.stage_plan import StagePlan
from megatron.balanced.layers.layer_tensors import Inventory, layer_of, named_parameters
from megatron.balanced.layers.quantized import start_scaling
from megatron.balanced.layers.source import LayerSource
from megatron.balanced.layers.stack import StackOfChunk, stack_of
from megatron.balanced.layers.structure import Structure
from megatron.balanced.layers.travelling import SET_LATER

__all__ = ["change_layers", "complete_ends", "structures"]

_OF_EVERY_MODULE = {*vars(torch.nn.Module()), "config"}


def change_layers(
    plan: StagePlan,
    models: Sequence[torch.nn.Module],
    source: LayerSource,
    inventories: Sequence[Inventory],
    changes: Mapping[int, bytes],
    *,
    without_memory: bool = False,
) -> tuple[list[tuple[torch.nn.Module, int]], list[torch.nn.Module]]:
    """Give this rank's model chunks the layers of `plan`. Call `LayerSource.set_layout` first.

    plan: the layers of all chunks after the move.
    models: the chunks of this rank.
    source: builds the layers.
    inventories: inventories of all ranks.
    changes: layer -> how it differs from what its spec builds (`Structure`), for each that arrives.
    without_memory: give weights that require gradients one element of memory, until they are placed in a buffer.

    Returns (new layers, each with the number of its chunk; new final norms), all uninitialized. In models with a tail
    the final norm moves with the last layer.
    """
    arrived, norms = [], []
    frozen = set().union(*(inventory.frozen for inventory in inventories))
    stage = mpu.get_pipeline_model_parallel_rank()
    for chunk, model in enumerate(models):
        stack = stack_of(source)(model, source)
        block, numbers = stack.block, plan.chunks[stage][chunk]
        present = {layer.layer_number - 1: layer for layer in block.layers}
        layers = []
        for position, number in enumerate(numbers):
            layer = present.get(number)
            if layer is None:
                layer = _built(stack, position, number)
                layer.structure.apply(layer, changes[number], block.config, groups_of(block))
                arrived.append((layer, chunk))
                for parameter in layer.parameters() if without_memory else ():
                    if not is_float8tensor(parameter):
                        parameter.data = parameter.data.new_empty(()).expand(parameter.shape)
            layers.append(layer)
        block.layers = torch.nn.ModuleList(layers)
        stack.holds(numbers)
        norm = getattr(block, stack.norm, None)
        if not stack.has_norm and norm is not None:
            setattr(block, stack.norm, None)
        elif stack.has_norm and norm is None:
            with _uninitialized(block.config):
                norm = stack.build_norm()
            setattr(block, stack.norm, _finished(norm, block.config).train(block.training))
            norms.append(norm)
    for name, parameter in named_parameters(models):
        if name in frozen:
            parameter.requires_grad_(False)
            if not is_float8tensor(parameter) and not parameter.is_contiguous():  # it is in no flat buffer
                parameter.data = torch.empty_like(parameter.data, memory_format=torch.contiguous_format)
    layers = {layer.layer_number - 1: layer for layer, _ in arrived}
    _register_buffers(layers, inventories)
    for path, known in [each for inventory in inventories for each in inventory.scaling.items()]:
        if (layer := layers.get(layer_of(path))) is not None:
            start_scaling(layer.get_submodule(path.partition(".")[2]), known)
    return arrived, norms


def structures(model: torch.nn.Module, source: LayerSource) -> Iterator[torch.nn.Module]:
    """Note on each layer of a chunk what its spec builds. Yields the layers that were built for that, one by one."""
    stack = stack_of(source)(model, source)
    for position, layer in enumerate(stack.block.layers):
        built = _built(stack, position, layer.layer_number - 1)
        layer.structure = built.structure
        yield built


def _built(stack: StackOfChunk, position: int, number: int) -> Any:
    """Layer `number` of the model at `position` of its chunk, as its spec builds it."""
    config = stack.block.config
    with _uninitialized(config):
        layer = stack.build(position, number)
    layer = _finished(layer, config).train(stack.block.training)
    assert layer.layer_number == number + 1, "the layout gives another layer than the plan"
    layer.structure = Structure(layer)
    return layer


def groups_of(block: torch.nn.Module) -> Any:
    """The process groups that `block` was built with."""
    return getattr(block, "pg_collection", None)


@contextlib.contextmanager
def _uninitialized(config: Any) -> Iterator[None]:
    """A context in which modules are built without initial values, without drawing random numbers, and without the
    attributes that train() has set on `config`."""
    saved = {name: getattr(config, name) for name in (*SET_LATER, "perform_initialization")}
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
    """Give `module` the attributes, device and precision that Megatron-LM gives a model after building it. Buffers get
    theirs from the old rank (`_register_buffers`)."""
    for parameter in module.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    module.cuda(torch.cuda.current_device())
    if config.fp16 or config.bf16:
        module.half() if config.fp16 else module.bfloat16()
    return module


def complete_ends(
    stages: int, model: torch.nn.Module, source: LayerSource, build: Callable[[Any], torch.nn.Module]
) -> list[torch.nn.Module]:
    """Adapt `model` to a pipeline that has been shortened to `stages` stages.

    The new last stage gets the final norm and the head. They come from a model without layers that `build` makes
    for this stage. All remaining ranks call this together, after their process groups are set. Returns the new modules,
    uninitialized.
    """
    config = model.config
    with source.without_layers(stages), _uninitialized(config):
        fresh = build(model.pg_collection)
    _finished(fresh, config)
    if fresh.pre_process:  # whether its weights are tied to a copy on another stage may have changed
        weight, example = model.embedding.word_embeddings.weight, fresh.embedding.word_embeddings.weight
        for name in ("shared_embedding", "zero_out_wgrad"):
            if hasattr(weight, name):
                delattr(weight, name)
            if hasattr(example, name):
                setattr(weight, name, getattr(example, name))
    if model.post_process or not fresh.post_process:
        return []
    arrived = []
    norm = stack_of(source).norm
    for kept, built, part in ((model, fresh, "output_layer"), (model.decoder, fresh.decoder, norm)):
        kept.__dict__.update({name: value for name, value in vars(built).items() if name not in _OF_EVERY_MODULE})
        setattr(kept, part, getattr(built, part).train(kept.training))
        arrived.append(getattr(kept, part))
    return arrived


def _register_buffers(layers: dict[int, torch.nn.Module], inventories: Sequence[Inventory]) -> None:
    """Register every buffer that a layer had on its old rank, in its type there, including those that other code added
    later."""
    for inventory in inventories:
        for name, (shape, dtype, persistent) in inventory.buffers.items():
            layer = layers.get(layer_of(name))
            if layer is not None:
                path = name.rpartition("@")[0].partition(".")[2]
                owner, _, attribute = path.rpartition(".")
                empty = torch.empty(shape, dtype=dtype, device=torch.cuda.current_device())
                layer.get_submodule(owner).register_buffer(attribute, empty, persistent=persistent)
