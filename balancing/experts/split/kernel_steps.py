"""Steps of the kernels that split tokens (`split_kernel`, `late_kernel`), and the layout of their tables."""

import triton
import triton.language as tl

__all__ = ["COUNT", "EXPERT", "PHYSICAL", "POSITION", "ROWS", "instances", "pour"]

# Rows of a class's table. A row has one value per rank, for the class's expert on that rank; -1 if there is none.
EXPERT = tl.constexpr(0)
POSITION = tl.constexpr(1)  # position of the rank in the expert's chain
COUNT = tl.constexpr(2)  # number of instances of the expert
PHYSICAL = tl.constexpr(3)
ROWS = tl.constexpr(4)


@triton.jit
def pour(load, total, quota, position, has, same, last):
    """Divide the tokens of experts without a common rank by water-filling. Returns the loads of ranks afterwards.

    load: [rank], tokens of each rank, with the quotas so far. All other vectors are over ranks, too.
    total: tokens of the expert that has an instance there.
    quota: where the quota of that instance is; read and written.
    position: of the instance in its chain.
    has: whether there is an instance.
    same: [rank, rank], whether both have instances of one expert.
    last: whether this is the last sweep.
    """
    others = load - tl.load(quota, mask=has, other=0)
    # The water reaches an instance if it fills the room below that instance's rank load.
    room = tl.sum(tl.where(same, tl.maximum(others[None, :] - others[:, None], 0), 0), 0)
    reached = has & (room <= total)
    both = same & reached[:, None]
    number = tl.maximum(tl.sum(both.to(tl.int32), 0), 1)
    water = tl.sum(tl.where(both, others[:, None], 0), 0) + total
    height = water // number
    rest = water - height * number  # fewer tokens than instances below the water level
    poured = tl.where(has, tl.maximum(height - others, 0), 0)
    if last:
        upto = tl.sum((both & (position[:, None] <= position[None, :])).to(tl.int32), 0)
        poured += tl.where(reached & (upto <= rest), 1, 0)
    else:
        poured += tl.where(has & (position == 0), rest, 0)
    tl.store(quota, poured, mask=has)
    return others + poured


@triton.jit
def instances(expert, names, tables, classes, homes, ranks, per_node, experts, local, WIDTH: tl.constexpr, LATE):
    """Of one expert: whether each rank holds it, the rank's position in its chain, and the physical number there.

    names: int64 [physical], the expert of each physical number; read for the last LATE of each rank.
    """
    rank = tl.arange(0, WIDTH)
    entry = tables + (classes * ROWS + homes) * WIDTH + expert
    class_index, home = tl.load(entry), tl.load(entry + experts)
    row = tables + tl.maximum(class_index, 0) * ROWS * WIDTH + rank
    alone = class_index < 0
    has = (alone & (rank == home // local)) | ((class_index >= 0) & (tl.load(row + EXPERT * WIDTH) == expert))
    position = tl.where(alone, 0, tl.load(row + POSITION * WIDTH))
    physical = tl.where(alone, home, tl.load(row + PHYSICAL * WIDTH))
    if LATE:
        comes = rank < 0
        for slot in tl.static_range(LATE):
            at = (rank + 1) * local - LATE + slot
            here = tl.load(names + at, mask=rank < ranks, other=-1) == expert
            comes, physical = comes | here, tl.where(here, at, physical)
        # Late copies follow the planned instances of their node; new nodes come last (`ReplicaPlacement.chains`).
        node = rank // per_node
        near = (node[:, None] == node[None, :]) & has[:, None]
        after = tl.max(tl.where(near, position[:, None], -1), 0)
        after = tl.where(after < 0, tl.sum(has.to(tl.int32), 0), after)
        key = tl.where(comes, (2 * after + 1) * WIDTH + rank, 2 * position * WIDTH)
        has = has | comes
        position = tl.sum((has[:, None] & (key[:, None] < key[None, :])).to(tl.int32), 0)
    return has, position, physical
