"""The tables with which micro-batches are split over a placement, built once per placement.

`SplitTables` are NumPy arrays, so that a planning thread can build them while the training thread continues.
`place_all` then copies the tables of all layers to the GPU in one transfer.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from balancing.experts.late import LateCopies
from balancing.experts.placement import ReplicaPlacement, color_by_rank
from balancing.experts.split.split import MOST_RANKS, Splitter, run_starts, sweeps_of
from balancing.upload import upload

__all__ = ["LateSplit", "PlacedSplit", "SplitTables", "kernels_split", "place_all"]


def kernels_split(placement: ReplicaPlacement, device: torch.device | None) -> bool:
    """Whether GPU kernels split loads over `placement`. The first call for a device compiles the kernels.

    Otherwise NumPy splits them, and the host waits for each load of a GPU. That is so with more than MOST_RANKS ranks,
    with Pro-Prophet's split rule ("own"), and without a working Triton.
    """
    if device is None or placement.split == "own" or placement.num_ranks > MOST_RANKS:
        return False
    try:
        from balancing.experts.split import split_kernel
    except ImportError:
        return False
    return split_kernel.kernels_work(placement.num_ranks, device, placement.late_slots)


class LateSplit(NamedTuple):
    """A split with late copies: NumPy arrays, or tensors on the device of the loads.

    served: int64 [source_rank, physical], tokens of each source rank that each instance serves.
    before: int64 [source_rank, physical], tokens of lower-numbered instances of the same expert (`tokens_before`).
    expert: int64 [physical], the expert of each physical number; 0 for an empty slot.
    late: int64 [rank, late slot], the expert in each late slot, -1 in empty ones.
    """

    served: Any
    before: Any
    expert: Any
    late: Any


class SplitTables:
    """The tables of one placement, on the host.

    placement: the instances.
    device: where loads are; None for NumPy arrays.
    """

    def __init__(self, placement: ReplicaPlacement, device: torch.device | None) -> None:
        self.placement, self.device = placement, device
        self.indices = _indices(placement)
        self.splitter: Splitter | None = None
        self.kernel_tables: np.ndarray | None = None
        if (placement.replicas or placement.late_slots) and kernels_split(placement, device):
            from balancing.experts.split.split_kernel import kernel_tables

            classes = color_by_rank(placement)
            self.classes = len(classes)
            self.kernel_tables = kernel_tables(placement, classes)
        else:
            self.splitter = Splitter(placement)


class PlacedSplit:
    """Splits loads over one placement. Loads are NumPy arrays, or tensors on the device of the tables.

    tables: the tables of the placement.
    indices, kernel_tables: their fields of the same names, on the device.

    Attributes
    placement: the replica placement.
    expert: int64 tensor [physical], the logical expert of each physical expert; 0 for an empty slot.
    """

    def __init__(self, tables: SplitTables, indices: Any, kernel_tables: torch.Tensor | None) -> None:
        self.placement, self._device = tables.placement, tables.device
        self._order, self._ends = indices[1], indices[2:].reshape(-1)
        self.expert: torch.Tensor = torch.as_tensor(indices[0])
        self._tables, self._splitter, self._kernels = tables, tables.splitter, None
        if kernel_tables is not None:
            from balancing.experts.split.split_kernel import SplitKernels

            sweeps = sweeps_of(tables.placement, tables.classes)
            self._kernels = SplitKernels(tables.placement, tables.classes, sweeps, kernel_tables)

    def split(self, load: Any) -> Any:
        """Tokens of each source rank that each instance serves: int64 [source_rank, physical].

        load: int [source_rank, expert].
        """
        if self._kernels is not None:
            return self._kernels(load)
        assert self._splitter is not None
        if self._device is None:
            return self._splitter(load)
        return upload(self._splitter(load.cpu().numpy()), self._device)

    def split_late(self, load: Any, permille: int, least: int) -> LateSplit:
        """Split a load over the instances and late copies, for a placement with late slots.

        load: int [source_rank, expert].
        permille, least: as in `LateCopies`.
        """
        place = self.placement
        assert place.late_slots and not place.late_copies
        if self._kernels is not None:
            served, before, names = self._kernels.with_late(load, permille, least)
            return LateSplit(served, before, names.clamp(min=0), names.view(len(load), -1)[:, -place.late_slots :])
        assert self._splitter is not None
        counts = load if self._device is None else load.cpu().numpy()
        placed, tokens = LateCopies(self._splitter, permille, least).split(counts)
        expert, order, *ends = self._tables.indices if placed is place else _indices(placed)
        found = tokens, _tokens_before(tokens, order, np.concatenate(ends)), expert, placed.late
        device = self._device
        return LateSplit(*(found if device is None else [upload(np.ascontiguousarray(part), device) for part in found]))

    def tokens_before(self, served: Any) -> Any:
        """For each instance, the tokens of lower-numbered instances of the same logical expert: int [.., physical].

        served: int [.., physical], tokens of each instance.
        """
        return _tokens_before(served, self._order, self._ends)


def _indices(placement: ReplicaPlacement) -> np.ndarray:
    """The tables of `tokens_before`: int64 [4, physical]. The logical expert, an order of physical numbers that puts
    instances of an expert side by side, and in it the position of each, and of the expert's first."""
    order = np.argsort(placement.phys2log, kind="stable")
    first, back = run_starts(placement.phys2log[order]), np.argsort(order)
    return np.stack([np.maximum(placement.phys2log, 0), order, back, first[back]])


def _tokens_before(served: Any, order: Any, ends: Any) -> Any:
    """`PlacedSplit.tokens_before`. order, ends: of `_indices`, the last two rows one after the other."""
    if isinstance(order, np.ndarray):
        tokens: Any = served.take(order, -1)
        ends = (tokens.cumsum(-1) - tokens).take(ends, -1)
    else:
        tokens = served.index_select(-1, order)
        ends = (tokens.cumsum(-1) - tokens).index_select(-1, ends)
    number = len(order)
    return ends[..., :number] - ends[..., number:]


def place_all(tables: Sequence[SplitTables], device: torch.device | None) -> list[PlacedSplit]:
    """One `PlacedSplit` for each of `tables`, with a single copy to `device`. None keeps them on the host."""
    if device is None or not tables:
        return [PlacedSplit(layer_tables, layer_tables.indices, None) for layer_tables in tables]
    parts = [part for layer_tables in tables for part in _parts(layer_tables)]
    uploaded = iter(upload(np.concatenate(parts), device).split([len(part) for part in parts]))
    placed = []
    for layer_tables in tables:
        indices = next(uploaded).view(layer_tables.indices.shape)
        kernel_tables = None if layer_tables.kernel_tables is None else next(uploaded).view(torch.int32)
        placed.append(PlacedSplit(layer_tables, indices, kernel_tables))
    return placed


def _parts(tables: SplitTables) -> list[np.ndarray]:
    """The tables as int64 arrays. Two int32 numbers of the kernels' tables make one int64."""
    parts = [tables.indices.reshape(-1)]
    if tables.kernel_tables is not None:
        odd = len(tables.kernel_tables) % 2
        parts.append(np.append(tables.kernel_tables, np.zeros(odd, dtype=np.int32)).view(np.int64))
    return parts
