"""The split of `Splitter` on a GPU in two Triton kernels, with exactly the same result.

A split has about six hundred small steps that depend on each other. Launched one by one they take milliseconds between
the router and the dispatcher of every MoE layer, while the GPU is almost idle. Here the kernel `balance` computes the
quotas in one program. The kernel `divide` divides them over source ranks in one program per expert.

All vectors are over ranks. An expert has at most one instance on a rank, and the experts of a class share no rank.
Therefore an instance is identified by its rank, and all experts of a class fit one vector. A sort or a sum over the
instances of an expert is a masked sum over pairs of ranks. Pairs of ranks must fit the registers, so the number of
ranks is limited.
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
from balancing.experts.split.kernel_steps import COUNT, EXPERT, PHYSICAL, POSITION, ROWS, instances, pour
from balancing.experts.split.late_kernel import add_late
from balancing.experts.split.split import LATE_ROUNDS, LATE_SWEEPS, MOST_RANKS, Splitter
from balancing.upload import upload

__all__ = [
    "SplitKernels",
    "balance",
    "divide",
    "kernel_tables",
    "kernels_work",
    "launch_options",
]


def kernel_tables(placement: ReplicaPlacement, classes: list[list[int]]) -> np.ndarray:
    """The tables of a placement that the kernels read, as one array for a single copy to the device: int32, flat.

    placement: the instances, on at most MOST_RANKS ranks.
    classes: the classes of `color_by_rank`, at least one unless there are late slots.
    """
    assert placement.num_ranks <= MOST_RANKS and (classes or placement.late_slots) and not placement.late_copies
    width = _width(placement.num_ranks)
    chains, homes = placement.chains, placement.homes_per_rank
    experts = np.array([expert for members in classes for expert in members], dtype=np.int64)
    count = np.array([len(chains[expert]) for expert in experts.tolist()], dtype=np.int64)
    expert = np.repeat(experts, count)
    sizes = np.array([len(members) for members in classes], dtype=np.int64)
    class_index = np.repeat(np.repeat(np.arange(len(classes)), sizes), count)
    rank = np.array([rank for expert in experts.tolist() for rank in chains[expert]], dtype=np.int64)
    position = np.arange(len(rank)) - np.repeat(np.cumsum(count) - count, count)
    class_tables = np.full((len(classes), ROWS.value, width), -1, dtype=np.int32)
    rows = expert, position, np.repeat(count, count), placement.log2phys[expert, rank]
    class_tables[class_index, :, rank] = np.stack(rows, axis=1)
    by_expert = np.full((2, placement.experts), -1, dtype=np.int32)  # class, and physical number at home
    by_expert[0, expert] = class_index
    by_expert[1] = placement.log2phys[np.arange(placement.experts), placement.home]
    home = placement.phys2log.reshape(placement.num_ranks, -1)[:, :homes].T
    home_only = np.full((homes, width), -1, dtype=np.int32)
    home_only[:, : placement.num_ranks] = np.where(by_expert[0, home] < 0, home, -1)
    parts = class_tables, home_only, by_expert, placement.phys2log.astype(np.int32)
    return np.concatenate([part.reshape(-1) for part in parts])


class SplitKernels:
    """Splits loads over one placement like `Splitter`. A call launches a sum, a fill and the two kernels.

    placement: the instances.
    classes: number of classes of experts.
    sweeps: how often each class is divided; 0 for equal shares.
    tables: `kernel_tables` of the placement, on the device of the loads.
    """

    def __init__(self, placement: ReplicaPlacement, classes: int, sweeps: int, tables: torch.Tensor) -> None:
        self._placement, self._classes, self._sweeps, self._tables = placement, classes, sweeps, tables
        self._options = launch_options(_width(placement.num_ranks))

    def __call__(self, load: torch.Tensor) -> torch.Tensor:
        """Split a load: int [source_rank, expert] on the device -> int64 [source_rank, physical]."""
        load = load.to(torch.int64).contiguous()
        with torch.cuda.device_of(load):
            quota = self._quotas(load.sum(0))
            return self._divide(load, quota)

    def with_late(self, load: torch.Tensor, permille: int, least: int) -> tuple[torch.Tensor, ...]:
        """Split a load over the instances and late copies, as `LateCopies` does, for a placement with late slots, which
        are empty in it. One kernel more than a split.

        load: int [source_rank, expert] on the device.
        permille, least: as in `LateCopies`.

        Returns `served` and `before` of `LateSplit`; and the expert of each physical number, int64 [physical], -1 for
        an empty slot.
        """
        place, load = self._placement, load.to(torch.int64).contiguous()
        names = load.new_empty(len(place.phys2log))
        scratch = load.new_empty(2 * len(names) + place.experts + place.num_ranks * place.late_slots)
        widths = {"LOCALS": triton.next_power_of_2(len(names) // place.num_ranks), "LATE": place.late_slots}
        with torch.cuda.device_of(load):
            totals = load.sum(0)
            quota = self._quotas(totals)
            add_late[(1,)](
                totals, quota, names, scratch, self._tables, *self._sizes(), permille, least, LATE_SWEEPS, **widths,
                ROUNDS=LATE_ROUNDS, **self._options,
            )  # fmt: skip
            before = load.new_zeros(place.num_ranks, len(names))
            return self._divide(load, quota, place.late_slots, names, before), before, names

    def _quotas(self, totals: torch.Tensor) -> torch.Tensor:
        """Tokens of each instance: int64 [physical]; those of empty slots are not written. totals: int64 [expert]."""
        place = self._placement
        quota = totals.new_empty(len(place.phys2log))
        sizes = self._classes, place.homes_per_rank, len(quota) // place.num_ranks
        balance[(1,)](totals, self._tables, quota, *sizes, self._sweeps, **self._options)
        return quota

    def _divide(self, load: torch.Tensor, quota: torch.Tensor, late: int = 0, *tables: torch.Tensor) -> torch.Tensor:
        """The split: int64 [source_rank, physical].

        late: late slots of a rank. tables: `names` and `before` of `divide`, which are not used without late slots.
        """
        place = self._placement
        served = load.new_zeros(place.num_ranks, len(quota))
        options = self._options | {"LATE": late}
        divide[(place.experts,)](
            load, quota, *(tables or (quota, quota)), served, self._tables, *self._sizes(), **options
        )
        return served

    def _sizes(self) -> tuple[int, ...]:
        """The sizes with which kernels find their way in the tables."""
        place = self._placement
        ranks, local = place.num_ranks, len(place.phys2log) // place.num_ranks
        return self._classes, place.homes_per_rank, ranks, place.ranks_per_node, place.experts, local


@cache
def kernels_work(ranks: int, device: torch.device, late_slots: int = 0) -> bool:
    """Whether the kernels compile and split a sample load on this device like NumPy. The answer is cached.

    A wrong split would hang a run or change its results. If the answer is no, a warning gives the reason.

    ranks: number of ranks of the sample placement.
    device: where the kernels run. The host waits for it.
    late_slots: of a rank; the kernel of late copies is tried, too, if there are any.
    """
    generator, home = np.random.default_rng(0), np.arange(2 * ranks) // 2
    slots = np.stack([generator.choice(np.flatnonzero(home != rank), 2, replace=False) for rank in range(ranks)])
    placement = ReplicaPlacement(home, slots, ranks_per_node=-(-ranks // 2))
    placement = placement.with_late(np.full((ranks, late_slots), -1))
    load = generator.integers(0, 1000, (ranks, 2 * ranks))
    load[:, :2] *= 3  # more than its replicas can take
    classes, splitter = color_by_rank(placement), Splitter(placement, sweeps=4)
    try:
        tables, there = upload(kernel_tables(placement, classes), device), torch.from_numpy(load).to(device)
        kernels = SplitKernels(placement, len(classes), 4, tables)
        works = np.array_equal(kernels(there).cpu().numpy(), splitter(load))
        if late_slots and works:
            served = kernels.with_late(there, 1000, 0)[0]
            works = np.array_equal(served.cpu().numpy(), LateCopies(splitter, 1000, 0)(load.sum(0))(load))
    except Exception as error:  # from Triton, the compilers that it starts, or the driver
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(f"tokens are split on the host, because Triton fails to compile kernels: {reason}", stacklevel=2)
        return False
    if not works:
        warnings.warn("tokens are split on the host, because the kernels give wrong counts here", stacklevel=2)
    return works


def _width(ranks: int) -> int:
    """Length of a vector over ranks: a power of two."""
    return max(16, triton.next_power_of_2(ranks))


def launch_options(width: int) -> dict[str, Any]:
    """Compile options with which pairs of `width` ranks, a power of two, fit the registers."""
    # The kernels have no floating-point operations, but without enable_fp_fusion Triton warns.
    return {"WIDTH": width, "num_warps": width // 8, "num_stages": 1, "enable_fp_fusion": False}


@triton.jit(do_not_specialize=["classes", "homes", "local", "sweeps"])
def balance(totals, tables, quota, classes, homes, local, sweeps, WIDTH: tl.constexpr):
    """Compute the quota of each instance. One program.

    totals: int64 [expert], tokens. quota: int64 [physical], written. local: physical experts of a rank.
    """
    rank = tl.arange(0, WIDTH)
    load = tl.zeros([WIDTH], tl.int64)
    for index in range(homes):
        expert = tl.load(tables + (classes * ROWS + index) * WIDTH + rank)
        total = tl.load(totals + expert, mask=expert >= 0, other=0)
        tl.store(quota + rank * local + index, total, mask=expert >= 0)
        load += total
    for index in range(classes):  # equal shares, remainders to the first instances
        row = tables + index * ROWS * WIDTH + rank
        expert = tl.load(row + EXPERT * WIDTH)
        total = tl.load(totals + expert, mask=expert >= 0, other=0)
        count = tl.maximum(tl.load(row + COUNT * WIDTH), 1)
        share = total // count + (tl.load(row + POSITION * WIDTH) < total % count)
        share = tl.where(expert >= 0, share, 0)
        tl.store(quota + tl.load(row + PHYSICAL * WIDTH), share, mask=expert >= 0)
        load += share
    for turn in range(classes * sweeps):
        tl.debug_barrier()  # other threads have written the quotas that are read next
        row = tables + turn % classes * ROWS * WIDTH + rank
        expert = tl.load(row + EXPERT * WIDTH)
        has = expert >= 0
        same = (expert[:, None] == expert[None, :]) & has[:, None]
        total = tl.load(totals + expert, mask=has, other=0)
        place = quota + tl.load(row + PHYSICAL * WIDTH)
        last = turn >= classes * (sweeps - 1)
        load = pour(load, total, place, tl.load(row + POSITION * WIDTH), has, same, last)


@triton.jit(do_not_specialize=["classes", "homes", "ranks", "per_node", "experts", "local"])
def divide(
    load, quota, names, before, served, tables, classes, homes, ranks, per_node, experts, local, WIDTH: tl.constexpr,
    LATE: tl.constexpr,
):  # fmt: skip
    """Divide quotas over source ranks, first the same rank, then the same node. One program per expert.

    load: [source_rank, expert]. quota: [physical]. served: [source_rank, physical], zeros; written.
    names: as in `instances`.
    before: as `served`, written if LATE: tokens of lower-numbered instances of the same expert.
    """
    expert = tl.program_id(0)
    rank = tl.arange(0, WIDTH)
    starting = tl.load(load + rank * experts + expert, mask=rank < ranks, other=0)
    has, position, physical = instances(
        expert, names, tables, classes, homes, ranks, per_node, experts, local, WIDTH, LATE
    )
    count = tl.sum(has.to(tl.int32), 0)
    physicals = ranks * local
    if count == 1:
        tl.store(served + rank * physicals + _only(physical, has), starting, mask=rank < ranks)
    else:
        wanted = tl.load(quota + physical, mask=has, other=0)
        kept = tl.minimum(starting, wanted)
        supply = starting - kept
        wanted -= kept
        chain_upto = position[:, None] <= position[None, :]
        # As many tokens as possible are served within their node, in proportion.
        node = rank // per_node
        inside = node[:, None] == node[None, :]
        offered = tl.sum(tl.where(inside, supply[:, None], 0), 0)
        asked = tl.sum(tl.where(inside, wanted[:, None], 0), 0)
        matched = tl.minimum(offered, asked)
        upto = tl.sum(tl.where(inside & (rank[:, None] <= rank[None, :]), supply[:, None], 0), 0)
        upper = upto * matched // tl.maximum(offered, 1)
        lower = (upto - supply) * matched // tl.maximum(offered, 1)
        end = tl.sum(tl.where(inside & chain_upto, wanted[:, None], 0), 0)
        high = end * matched // tl.maximum(asked, 1)
        low = (end - wanted) * matched // tl.maximum(asked, 1)
        # The remaining tokens cross nodes.
        supply -= upper - lower
        wanted -= high - low
        upto = tl.cumsum(supply)
        end = tl.sum(tl.where(chain_upto, wanted[:, None], 0), 0)
        number = tl.cumsum(has.to(tl.int32))  # in the order of ranks, which is that of physical numbers
        lower_numbered = starting * 0
        for place in range(count):
            it = has & (number == place + 1)
            of = _only(rank, it)
            given = _shared(upto - supply, upto, _only(end - wanted, it), _only(end, it))
            local_given = _shared(lower, upper, _only(low, it), _only(high, it))
            given += tl.where(node == of // per_node, local_given, 0) + tl.where(rank == of, kept, 0)
            at = rank * physicals + _only(physical, it)
            tl.store(served + at, given, mask=rank < ranks)
            if LATE:
                tl.store(before + at, lower_numbered, mask=rank < ranks)
                lower_numbered += given


@triton.jit
def _only(values, where):
    """The value at the only true position."""
    return tl.sum(tl.where(where, values, 0))


@triton.jit
def _shared(lower, upper, low, high):
    """Length of the overlap of each interval [lower, upper] with the interval [low, high]."""
    return tl.maximum(tl.minimum(upper, high) - tl.maximum(lower, low), 0)
