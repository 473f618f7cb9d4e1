"""Weights and scales of layers that Transformer Engine computes in 8 bits, as tensors that a move can send.

With --fp8-param-gather a weight is an 8-bit tensor with scales, of a class of Transformer Engine. MXFP8 and blockwise
weights are stored twice, with scales along rows and along columns. A move sends these tensors as they are. With delayed
scaling the scale has changed since the weight was quantized, so quantizing it again would give other numbers.

Delayed scaling derives scales from the largest values of earlier steps. It keeps them on modules, neither as parameters
nor as buffers, and in process-wide lists.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from megatron.core.fp8_utils import is_float8tensor, post_all_gather_processing

__all__ = [
    "Scaling",
    "finish_weights",
    "forget_initial",
    "forget_modules",
    "known_scaling",
    "scaling_of",
    "start_scaling",
    "weight_tensors",
]

_DIRECTIONS = ("scaling_fwd", "scaling_bwd")
_TENSORS = ("scale", "amax_history")
_INDEX = "buffer_index_and_autocast_key"  # where the tensors of a module are in the lists of the process


def weight_tensors(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The flat tensors that `parameter` consists of, by name. They share its memory.

    The transposed copy of a weight with one scale is left out, since it can be made from the weight.
    """
    if not is_float8tensor(parameter):
        return {"weight": parameter.data.view(-1)}
    parts = parameter.get_metadata().items()
    return {
        f"weight.{name}": part.view(-1)
        for name, part in parts
        if isinstance(part, torch.Tensor) and name != "data_transpose"
    }


def finish_weights(parameters: Iterable[torch.Tensor]) -> None:
    """Make the transposed copies of those of `parameters` that have one. Called when their contents have arrived."""
    whole = [parameter for parameter in parameters if is_float8tensor(parameter) and hasattr(parameter, "_transpose")]
    for parameter in whole:
        parameter._reset_caches()
    post_all_gather_processing(whole)


def forget_initial(parameter: torch.Tensor) -> None:
    """Drop the initial weight in higher precision, or Megatron-LM would make a main parameter from it."""
    if hasattr(parameter, "get_high_precision_init_val"):
        parameter.clear_high_precision_init_val()
        del parameter.get_high_precision_init_val, parameter.clear_high_precision_init_val


class Scaling(NamedTuple):
    """A tensor of delayed scaling: the path of its module in the layer, its name there, and the tensor."""

    path: str
    module: torch.nn.Module
    name: str
    tensor: torch.Tensor


def scaling_of(layer: torch.nn.Module) -> Iterator[Scaling]:
    """Scales and largest values of earlier steps in `layer`."""
    for path, module in layer.named_modules():
        meta = getattr(module, "fp8_meta", {})
        for direction in _DIRECTIONS:
            for name in _TENSORS if hasattr(meta.get(direction), "amax_history") else ():
                yield Scaling(path, module, f"{direction}.{name}", getattr(meta[direction], name))


def known_scaling(module: torch.nn.Module) -> dict[str, Any]:
    """What `start_scaling` needs to know of a module with delayed scaling."""
    return {
        name: value
        for name, value in module.fp8_meta.items()
        if isinstance(value, bool | int | float | str | tuple | list) and name != _INDEX
    } | {"recipe": module.fp8_meta["recipe"]}


def start_scaling(module: torch.nn.Module, known: dict[str, Any]) -> None:
    """Give `module`, of a new layer, the tensors of delayed scaling, with undefined contents.

    If weights are stored in 8 bits, the module was built with these tensors and keeps them: weights refer to them.
    """
    module.fp8_meta.update(known)
    module.init_fp8_meta_tensors(known["recipe"])


def forget_modules(chunks: Iterable[torch.nn.Module]) -> None:
    """Clear the lists of modules that quantize. They still have layers that left and lack layers that arrived.

    Megatron-LM tells the modules of its list when weights have changed, and rebuilds the list if there is none. The
    lists of Transformer Engine hold the tensors of delayed scaling of all modules of this process. Modules enter them
    again when they run.

    chunks: the wrapped model chunks of this rank.
    """
    modules = [part for chunk in chunks for part in chunk.modules()]
    for module in modules:
        vars(module).pop("modules_with_is_first_microbatch", None)
    modules = [module for module in modules if _INDEX in getattr(module, "fp8_meta", {})]
    if not modules:
        return
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    state = FP8GlobalStateManager.quantization_state
    for lists in (state.global_amax_buffer, state.global_amax_history_buffer, state.global_scale_buffer):
        lists.clear()
    for module in modules:
        del module.fp8_meta[_INDEX]
