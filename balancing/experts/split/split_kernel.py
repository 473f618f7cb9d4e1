"""The split of `Splitter` on a GPU in one Triton kernel, with exactly the same result.

A split has about six hundred small steps that depend on each other. Launched one by one they take milliseconds between
the router and the dispatcher of every MoE layer, while the GPU is almost idle. One kernel takes them all:

1. Sums: the tokens of each expert.
2. Quotas: equal shares, then water-filling, class by class and sweep by sweep. What a turn reads was asked for one turn
   before, and ranks exchange numbers with those of their expert's chain only.
3. Late copies (`late_kernel`), for placements with late slots.
4. Division of the quotas over source ranks, and the interval of each instance among the tokens of one source rank.

A second launch would cost the host more than the first three steps cost the device. So each program takes them, with
memory of its own, and then divides a part of the experts. Nothing is read from the host, so CUDA graphs may hold it.
"""

import warnings
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from balancing.experts.late import LateCopies
from balancing.experts.placement import ReplicaPlacement, color_by_rank
from balancing.experts.split.kernel_steps import (
    BLOCK,
    CELLS,
    COUNT,
    EXPERT,
    PHYSICAL,
    POSITION,
    RANK,
    ROWS,
    class_cells,
    divide,
    pour,
)
from balancing.experts.split.late_kernel import add_late, late_instances, publish
from balancing.experts.split.launching import launch
from balancing.experts.split.routes import route
from balancing.experts.split.routes_kernel import route_fused
from balancing.experts.split.split import LATE_ROUNDS, LATE_SWEEPS, MOST_RANKS, Splitter
from balancing.upload import upload

__all__ = ["SplitKernels", "kernel_tables", "kernels_work", "launch_options", "split_tokens"]

_PROGRAMS = 128  # at most; fewer than processors of any GPU with which we are used
_SUMMED, _COPIED = tl.constexpr(64), tl.constexpr(512)  # experts that a program adds at once, and instances it copies


def kernel_tables(placement: ReplicaPlacement, classes: list[list[int]]) -> np.ndarray:
    """The tables of a placement that the kernel reads, as one array for a single copy to the device: int32, flat.

    placement: the instances, on at most MOST_RANKS ranks.
    classes: the classes of `color_by_rank`, at least one unless there are late slots.
    """
    assert placement.num_ranks <= MOST_RANKS and (classes or placement.late_slots) and not placement.late_copies
    width, length = _width(placement.num_ranks), _chain(placement)
    chains = placement.chains
    experts = np.array([expert for members in classes for expert in members], dtype=np.int64)
    count = np.array([len(chains[expert]) for expert in experts.tolist()], dtype=np.int64)
    row = np.repeat(np.arange(len(experts)), count)
    expert = experts[row]
    sizes = np.array([len(members) for members in classes], dtype=np.int64)
    class_index = np.repeat(np.repeat(np.arange(len(classes)), sizes), count)
    rank = np.array([rank for expert in experts.tolist() for rank in chains[expert]], dtype=np.int64)
    first = np.cumsum(count) - count
    position, physical = np.arange(len(rank)) - first[row], placement.log2phys[expert, rank]
    by_class = np.full((len(classes), ROWS.value, width), -1, dtype=np.int32)
    by_class[class_index, :, rank] = np.stack((expert, position, physical, count[row]), axis=1)
    chain = np.full((len(experts), length), -1, dtype=np.int8)
    chain[row, position] = rank
    neighbors = np.full((len(classes), length, width), -1, dtype=np.int8)
    neighbors[class_index, :, rank] = chain[row]
    order = np.lexsort((rank, row))  # of ranks, and so of physical numbers
    by_row = np.full((len(experts), CELLS.value, length), -1, dtype=np.int32)
    by_row[row, :, np.arange(len(rank)) - first[row]] = np.stack((rank, position, physical), axis=1)[order]
    by_expert = np.full((2, placement.experts), -1, dtype=np.int32)  # class, and physical number at home
    by_expert[0, expert] = class_index
    by_expert[1] = placement.log2phys[np.arange(placement.experts), placement.home]
    homes = placement.homes_per_rank
    home = placement.phys2log.reshape(placement.num_ranks, -1)[:, :homes].T
    home_only = np.full((triton.next_power_of_2(homes), width), -1, dtype=np.int32)
    home_only[:homes, : placement.num_ranks] = np.where(by_expert[0, home] < 0, home, -1)
    parts = neighbors.reshape(-1).view(np.int32), by_class, home_only, by_expert, placement.phys2log, experts, by_row
    return np.concatenate([part.reshape(-1).astype(np.int32) for part in parts])


class SplitKernels:
    """Splits loads over one placement like `Splitter`, with one launch.

    placement: the instances. With late slots, which are empty in it, late copies can be added as `LateCopies` does.
    classes: number of classes of experts.
    sweeps: how often each class is divided; 0 for equal shares.
    tables: `kernel_tables` of the placement, on the device of the loads.
    """

    route = staticmethod(route_fused)

    def __init__(self, placement: ReplicaPlacement, classes: int, sweeps: int, tables: torch.Tensor) -> None:
        place, width, length = placement, _width(placement.num_ranks), _chain(placement)
        ranks, physicals, late = place.num_ranks, len(place.phys2log), place.late_slots
        rows, local = len(place.chains), physicals // ranks
        self._ranks, self._physicals, self._late = ranks, physicals, late
        words = classes * width * length // 4  # four ranks each
        self._tables = tables[words:], tables[:words].view(torch.int8)
        self._sizes = classes, rows, ranks, place.ranks_per_node, place.experts, local, sweeps
        self._programs = min(_PROGRAMS, max(ranks, rows))
        scratch = place.experts + 2 * classes * width + physicals
        if late:
            scratch += 3 * physicals + place.experts + ranks * late * (1 + width)
        self._scratch = self._programs * scratch
        self._options = launch_options(placement)

    def __call__(
        self, load: torch.Tensor, sources: range | None = None, permille: int | None = None, least: int = 0
    ) -> tuple[torch.Tensor, ...]:
        """Split a load: int [source_rank, expert] on the device.

        sources: the source ranks of which `first` and `last` are wanted; None for all.
        permille, least: as in `LateCopies`; None adds no late copies.

        Returns the fields of `RankSplit` up to `tokens`; with late slots all fields.
        """
        ranks, physicals = self._ranks, self._physicals
        sources = range(ranks) if sources is None else sources
        permille = 1000 * ranks if permille is None else permille  # no rank has more than the tokens of all
        load = load.to(torch.int64).contiguous()
        cells, part = ranks * physicals, len(sources) * physicals
        late = (physicals, ranks * self._late) if self._late else ()
        out = load.new_empty(cells + 2 * part + sum(late))
        tokens, scratch = load.new_empty(ranks), load.new_empty(self._scratch)  # apart, as `out` lives longer
        tensors, sizes = (load, *self._tables, out, tokens, scratch), (sources.start, len(sources), permille, least)
        launch(split_tokens, (self._programs, 1), tensors, self._sizes + sizes, self._options)
        served, first, last, *more = out.split_with_sizes((cells, part, part, *late))
        shape = len(sources), physicals
        split = served.view(ranks, physicals), first.view(shape), last.view(shape), tokens
        return (*split, more[0], more[1].view(ranks, -1)) if more else split


@cache
def kernels_work(ranks: int, device: torch.device, late_slots: int = 0) -> bool:
    """Whether the kernels compile and split sample loads on this device like NumPy. The answer is cached, and so are
    the kernels for all lengths of chains, in memory and by Triton on disk.

    A wrong split would hang a run or change its results. If the answer is no, a warning gives the reason.

    ranks: number of ranks of the sample placement.
    device: where the kernels run. The host waits for it.
    late_slots: of a rank; the kernel of late copies is tried, too, if there are any.
    """
    try:
        lengths = {min(length, ranks) for length in (*_chains(late_slots), ranks)}
        works = _routes_work(device) and all(_works(ranks, device, late_slots, length - 1) for length in lengths)
    except Exception as error:  # from Triton, the compilers that it starts, or the driver
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(f"tokens are split on the host, because Triton fails to compile kernels: {reason}", stacklevel=2)
        return False
    if not works:
        warnings.warn("tokens are split on the host, because the kernels give wrong counts here", stacklevel=2)
    return works


def _works(ranks: int, device: torch.device, late_slots: int, copies: int) -> bool:
    """Whether the kernel splits a sample load like NumPy. copies: replicas of one expert; others have a few."""
    generator, home = np.random.default_rng(0), np.arange(2 * ranks) // 2
    slots = np.stack([generator.choice(np.flatnonzero(home != rank), 2, replace=False) for rank in range(ranks)])
    slots[(slots == 0).any(1)] = -1
    slots[1 : 1 + copies, 0] = 0
    placement = ReplicaPlacement(home, slots, ranks_per_node=-(-ranks // 2))
    placement = placement.with_late(np.full((ranks, late_slots), -1))
    load = generator.integers(0, 1000, (ranks, 2 * ranks))
    load[:, :2] *= 3  # more than its replicas can take
    classes, splitter = color_by_rank(placement), Splitter(placement, sweeps=4)
    tables, there = upload(kernel_tables(placement, classes), device), torch.from_numpy(load).to(device)
    kernels = SplitKernels(placement, len(classes), 4, tables)
    expected = LateCopies(splitter, 1000, 0)(load.sum(0)) if late_slots else splitter
    launches = 1 if device.type == "cpu" else 2  # the second finds the kernel of the first
    return all(np.array_equal(kernels(there, None, 1000)[0].cpu().numpy(), expected(load)) for _ in range(launches))


def _routes_work(device: torch.device) -> bool:
    """Whether `route_fused` does what `route` does with a sample, in values and gradients."""
    drawn = torch.Generator().manual_seed(0)
    chosen, probs = torch.rand(600, 5, generator=drawn) < 0.5, torch.rand(600, 5, generator=drawn)
    expert, first = torch.arange(40) % 5, torch.randint(0, 250, (40,), generator=drawn)
    split = [x.to(device) for x in (expert, first, first + torch.randint(0, 60, (40,), generator=drawn))]
    chosen, ours, theirs = chosen.to(device), *(probs.to(device).requires_grad_() for _ in range(2))
    found, expected = route_fused(chosen, ours, *split), route(chosen, theirs, *split)
    weights = torch.rand(found[1].shape, generator=drawn).to(device) * found[0]
    for given in (found[1], expected[1]):
        given.backward(weights)
    assert ours.grad is not None and theirs.grad is not None
    pairs = (*zip(found, expected, strict=True), (ours.grad, theirs.grad))
    return all(torch.allclose(mine.float(), other.float()) for mine, other in pairs)


def _width(ranks: int) -> int:
    """Length of a vector over ranks: a power of two."""
    return max(16, triton.next_power_of_2(ranks))


def _chains(late_slots: int) -> tuple[int, ...]:
    """Lengths of chains for which the kernel is compiled, apart from all ranks. With late copies that takes long."""
    return (8,) if late_slots else (8, 32)


def _chain(placement: ReplicaPlacement) -> int:
    """Length of a vector over the instances of an expert: a power of two."""
    longest, width = max(map(len, placement.chains.values()), default=1), _width(placement.num_ranks)
    return next((length for length in _chains(placement.late_slots) if longest <= length <= width), width)


def launch_options(placement: ReplicaPlacement) -> dict[str, Any]:
    """Constants of `split_tokens` for a placement, and compile options with which vectors fit the registers."""
    width, length, late = _width(placement.num_ranks), _chain(placement), placement.late_slots
    local = len(placement.phys2log) // placement.num_ranks
    sizes = placement.homes_per_rank, local
    constants = (width, length, *map(triton.next_power_of_2, sizes), late, LATE_ROUNDS, LATE_SWEEPS)
    # A thread has a rank and up to 16 instances of its expert. Late copies take pairs of ranks.
    warps = max(width // 32 * max(1, length // 16), width // 8 if late else 1)
    # The kernel has no floating-point operations, but without enable_fp_fusion Triton warns.
    compiled = {"num_warps": min(16, warps), "num_stages": 1, "enable_fp_fusion": False}
    return dict(zip(_CONSTANTS, constants, strict=True)) | compiled


_CONSTANTS = "WIDTH", "CHAIN", "HOMES", "LOCALS", "LATE", "ROUNDS", "SWEEPS"


@triton.jit(
    do_not_specialize=[
        *("load", "tables", "neighbors", "out", "tokens", "scratch", "classes", "rows", "ranks", "per_node", "experts"),
        *("local", "sweeps", "source", "sources", "permille", "least"),
    ]
)
def split_tokens(
    load, tables, neighbors, out, tokens, scratch, classes, rows, ranks, per_node, experts, local, sweeps, source,
    sources, permille, least, WIDTH: tl.constexpr, CHAIN: tl.constexpr, HOMES: tl.constexpr, LOCALS: tl.constexpr,
    LATE: tl.constexpr, ROUNDS: tl.constexpr, SWEEPS: tl.constexpr,
):  # fmt: skip
    """Split a load. Each program divides a part of the experts.

    load: int64 [source_rank, expert]. tables, neighbors: of `kernel_tables`.
    out: int64, written: `served`, `first` and `last` of `RankSplit`, and with late slots `expert` and `late`.
    tokens: int64 [rank], written. scratch: int64, for this kernel alone.
    classes, rows: numbers of classes and of experts with replicas. local: physical experts of a rank, at most LOCALS.
    source, sources: the first row of `first` and `last`, and their number.
    """
    program, programs, rank = tl.program_id(0), tl.num_programs(0), tl.arange(0, WIDTH)
    physicals = ranks * local
    by_class, homes = tables, tables + classes * ROWS * WIDTH
    by_expert = homes + HOMES * WIDTH
    planned = by_expert + 2 * experts
    by_row = planned + physicals + rows
    served, first = out, out + ranks * physicals
    last = first + sources * physicals
    size = experts + 2 * classes * WIDTH + physicals
    if LATE:
        size += 3 * physicals + experts + ranks * LATE * (1 + WIDTH)
    totals = scratch + program.to(tl.int64) * size
    shares = totals + experts
    cells, quota = shares + classes * WIDTH, shares + 2 * classes * WIDTH
    names = quota + physicals
    is_late, turns = names + physicals, names + physicals + experts
    held = turns + ranks * LATE
    before = held + ranks * LATE * WIDTH

    # Tokens of each expert.
    for start in range(0, experts, _SUMMED):
        expert = start + tl.arange(0, _SUMMED)
        real = expert < experts
        at = load + rank[:, None] * experts + expert[None, :]
        counts = tl.load(at, mask=(rank < ranks)[:, None] & real[None, :], other=0)
        tl.store(totals + expert, tl.sum(counts, 0), mask=real)
    home = tl.load(homes + tl.arange(0, HOMES)[:, None] * WIDTH + rank[None, :])
    tl.debug_barrier()
    busy = tl.sum(tl.load(totals + home, mask=home >= 0, other=0), 0)  # tokens of each rank, with the shares so far
    # Equal shares, remainders to the first instances.
    for start in range(0, classes, BLOCK):
        index = start + tl.arange(0, BLOCK)[:, None]
        row, cell = by_class + index * ROWS * WIDTH + rank[None, :], index * WIDTH + rank[None, :]
        real = index < classes
        expert = tl.load(row + EXPERT * WIDTH, mask=real, other=-1)
        count = tl.maximum(tl.load(row + COUNT * WIDTH, mask=real, other=1), 1)
        position = tl.load(row + POSITION * WIDTH, mask=real, other=0)
        total = tl.load(totals + expert, mask=expert >= 0, other=-1)
        share = tl.where(expert >= 0, total // count + (position < total % count), 0)
        tl.store(cells + cell, total, mask=real)
        tl.store(shares + cell, share, mask=real)
        busy += tl.sum(share, 0)
    tl.debug_barrier()
    share, total, position, chain = class_cells(shares, cells, by_class, neighbors, 0, classes, WIDTH, CHAIN)
    for turn in range(classes * sweeps):
        tl.debug_barrier()  # other threads have written the shares that are read next
        read, total_next, position_next, chain_next = class_cells(
            shares, cells, by_class, neighbors, (turn + 1) % classes, classes, WIDTH, CHAIN
        )
        poured = pour(busy, share, total, position, chain, turn >= classes * (sweeps - 1))
        tl.store(shares + turn % classes * WIDTH + rank, poured)
        busy += poured - share
        share = tl.where(classes > 1, read, poured)  # a single class was read before it was written
        total, position, chain = total_next, position_next, chain_next
    tl.debug_barrier()
    publish(shares, cells, quota, by_class, classes, WIDTH)
    number = 0  # of experts with late copies
    if LATE:
        at_home = rank[None, :] * local + tl.arange(0, HOMES)[:, None]
        tl.store(quota + at_home, tl.load(totals + home, mask=home >= 0, other=0), mask=home >= 0)
        tl.debug_barrier()
        busy, number = add_late(
            busy, totals, shares, cells, quota, names, is_late, turns, held, before, before + physicals, planned,
            by_class, by_expert, neighbors, classes, ranks, per_node, experts, local, permille, least, WIDTH, CHAIN,
            LOCALS, LATE, ROUNDS, SWEEPS,
        )  # fmt: skip
    tl.debug_barrier()

    # Each program divides some of the experts with several instances, and copies the other counts of some sources.
    each = tl.arange(0, CHAIN)
    for row in range(program, rows, programs):
        expert = tl.load(planned + physicals + row)
        divides = True
        if LATE:
            divides = tl.load(is_late + expert) == 0
        if divides:
            instance = by_row + row * CELLS * CHAIN + each
            at = tl.load(instance + RANK * CHAIN)
            divide(
                load, quota, served, first, last, expert, at, tl.load(instance + POSITION * CHAIN),
                tl.load(instance + PHYSICAL * CHAIN), at >= 0, ranks, per_node, experts, physicals, source, sources,
                WIDTH,
            )  # fmt: skip
    if LATE:
        for turn in range(program, number, programs):
            has, in_chain, physical = late_instances(held, turn, WIDTH)
            divide(
                load, quota, served, first, last, tl.load(turns + turn), rank, in_chain, physical, has, ranks, per_node,
                experts, physicals, source, sources, WIDTH,
            )  # fmt: skip
    for of in range(program, ranks, programs):
        for start in range(0, physicals, _COPIED):
            column = start + tl.arange(0, _COPIED)
            real = column < physicals
            name = tl.load(planned + column, mask=real, other=-1)
            alone = tl.load(by_expert + name, mask=name >= 0, other=-1) < 0
            if LATE:
                alone &= tl.load(is_late + name, mask=name >= 0, other=0) == 0
                alone &= (name >= 0) | (tl.load(names + column, mask=real, other=-1) < 0)
            given = tl.load(load + of * experts + name, mask=alone & (name >= 0), other=0)
            tl.store(served + of * physicals + column, given, mask=real & alone)
            mask = real & alone & (of >= source) & (of < source + sources)
            at = (of - source) * physicals + column
            tl.store(first + at, given * 0, mask=mask)
            tl.store(last + at, given, mask=mask)
    if program == 0:
        tl.store(tokens + rank, busy, mask=rank < ranks)
        if LATE:
            expert = last + sources * physicals
            for start in range(0, physicals, WIDTH):
                real = start + rank < physicals
                name = tl.load(names + start + rank, mask=real, other=0)
                tl.store(expert + start + rank, tl.maximum(name, 0), mask=real)
            for slot in tl.static_range(LATE):
                name = tl.load(names + (rank + 1) * local - LATE + slot, mask=rank < ranks, other=-1)
                tl.store(expert + physicals + rank * LATE + slot, name, mask=rank < ranks)
