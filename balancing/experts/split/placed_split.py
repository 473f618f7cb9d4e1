"""The tables with which micro-batches are split over a placement, built once per placement.

`SplitTables` are NumPy arrays, so that a planning thread can build them while the training thread continues.
`place_all` then copies the tables of all layers to the GPU in one transfer.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from balancing.experts.late import LateCopies
from balancing.experts.placement import ReplicaPlacement, color_by_rank
from balancing.experts.split.routes import route
from balancing.experts.split.split import MOST_RANKS, RankSplit, Splitter, sweeps_of
from balancing.upload import upload

__all__ = ["PlacedSplit", "SplitTables", "kernels_split", "place_all", "split_on_host"]


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


class SplitTables:
    """The tables of one placement, on the host.

    placement: the instances.
    device: where loads are; None for NumPy arrays.
    """

    def __init__(self, placement: ReplicaPlacement, device: torch.device | None) -> None:
        self.placement, self.device = placement, device
        self.expert = np.maximum(placement.phys2log, 0)
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
    expert, kernel_tables: their fields of the same names, on the device.

    Attributes
    placement: the replica placement.
    """

    def __init__(self, tables: SplitTables, expert: Any, kernel_tables: torch.Tensor | None) -> None:
        self.placement, self._device = tables.placement, tables.device
        self._expert, self._splitter, self._kernels = torch.as_tensor(expert), tables.splitter, None
        if kernel_tables is not None:
            from balancing.experts.split.split_kernel import SplitKernels

            sweeps = sweeps_of(tables.placement, tables.classes)
            self._kernels = SplitKernels(tables.placement, tables.classes, sweeps, kernel_tables)

    def split(self, load: Any, sources: range | None = None, permille: int | None = None, least: int = 0) -> RankSplit:
        """Split a load over the instances, and with late slots over late copies.

        load: int [source_rank, expert].
        sources: the source ranks of which `first` and `last` are wanted; None for all.
        permille, least: as in `LateCopies`; None adds no late copies.
        """
        if self._kernels is not None:
            found = self._kernels(load, sources, permille, least)
            return RankSplit._make((*found[:4], *(found[4:] or (self._expert, None))))
        assert self._splitter is not None
        counts = load if self._device is None else load.cpu().numpy()
        found = split_on_host(self._splitter, counts, sources, permille, least)
        if self._device is None:
            return found._replace(expert=self._expert if found.late is None else torch.from_numpy(found.expert))
        return RankSplit(*(None if part is None else upload(part, self._device) for part in found))

    def route(self, *choices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The router's choices by instance, see `routes.route`."""
        return (route if self._kernels is None else self._kernels.route)(*choices)


def split_on_host(
    splitter: Splitter, load: np.ndarray, sources: range | None = None, permille: int | None = None, least: int = 0
) -> RankSplit:
    """`PlacedSplit.split` in NumPy. splitter: over the placement, whose late slots are empty."""
    placed = splitter.placement
    if permille is None or not placed.late_slots:
        served = splitter(load)
    else:
        placed, served = LateCopies(splitter, permille, least).split(load)
    rows = served if sources is None else served[sources.start : sources.stop]
    # Tokens of lower-numbered instances, in an order of physical numbers in which those of an expert are side by side.
    order, starts, places = placed.by_expert
    tokens = rows.take(order, -1)
    first = tokens.cumsum(-1) - tokens
    first = (first - first.take(starts, -1)).take(places, -1)
    of_ranks = served.reshape(len(served), len(served), -1).sum((0, 2))
    late = placed.late if placed.late_slots else None
    return RankSplit(np.ascontiguousarray(served), first, first + rows, of_ranks, np.maximum(placed.phys2log, 0), late)


def place_all(tables: Sequence[SplitTables], device: torch.device | None) -> list[PlacedSplit]:
    """One `PlacedSplit` for each of `tables`, with a single copy to `device`. None keeps them on the host."""
    if device is None or not tables:
        return [PlacedSplit(layer_tables, layer_tables.expert, None) for layer_tables in tables]
    parts = [part for layer_tables in tables for part in _parts(layer_tables)]
    uploaded = iter(upload(np.concatenate(parts), device).split([len(part) for part in parts]))
    placed = []
    for layer_tables in tables:
        expert = next(uploaded)
        kernel_tables = None if layer_tables.kernel_tables is None else next(uploaded).view(torch.int32)
        placed.append(PlacedSplit(layer_tables, expert, kernel_tables))
    return placed


def _parts(tables: SplitTables) -> list[np.ndarray]:
    """The tables as int64 arrays. Two int32 numbers of the kernels' tables make one int64."""
    parts = [tables.expert]
    if tables.kernel_tables is not None:
        odd = len(tables.kernel_tables) % 2
        parts.append(np.append(tables.kernel_tables, np.zeros(odd, dtype=np.int32)).view(np.int64))
    return parts
