"""The tensors of layers on this rank, under names that all ranks share, and their transfer when layers move.

These are weights, buffers (masks, expert bias, and those that other code registers on a layer), the state of delayed
scaling (`megatron.balanced.layers.quantized`), and optimizer state. Layers are transferred one after the other, so a
rank frees the memory of a layer that it sent before the next one arrives.
"""

import datetime
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import mpu

from balancing.layers.transfer import Piece, Transfer, plan_transfers, run_transfers
from megatron.balanced.layers.quantized import Scaling, known_scaling, scaling_of, weight_tensors
from megatron.balanced.shared.optimizer_state import ParameterState

__all__ = [
    "Inventory",
    "Request",
    "Shards",
    "find_weights",
    "layer_of",
    "make_request",
    "named_buffers",
    "named_parameters",
    "take_inventory",
    "transfer",
]

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_WEIGHT, _BUFFER, _SCALING = "weight", "buffer", "scaling"  # a weight in 8 bits has several kinds: weight.data, ...

_LITTLE = 0.05  # of the device's memory: when less is free, cached memory is given back

Shards = dict[str, tuple[int, torch.Tensor]]  # name of a tensor -> first element on this rank, and the elements


@dataclass
class Inventory:
    """A description of the tensors of one rank, sent to all ranks before a move.

    pieces: the elements that the rank holds.
    dtypes: name of a tensor -> its type.
    scalars: name of a parameter -> scalars of its optimizer state, by kind.
    frozen: names of parameters without gradients.
    buffers: name -> shape, type, and whether checkpoints contain it.
    scaling: module of a layer -> settings of its delayed scaling (`known_scaling`).
    """

    pieces: list[Piece] = field(default_factory=list)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)
    buffers: dict[str, tuple[torch.Size, torch.dtype, bool]] = field(default_factory=dict)
    scaling: dict[str, dict[str, Any]] = field(default_factory=dict)


class Buffer(NamedTuple):
    """A buffer of a layer: its name on all ranks, its module, and its name in the module."""

    name: str
    module: torch.nn.Module
    attribute: str
    tensor: torch.Tensor


def named_parameters(models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters of this rank's chunks with names that all ranks share.

    Names of layers' parameters begin with the global number of the layer; embedding, final norm and head exist once.
    """
    for model in models:
        for name, parameter in model.named_parameters():
            match = _LAYER.fullmatch(name)
            where = f"{model.decoder.layers[int(match[1])].layer_number - 1}.{match[2]}" if match else name
            yield f"{where}@{_coordinates(parameter)}", parameter


def named_buffers(models: Sequence[torch.nn.Module]) -> Iterator[Buffer]:
    """The buffers of this rank's layers, saved in checkpoints or not."""
    for model in models:
        for layer in model.decoder.layers:
            for path, module in layer.named_modules():
                beside = next(module.parameters(recurse=False), None)  # sharded in the same way
                for name, buffer in module.named_buffers(recurse=False):
                    whole = f"{path}.{name}" if path else name
                    yield Buffer(f"{layer.layer_number - 1}.{whole}@{_coordinates(beside)}", module, name, buffer)


def named_scaling(models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Scaling]]:
    """The tensors of delayed scaling of this rank's layers, with names that all ranks share."""
    for model in models:
        for layer in model.decoder.layers:
            for scaling in scaling_of(layer):
                beside = next(scaling.module.parameters(recurse=False), None)
                yield f"{layer.layer_number - 1}.{scaling.path}.{scaling.name}@{_coordinates(beside)}", scaling


def _coordinates(parameter: torch.Tensor | None) -> str:
    """The shard of `parameter` that this rank holds: ranks of one stage with equal coordinates hold equal tensors."""
    if parameter is not None and not getattr(parameter, "allreduce", True):
        return f"{mpu.get_expert_tensor_parallel_rank()},{mpu.get_expert_model_parallel_rank()}"
    return str(mpu.get_tensor_model_parallel_rank())


def layer_of(name: str) -> int:
    """The layer, from 0, that a tensor belongs to; -1 for those of no layer."""
    number = name.partition(".")[0]
    return int(number) if number.isdecimal() else -1


def take_inventory(
    models: Sequence[torch.nn.Module], states: Mapping[torch.nn.Parameter, ParameterState]
) -> tuple[Shards, Inventory]:
    """The tensors of this rank, and the inventory of them. states: taken out of the optimizer."""
    shards: Shards = {}
    inventory = Inventory()
    for name, parameter in named_parameters(models):
        shards |= {f"{name}:{kind}": (0, tensor) for kind, tensor in weight_tensors(parameter).items()}
        if not parameter.requires_grad:
            inventory.frozen.add(name)
        state = states.get(parameter)
        if state is not None:
            inventory.scalars[name] = state.scalars
            for kind, tensor in state.tensors.items():
                shards[f"{name}:{kind}"] = (state.start, tensor)
    for buffer in named_buffers(models):
        shards[f"{buffer.name}:{_BUFFER}"] = (0, buffer.tensor.data.reshape(-1))
        persistent = buffer.attribute not in buffer.module._non_persistent_buffers_set
        inventory.buffers[buffer.name] = (buffer.tensor.shape, buffer.tensor.dtype, persistent)
    for name, scaling in named_scaling(models):
        shards[f"{name}:{_SCALING}"] = (0, scaling.tensor.view(-1))
        inventory.scaling[f"{layer_of(name)}.{scaling.path}"] = known_scaling(scaling.module)
    for name, (start, tensor) in shards.items():
        inventory.pieces.append(Piece(name, dist.get_rank(), start, start + tensor.numel()))
        inventory.dtypes[name] = tensor.dtype
    return shards, inventory


def find_weights(models: Sequence[torch.nn.Module], arrived: Iterable[torch.nn.Module], shards: Shards) -> None:
    """Update `shards` to the present memory of weights. arrived: modules whose weights have no content yet."""
    empty = {parameter for module in arrived for parameter in module.parameters()}
    for name, parameter in named_parameters(models):
        if parameter not in empty:
            shards |= {f"{name}:{kind}": (0, tensor) for kind, tensor in weight_tensors(parameter).items()}


@dataclass
class Request:
    """The tensors that this rank needs after a move.

    pieces: the elements.
    targets: the tensors to write to, where memory is allocated already.
    states: parameter -> its optimizer state, whose tensors `transfer` fills in.
    state_of: name of a tensor of optimizer state -> the state, and the kind of the tensor in it.
    """

    pieces: list[Piece] = field(default_factory=list)
    targets: Shards = field(default_factory=dict)
    states: dict[torch.nn.Parameter, ParameterState] = field(default_factory=dict)
    state_of: dict[str, tuple[ParameterState, str]] = field(default_factory=dict)


def make_request(
    models: Sequence[torch.nn.Module],
    arrived: Iterable[torch.nn.Module],
    ranges: Mapping[torch.nn.Parameter, tuple[int, int]],
    inventories: Sequence[Inventory],
) -> Request:
    """Request the tensors of modules that `arrived`, and optimizer state.

    models: the chunks of this rank, with the layers that they have after the move.
    arrived: the modules among them whose tensors have no content yet.
    ranges: parameter -> elements, start and stop, whose optimizer state this rank keeps after the move.
    inventories: inventories of all ranks.
    """
    rank = dist.get_rank()
    scalars = {name: numbers for inventory in inventories for name, numbers in inventory.scalars.items()}
    kinds: dict[str, set[str]] = {}
    for inventory in inventories:
        for tensor in inventory.dtypes:
            name, _, kind = tensor.rpartition(":")
            kinds.setdefault(name, set()).add(kind)
    empty = {id(tensor) for module in arrived for tensor in (*module.parameters(), *module.buffers())}
    new = {id(part) for module in arrived for part in module.modules()}
    request = Request()
    tensors = [
        (f"{name}:{kind}", tensor)
        for name, parameter in named_parameters(models)
        if id(parameter) in empty
        for kind, tensor in weight_tensors(parameter).items()
    ]
    tensors += [
        (f"{buffer.name}:{_BUFFER}", buffer.tensor.data)
        for buffer in named_buffers(models)
        if id(buffer.tensor) in empty
    ]
    tensors += [
        (f"{name}:{_SCALING}", scaling.tensor) for name, scaling in named_scaling(models) if id(scaling.module) in new
    ]
    for name, tensor in tensors:
        request.targets[name] = (0, tensor.view(-1))
        request.pieces.append(Piece(name, rank, 0, tensor.numel()))
    for name, parameter in named_parameters(models):
        if parameter in ranges:
            start, stop = ranges[parameter]
            state = ParameterState(start, stop, scalars=scalars.get(name, {}))
            request.states[parameter] = state
            for kind in sorted(filter(_is_state, kinds[name])):
                request.pieces.append(Piece(f"{name}:{kind}", rank, start, stop))
                request.state_of[f"{name}:{kind}"] = state, kind
    return request


def transfer(
    shards: Shards,
    request: Request,
    inventories: Sequence[Inventory],
    requests: Sequence[Piece],
    process_group: dist.ProcessGroup,
    timeout: datetime.timedelta,
) -> int:
    """Send and receive the tensors of all layers that move, and fill in `request`.

    shards: the tensors of this rank; empty afterwards.
    inventories, requests: of all ranks.
    process_group: all ranks of the job, connected by an earlier collective.
    timeout: timeout of each wait.

    Returns the bytes that this rank sent to others.
    """
    dtypes = {name: dtype for inventory in inventories for name, dtype in inventory.dtypes.items()}
    named = {*shards, *(piece.tensor for piece in request.pieces)}  # no other tensor leaves or reaches this rank
    rounds: dict[int, list[Transfer]] = {}
    for planned in plan_transfers(
        (piece for inventory in inventories for piece in inventory.pieces if piece.tensor in named),
        (piece for piece in requests if piece.tensor in named),
    ):
        rounds.setdefault(layer_of(planned.tensor), []).append(planned)
    targets = request.targets
    sent = 0
    for number in sorted(rounds):
        for piece in request.pieces:
            if layer_of(piece.tensor) == number and piece.tensor not in targets:
                targets[piece.tensor] = _memory_for(piece, shards, dtypes[piece.tensor])
        sent += run_transfers(
            [planned for planned in rounds[number] if not _is_in_place(planned, shards, targets)],
            lambda planned: _elements(shards[planned.tensor], planned),
            lambda planned: _elements(targets[planned.tensor], planned),
            process_group,
            timeout,
        )
        for name in [name for name in shards if layer_of(name) == number]:
            del shards[name]
        _give_cache_back()
    shards.clear()
    for name, (state, kind) in request.state_of.items():
        state.tensors[kind] = targets[name][1]
    return sent


def _give_cache_back() -> None:
    """Return cached memory to a device with little free memory. Shards of another size do not fit into the cached
    memory of an earlier layer."""
    free, total = torch.cuda.mem_get_info()
    if free < _LITTLE * total:
        torch.cuda.empty_cache()


def _is_state(kind: str) -> bool:
    """Whether tensors of this kind are state of the optimizer."""
    return kind not in (_BUFFER, _SCALING) and kind.partition(".")[0] != _WEIGHT


def _memory_for(piece: Piece, shards: Shards, dtype: torch.dtype) -> tuple[int, torch.Tensor]:
    """Memory for `piece`: the tensor in `shards` if it has exactly these elements, else a new one."""
    start, tensor = shards.get(piece.tensor, (0, None))
    if tensor is not None and (start, start + tensor.numel()) == (piece.start, piece.stop):
        return start, tensor
    return piece.start, torch.empty(piece.stop - piece.start, dtype=dtype, device=torch.cuda.current_device())


def _is_in_place(planned: Transfer, shards: Shards, targets: Shards) -> bool:
    """Whether a transfer of this rank to itself has one tensor as source and target."""
    if not planned.source == planned.target == dist.get_rank():
        return False
    return shards[planned.tensor][1] is targets[planned.tensor][1]


def _elements(shard: tuple[int, torch.Tensor], planned: Transfer) -> torch.Tensor:
    start, flat = shard
    return flat[planned.start - start : planned.stop - start]
