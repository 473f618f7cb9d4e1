"""All that a rank holds of layers, by names that do not depend on who holds it, and how it gets to where it belongs.

Weights, every buffer (masks, expert bias, and what others hang on a layer), and the optimizer's state. Tensors travel
one layer after the other, so that a rank that gives layers away has their memory back before the next ones come.
"""

import datetime
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import mpu

from balancing.layers.transfer import Piece, Transfer, exchange, plan_transfers
from megatron.balanced.optimizer_state import ParameterState

__all__ = ["Held", "Told", "bring", "inventory", "named_buffers", "named_parameters", "wanted"]

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_WEIGHT, _BUFFER = "weight", "buffer"

Held = dict[str, tuple[int, torch.Tensor]]  # tensor -> the first element of it that is here, and those that are


@dataclass
class Told:
    """What one rank tells the others before a move.

    scalars: of parameters, by kind. frozen: parameters. buffers: shape, dtype, and whether checkpoints have them.
    """

    pieces: list[Piece] = field(default_factory=list)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)
    buffers: dict[str, tuple[torch.Size, torch.dtype, bool]] = field(default_factory=dict)


class Buffer(NamedTuple):
    """A buffer of a layer: its name among all ranks, and its module with its name there."""

    name: str
    module: torch.nn.Module
    own: str
    tensor: torch.Tensor


def named_parameters(models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters of this rank's chunks, each by the name that any rank has for it that could hold the same.

    Those of the layers begin with the number of their layer; embedding, final norm and head are there once anyway.
    """
    for model in models:
        for name, parameter in model.named_parameters():
            found = _LAYER.fullmatch(name)
            where = f"{model.decoder.layers[int(found[1])].layer_number - 1}.{found[2]}" if found else name
            yield f"{where}@{_coordinates(parameter)}", parameter


def named_buffers(models: Sequence[torch.nn.Module]) -> Iterator[Buffer]:
    """The buffers of this rank's layers, saved in checkpoints or not."""
    for model in models:
        for layer in model.decoder.layers:
            for path, module in layer.named_modules():
                beside = next(module.parameters(recurse=False), None)  # which are sharded alike
                for own, buffer in module.named_buffers(recurse=False):
                    whole = f"{path}.{own}" if path else own
                    yield Buffer(f"{layer.layer_number - 1}.{whole}@{_coordinates(beside)}", module, own, buffer)


def _coordinates(parameter: torch.Tensor | None) -> str:
    """Which part of a sharded tensor this rank holds: ranks of one stage with the same answer hold the same."""
    if parameter is not None and not getattr(parameter, "allreduce", True):
        return f"{mpu.get_expert_tensor_parallel_rank()},{mpu.get_expert_model_parallel_rank()}"
    return str(mpu.get_tensor_model_parallel_rank())


def layer_of(name: str) -> int:
    """The layer, from 0, that a tensor belongs to; -1 for those of no layer."""
    number = name.partition(".")[0]
    return int(number) if number.isdecimal() else -1


def inventory(
    models: Sequence[torch.nn.Module], states: Mapping[torch.nn.Parameter, ParameterState]
) -> tuple[Held, Told]:
    """What this rank holds, and what the others need to know of it. states: what the optimizer knew."""
    held: Held = {}
    told = Told()
    for name, parameter in named_parameters(models):
        held[f"{name}:{_WEIGHT}"] = (0, parameter.data.view(-1))
        if not parameter.requires_grad:
            told.frozen.add(name)
        state = states.get(parameter)
        if state is not None:
            told.scalars[name] = state.scalars
            for kind, tensor in state.tensors.items():
                held[f"{name}:{kind}"] = (state.start, tensor)
    for buffer in named_buffers(models):
        held[f"{buffer.name}:{_BUFFER}"] = (0, buffer.tensor.data.reshape(-1))
        persistent = buffer.own not in buffer.module._non_persistent_buffers_set
        told.buffers[buffer.name] = (buffer.tensor.shape, buffer.tensor.dtype, persistent)
    for name, (start, tensor) in held.items():
        told.pieces.append(Piece(name, dist.get_rank(), start, start + tensor.numel()))
        told.dtypes[name] = tensor.dtype
    return held, told


class Wanted(NamedTuple):
    """What this rank shall hold. targets: where it is to be written, for what has its memory already.

    states: what the optimizer will know of each parameter, its tensors still missing.
    """

    pieces: list[Piece]
    targets: Held
    states: dict[torch.nn.Parameter, ParameterState]


def wanted(
    models: Sequence[torch.nn.Module],
    arrived: Iterable[torch.nn.Module],
    ranges: Mapping[torch.nn.Parameter, tuple[int, int]],
    everyone: Sequence[Told],
) -> Wanted:
    """What is missing in the modules that `arrived`, and the optimizer's state of the elements in `ranges`."""
    rank = dist.get_rank()
    scalars = {name: numbers for told in everyone for name, numbers in told.scalars.items()}
    kinds: dict[str, set[str]] = {}
    for told in everyone:
        for tensor in told.dtypes:
            name, _, kind = tensor.rpartition(":")
            kinds.setdefault(name, set()).add(kind)
    empty = {id(tensor) for module in arrived for tensor in (*module.parameters(), *module.buffers())}
    missing = Wanted([], {}, {})
    tensors = [(f"{name}:{_WEIGHT}", parameter) for name, parameter in named_parameters(models)]
    tensors += [(f"{buffer.name}:{_BUFFER}", buffer.tensor) for buffer in named_buffers(models)]
    for name, tensor in tensors:
        if id(tensor) in empty:
            missing.targets[name] = (0, tensor.data.view(-1))
            missing.pieces.append(Piece(name, rank, 0, tensor.numel()))
    for name, parameter in named_parameters(models):
        if parameter in ranges:
            start, stop = ranges[parameter]
            missing.states[parameter] = ParameterState(start, stop, scalars=scalars.get(name, {}))
            for kind in sorted(kinds[name] - {_WEIGHT, _BUFFER}):
                missing.pieces.append(Piece(f"{name}:{kind}", rank, start, stop))
    return missing


def bring(
    models: Sequence[torch.nn.Module],
    held: Held,
    missing: Wanted,
    everyone: Sequence[Told],
    everybody: Sequence[Piece],
    group: dist.ProcessGroup,
    timeout: datetime.timedelta,
) -> int:
    """Bring everything to where it belongs, and fill in `missing`. `held` is empty afterwards.

    everyone, everybody: what all ranks have, and want. Returns the bytes that this rank sent to others.
    """
    dtypes = {name: dtype for told in everyone for name, dtype in told.dtypes.items()}
    mine = {*held, *(piece.tensor for piece in missing.pieces)}  # nothing else comes from here or goes here
    rounds: dict[int, list[Transfer]] = {}
    for transfer in plan_transfers(
        (piece for told in everyone for piece in told.pieces if piece.tensor in mine),
        (piece for piece in everybody if piece.tensor in mine),
    ):
        rounds.setdefault(layer_of(transfer.tensor), []).append(transfer)
    targets = missing.targets
    sent = 0
    for number in sorted(rounds):
        for piece in missing.pieces:
            if layer_of(piece.tensor) == number and piece.tensor not in targets:
                targets[piece.tensor] = _place(piece, held, dtypes[piece.tensor])
        sent += exchange(
            [transfer for transfer in rounds[number] if not _lies_there(transfer, held, targets)],
            lambda transfer: _part(held[transfer.tensor], transfer),
            lambda transfer: _part(targets[transfer.tensor], transfer),
            group,
            timeout,
        )
        for name in [name for name in held if layer_of(name) == number]:
            del held[name]
    held.clear()
    own = dict(named_parameters(models))
    for piece in missing.pieces:
        name, _, kind = piece.tensor.rpartition(":")
        if kind not in (_WEIGHT, _BUFFER):
            missing.states[own[name]].tensors[kind] = targets[piece.tensor][1]
    return sent


def _place(piece: Piece, held: Held, dtype: torch.dtype) -> tuple[int, torch.Tensor]:
    """Memory for `piece`: where it lies already, if exactly these elements lie on this rank."""
    start, tensor = held.get(piece.tensor, (0, None))
    if tensor is not None and (start, start + tensor.numel()) == (piece.start, piece.stop):
        return start, tensor
    return piece.start, torch.empty(piece.stop - piece.start, dtype=dtype, device=torch.cuda.current_device())


def _lies_there(transfer: Transfer, held: Held, targets: Held) -> bool:
    """Whether a transfer of this rank to itself ends where it begins."""
    if not transfer.source == transfer.target == dist.get_rank():
        return False
    return held[transfer.tensor][1] is targets[transfer.tensor][1]


def _part(tensor: tuple[int, torch.Tensor], transfer: Transfer) -> torch.Tensor:
    start, flat = tensor
    return flat[transfer.start - start : transfer.stop - start]
