"""Late copies on a GPU: chosen from the quotas of `balance` in one Triton kernel, with the result of `LateCopies`.

The kernel runs between `balance` and `divide` of `split_kernel`. If the busiest rank is within the goal, it only sums
the loads of ranks. Tables belong to the planned placement. Late copies are data: the expert in each late slot. An
expert with late copies leaves its class and gets a turn of its own in each sweep.
"""

import triton
import triton.language as tl

from balancing.experts.split.kernel_steps import EXPERT, PHYSICAL, POSITION, ROWS, instances, pour

__all__ = ["add_late"]


@triton.jit(
    do_not_specialize=["classes", "homes", "ranks", "per_node", "experts", "local", "permille", "least", "sweeps"]
)
def add_late(
    totals, quota, names, scratch, tables, classes, homes, ranks, per_node, experts, local, permille, least, sweeps,
    WIDTH: tl.constexpr, LOCALS: tl.constexpr, LATE: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Add late copies, and change the quotas to those of the split with them. One program.

    totals: int64 [expert], tokens. quota: int64 [physical], tokens of each instance; changed.
    names: int64 [physical], written: the expert of each physical number, -1 for an empty slot.
    scratch: int64 [2 * physical + expert + rank * LATE], for this kernel alone.
    local: physical experts of a rank, at most LOCALS.
    permille: the goal, thousandths of the mean. least: tokens that copies must take off a rank.
    """
    rank = tl.arange(0, WIDTH)
    valid, first_slot = rank < ranks, rank * local
    planned = tables + (classes * ROWS + homes) * WIDTH + 2 * experts
    before, amount = scratch, scratch + ranks * local
    is_late, turns = scratch + 2 * ranks * local, scratch + 2 * ranks * local + experts
    load = tl.zeros([WIDTH], tl.int64)
    for index in range(local):
        name = tl.load(planned + first_slot + index, mask=valid, other=-1)
        tokens = tl.load(quota + first_slot + index, mask=name >= 0, other=0)
        load += tokens
        tl.store(names + first_slot + index, name.to(tl.int64), mask=valid)
        tl.store(before + first_slot + index, tokens, mask=valid)
        tl.store(quota + first_slot + index, tokens, mask=valid)
    total, alone = tl.sum(load, 0), load
    mean = total // ranks
    limit = total * permille // (1000 * ranks)
    above = tl.maximum(limit, mean + least)
    threshold = tl.maximum(tl.maximum(least, 1), (limit - mean) // 2)
    if tl.max(load, 0) > above:
        for start in range(0, experts, WIDTH):
            tl.store(is_late + start + rank, tl.zeros([WIDTH], tl.int64), mask=start + rank < experts)
        number = 0  # of experts with late copies
        taken = tl.zeros([WIDTH], tl.int32)
        for _ in range(ROUNDS):
            # What ranks can take: their room, and three fifths of what they can pass on.
            tl.debug_barrier()
            hot = valid & (load > above)
            passed = tl.zeros([WIDTH], tl.int64)
            for index in range(classes):
                row = tables + index * ROWS * WIDTH + rank
                expert = tl.load(row + EXPERT * WIDTH)
                has = expert >= 0
                has = has & (tl.load(is_late + expert, mask=has, other=0) == 0)
                same = (expert[:, None] == expert[None, :]) & has[:, None]
                cool = tl.sum((same & ~hot[:, None]).to(tl.int32), 0) > 1
                passed += tl.load(quota + tl.load(row + PHYSICAL * WIDTH), mask=has & cool, other=0)
            for turn in range(number):
                has, position, physical = instances(
                    tl.load(turns + turn), names, tables, classes, homes, ranks, per_node, experts, local, WIDTH, LATE
                )
                cool = tl.sum((has & ~hot).to(tl.int32), 0) > 1
                passed += tl.load(quota + physical, mask=has & cool, other=0)
            room = tl.maximum(mean - load, 0) + passed * 3 // 5
            room = tl.where(valid & ~hot & (taken < LATE), room, -1)
            for index in range(local):
                tokens = tl.load(quota + first_slot + index, mask=valid, other=0)
                tl.store(amount + first_slot + index, tokens, mask=valid)
            excess = tl.where(hot, load - mean, 0)
            # The largest instance of the rank with the largest excess goes to the rank with most room.
            added = 0
            most = tl.max(excess, 0)
            while most >= threshold:
                tl.debug_barrier()
                giver = tl.argmax(excess, 0)
                each = tl.arange(0, LOCALS)
                tokens = tl.load(amount + giver * local + each, mask=each < local, other=-1)
                at = giver * local + tl.argmax(tokens, 0)
                tokens = tl.max(tokens, 0)
                expert = tl.load(names + at)
                has, position, physical = instances(
                    expert, names, tables, classes, homes, ranks, per_node, experts, local, WIDTH, LATE
                )
                takes = tl.where(has, -1, room)
                taker, space = tl.argmax(takes, 0), tl.max(takes, 0)
                moved = tl.minimum(tl.minimum(most, tokens), space)
                tl.debug_barrier()
                if moved < threshold:
                    excess = tl.where(rank == giver, 0, excess)
                else:
                    excess = tl.where(rank == giver, excess - moved, excess)
                    tl.store(amount + at, tokens - moved)
                    slot = tl.sum(tl.where(rank == taker, taken, 0), 0)
                    tl.store(names + (taker + 1) * local - LATE + slot, expert)
                    taken += (rank == taker).to(tl.int32)
                    room = tl.where(rank == taker, tl.where(taken < LATE, space - moved, -1), room)
                    added += 1
                most = tl.max(excess, 0)
            if added > 0:
                tl.debug_barrier()
                number = _list_late(names, is_late, turns, ranks, local, WIDTH, LATE)
                for index in range(local):
                    tokens = tl.load(before + first_slot + index, mask=valid, other=0)
                    tl.store(quota + first_slot + index, tokens, mask=valid)
                load = alone
                for turn in range(sweeps * (classes + number)):
                    tl.debug_barrier()
                    index = turn % (classes + number)
                    last = turn >= (sweeps - 1) * (classes + number)
                    row = tables + index * ROWS * WIDTH + rank
                    if index < classes:
                        expert = tl.load(row + EXPERT * WIDTH)
                        late = tl.load(is_late + expert, mask=expert >= 0, other=1)
                        expert = tl.where(late == 0, expert, -1).to(tl.int64)
                        position = tl.load(row + POSITION * WIDTH)
                        physical = tl.load(row + PHYSICAL * WIDTH).to(tl.int64)
                    else:
                        expert = tl.load(turns + index - classes)
                        has, position, physical = instances(
                            expert, names, tables, classes, homes, ranks, per_node, experts, local, WIDTH, LATE
                        )
                        expert, physical = tl.where(has, expert, -1), physical.to(tl.int64)
                    has = expert >= 0
                    same = (expert[:, None] == expert[None, :]) & has[:, None]
                    tokens = tl.load(totals + expert, mask=has, other=0)
                    load = pour(load, tokens, quota + physical, position, has, same, last)
        if tl.max(load, 0) + tl.maximum(least, 1) > tl.max(alone, 0):
            tl.debug_barrier()
            for index in range(local):
                tokens = tl.load(before + first_slot + index, mask=valid, other=0)
                tl.store(quota + first_slot + index, tokens, mask=valid)
                name = tl.load(planned + first_slot + index, mask=valid, other=-1)
                tl.store(names + first_slot + index, name.to(tl.int64), mask=valid)


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
