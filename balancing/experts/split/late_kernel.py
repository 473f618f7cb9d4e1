"""Late copies on a GPU: chosen from the quotas of a split in its kernel, with the result of `LateCopies`.

If the busiest rank is within the goal, nothing is done. Tables belong to the planned placement. Late copies are data:
the expert in each late slot. An expert with late copies leaves its class and gets a turn of its own in each sweep.
"""

import triton
import triton.language as tl

from balancing.experts.split.kernel_steps import (
    BLOCK,
    EXPERT,
    PHYSICAL,
    ROWS,
    across,
    class_cells,
    instances,
    pour,
    pour_one,
)

__all__ = ["add_late", "late_instances"]


@triton.jit
def add_late(
    load, totals, shares, cells, quota, names, is_late, turns, held, before, amount, planned, by_class, by_expert,
    neighbors, classes, ranks, per_node, experts, local, permille, least, WIDTH: tl.constexpr, CHAIN: tl.constexpr,
    LOCALS: tl.constexpr, LATE: tl.constexpr, ROUNDS: tl.constexpr, SWEEPS: tl.constexpr,
):  # fmt: skip
    """Add late copies, and change the quotas to those of the split with them. Returns the loads of ranks, and the
    number of experts with late copies.

    load: [rank], tokens of each rank. totals: [expert], tokens.
    shares, cells: [class, rank], tokens of each instance and of its expert, -1 without one; changed.
    quota: [physical], tokens of each instance; changed.
    names: [physical], written: the expert of each physical number, -1 for an empty slot.
    is_late: [expert], written: 1 for those with late copies. turns: [their number], written: these experts.
    held: [their number, rank], written: the instances, see `late_instances`.
    before, amount: [physical], for this function alone.
    planned: [physical], `names` without late copies. permille, least: as in `LateCopies`.
    """
    rank = tl.arange(0, WIDTH)
    valid, alone, number = rank < ranks, load, 0
    slot = tl.arange(0, LOCALS)[:, None]
    at, full = rank[None, :] * local + slot, (slot < local) & valid[None, :]
    name = tl.load(planned + at, mask=full, other=-1)
    tl.store(names + at, name.to(tl.int64), mask=full)
    tl.store(before + at, tl.load(quota + at, mask=name >= 0, other=0), mask=full)
    for start in range(0, experts, WIDTH):
        tl.store(is_late + start + rank, tl.zeros([WIDTH], tl.int64), mask=start + rank < experts)
    tl.debug_barrier()
    tl.store(quota + at, tl.load(before + at, mask=full, other=0), mask=full)
    total = tl.sum(load, 0)
    mean = total // ranks
    limit = total * permille // (1000 * ranks)
    above = tl.maximum(limit, mean + least)
    threshold = tl.maximum(tl.maximum(least, 1), (limit - mean) // 2)
    if tl.max(load, 0) > above:
        taken = tl.zeros([WIDTH], tl.int32)
        for _ in range(ROUNDS):
            # What ranks can take: their room, and three fifths of what they can pass on.
            tl.debug_barrier()
            hot = valid & (load > above)
            passed = tl.zeros([WIDTH], tl.int64)
            for of in range(classes):
                cell = of * WIDTH + rank
                chain = tl.load(neighbors + (of * CHAIN + tl.arange(0, CHAIN))[:, None] * WIDTH + rank[None, :])
                is_hot = across(hot.to(tl.int32), tl.maximum(chain.to(tl.int32), 0))
                cool = tl.sum(tl.where(chain >= 0, 1 - is_hot, 0), 0) > 1
                passed += tl.where(cool & (tl.load(cells + cell) >= 0), tl.load(shares + cell), 0)
            for turn in range(number):
                has, position, physical = late_instances(held, turn, WIDTH)
                cool = tl.sum((has & ~hot).to(tl.int32), 0) > 1
                passed += tl.load(quota + physical, mask=has & cool, other=0)
            room = tl.maximum(mean - load, 0) + passed * 3 // 5
            room = tl.where(valid & ~hot & (taken < LATE), room, -1)
            tl.store(amount + at, tl.load(quota + at, mask=full, other=0), mask=full)
            excess = tl.where(hot, load - mean, 0)
            # The largest instance of the rank with the largest excess goes to the rank with most room.
            added = 0
            most = tl.max(excess, 0)
            while most >= threshold:
                tl.debug_barrier()
                giver = tl.argmax(excess, 0)
                each = tl.arange(0, LOCALS)
                tokens = tl.load(amount + giver * local + each, mask=each < local, other=-1)
                largest = giver * local + tl.argmax(tokens, 0)
                tokens = tl.max(tokens, 0)
                expert = tl.load(names + largest)
                has, position, physical = instances(
                    expert, names, by_class, by_expert, ranks, per_node, experts, local, WIDTH, LATE
                )
                takes = tl.where(has, -1, room)
                taker, space = tl.argmax(takes, 0), tl.max(takes, 0)
                moved = tl.minimum(tl.minimum(most, tokens), space)
                tl.debug_barrier()
                if moved < threshold:
                    excess = tl.where(rank == giver, 0, excess)
                else:
                    excess = tl.where(rank == giver, excess - moved, excess)
                    tl.store(amount + largest, tokens - moved)
                    used = tl.sum(tl.where(rank == taker, taken, 0), 0)
                    tl.store(names + (taker + 1) * local - LATE + used, expert)
                    taken += (rank == taker).to(tl.int32)
                    room = tl.where(rank == taker, tl.where(taken < LATE, space - moved, -1), room)
                    added += 1
                most = tl.max(excess, 0)
            if added > 0:
                tl.debug_barrier()
                number = _list_late(names, is_late, turns, ranks, local, WIDTH, LATE)
                tl.store(quota + at, tl.load(before + at, mask=full, other=0), mask=full)
                for turn in range(number):
                    hot_one = tl.load(turns + turn)
                    has, position, physical = instances(
                        hot_one, names, by_class, by_expert, ranks, per_node, experts, local, WIDTH, LATE
                    )
                    tl.store(held + turn * WIDTH + rank, tl.where(has, physical * WIDTH + position, -1).to(tl.int64))
                _leave_classes(shares, cells, totals, before, is_late, by_class, classes, WIDTH)
                load = alone
                for turn in range(SWEEPS * (classes + number)):
                    tl.debug_barrier()
                    of = turn % (classes + number)
                    last = turn >= (SWEEPS - 1) * (classes + number)
                    if of < classes:
                        share, tokens, position, chain = class_cells(
                            shares, cells, by_class, neighbors, of, classes, WIDTH, CHAIN
                        )
                        poured = pour(load, share, tokens, position, chain, last)
                        tl.store(shares + of * WIDTH + rank, poured)
                        load += poured - share
                    else:
                        held_by, in_chain, slot_of = late_instances(held, of - classes, WIDTH)
                        kept = tl.load(quota + slot_of, mask=held_by, other=0)
                        tokens_of = tl.load(totals + tl.load(turns + of - classes))
                        given = pour_one(load, kept, tokens_of, in_chain, held_by, last)
                        tl.store(quota + slot_of, given, mask=held_by)
                        load += given - kept
                tl.debug_barrier()
                publish(shares, cells, quota, by_class, classes, WIDTH)
        if tl.max(load, 0) + tl.maximum(least, 1) > tl.max(alone, 0):
            tl.debug_barrier()
            load, number = alone, 0
            tl.store(quota + at, tl.load(before + at, mask=full, other=0), mask=full)
            tl.store(names + at, name.to(tl.int64), mask=full)
            for start in range(0, experts, WIDTH):
                tl.store(is_late + start + rank, tl.zeros([WIDTH], tl.int64), mask=start + rank < experts)
    return load, number


@triton.jit
def _leave_classes(shares, cells, totals, before, is_late, by_class, classes, WIDTH: tl.constexpr):
    """Begin with the shares without late copies, in classes without the experts that have some."""
    rank = tl.arange(0, WIDTH)[None, :]
    for start in range(0, classes, BLOCK):
        index = start + tl.arange(0, BLOCK)[:, None]
        row, cell, real = by_class + index * ROWS * WIDTH + rank, index * WIDTH + rank, index < classes
        expert = tl.load(row + EXPERT * WIDTH, mask=real, other=-1)
        physical = tl.load(row + PHYSICAL * WIDTH, mask=expert >= 0, other=0)
        stays = tl.load(is_late + expert, mask=expert >= 0, other=1) == 0
        tl.store(shares + cell, tl.load(before + physical, mask=stays, other=0), mask=real)
        tl.store(cells + cell, tl.load(totals + expert, mask=stays, other=-1), mask=real)


@triton.jit
def publish(shares, cells, quota, by_class, classes, WIDTH: tl.constexpr):
    """Copy the shares of all classes into the quotas."""
    rank = tl.arange(0, WIDTH)[None, :]
    for start in range(0, classes, BLOCK):
        index = start + tl.arange(0, BLOCK)[:, None]
        has = tl.load(cells + index * WIDTH + rank, mask=index < classes, other=-1) >= 0
        physical = tl.load(by_class + (index * ROWS + PHYSICAL) * WIDTH + rank, mask=has, other=0)
        tl.store(quota + physical, tl.load(shares + index * WIDTH + rank, mask=has, other=0), mask=has)


@triton.jit
def late_instances(held, turn, WIDTH: tl.constexpr):
    """As `instances`, of an expert with late copies."""
    cell = tl.load(held + turn * WIDTH + tl.arange(0, WIDTH))
    return cell >= 0, cell % WIDTH, tl.maximum(cell, 0) // WIDTH


@triton.jit
def _list_late(names, is_late, turns, ranks, local, WIDTH: tl.constexpr, LATE: tl.constexpr):
    """List the experts with late copies in the order of `ReplicaPlacement.late_experts`. Returns how many there are.

    is_late: int64 [expert], written: 1 for these experts. turns: int64 [expert with late copies], written.
    """
    rank = tl.arange(0, WIDTH)
    for slot in tl.static_range(LATE):
        expert = tl.load(names + (rank + 1) * local - LATE + slot, mask=rank < ranks, other=-1)
        tl.store(is_late + expert, tl.zeros([WIDTH], tl.int64), mask=expert >= 0)
    tl.debug_barrier()
    number = 0
    for slot in tl.static_range(LATE):
        expert = tl.load(names + (rank + 1) * local - LATE + slot, mask=rank < ranks, other=-1)
        known = tl.load(is_late + expert, mask=expert >= 0, other=1)
        earlier = (expert[:, None] == expert[None, :]) & (rank[:, None] < rank[None, :])
        new = ((known == 0) & (tl.sum(earlier.to(tl.int32), 0) == 0)).to(tl.int32)
        tl.debug_barrier()
        tl.store(turns + number + tl.cumsum(new) - new, expert, mask=new > 0)
        tl.store(is_late + expert, tl.full([WIDTH], 1, tl.int64), mask=expert >= 0)
        number += tl.sum(new, 0)
        tl.debug_barrier()
    return number
