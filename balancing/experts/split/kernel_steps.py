"""Steps of the kernel that splits tokens (`split_kernel`), and the layout of its tables.

A vector over ranks has the length WIDTH, a power of two. An expert has at most one instance on a rank, and the experts
of a class share no rank. Therefore an instance is identified by its rank, and all experts of a class fit one vector.
CHAIN is a power of two, and no planned expert has more instances.
"""

import triton
import triton.language as tl

__all__ = [
    *("BLOCK", "COUNT", "EXPERT", "PHYSICAL", "POSITION", "ROWS", "RANK", "CELLS"),
    *("across", "class_cells", "divide", "instances", "pour", "pour_one"),
]

# Rows of a class's table. A row has one value per rank, for the class's expert on that rank; -1 if there is none.
EXPERT = tl.constexpr(0)
POSITION = tl.constexpr(1)  # position of the rank in the expert's chain
PHYSICAL = tl.constexpr(2)
COUNT = tl.constexpr(3)  # number of instances of the expert
ROWS = tl.constexpr(4)
# Rows of an expert's table: its instances in the order of ranks, then -1. The others are POSITION and PHYSICAL.
RANK = tl.constexpr(0)
CELLS = tl.constexpr(3)
BLOCK = tl.constexpr(8)  # classes that are read at once


@triton.jit
def across(values, ranks):
    """[chain, rank], the value at each of `ranks`, which are [chain, rank], none negative. values: [rank]."""
    CHAIN: tl.constexpr = ranks.shape[0]
    WIDTH: tl.constexpr = ranks.shape[1]
    return tl.reshape(tl.gather(values, tl.reshape(ranks, [CHAIN * WIDTH]), 0), [CHAIN, WIDTH])


@triton.jit
def pour(load, share, total, position, neighbors, last):
    """Divide the tokens of the experts of a class by water-filling. Returns the shares of instances.

    load: [rank], tokens of each rank, with the shares so far. All other vectors are over ranks, too.
    share: tokens of the instance on each rank, 0 without one.
    total: tokens of its expert, -1 without one.
    position: of the instance in its chain.
    neighbors: [chain, rank], the ranks of the expert in the order of its chain, then -1.
    last: whether this is the last sweep.
    """
    others = load - share
    full: tl.constexpr = 1 << 50  # no water reaches it
    there = tl.maximum(neighbors.to(tl.int32), 0)
    below = tl.where(neighbors >= 0, across(others, there), full)
    # The water line is the lowest of those that the ranks up to each one would have. Sum and number in one integer.
    within = tl.sum(tl.where(below <= others[None, :], below * 256 + 1, 0), 0)
    line = ((within >> 8) + total) // tl.maximum(within & 255, 1)
    height = tl.min(tl.where(neighbors >= 0, across(line, there), full), 0)
    rest = total - tl.sum(tl.maximum(height[None, :] - below, 0), 0)  # fewer tokens than instances below the line
    poured = tl.maximum(height - others, 0)
    if last:
        before = tl.arange(0, neighbors.shape[0])[:, None] <= position[None, :]
        upto = tl.sum((before & (below <= height[None, :])).to(tl.int32), 0)
        poured += ((others <= height) & (upto <= rest)).to(tl.int64)
    else:
        poured += tl.where(position == 0, rest, 0)
    return tl.where(total >= 0, poured, 0)


@triton.jit
def pour_one(load, share, total, position, has, last):
    """As `pour`, for one expert with any number of instances. total: a number. has: whether a rank has an instance."""
    others = load - share
    reached = has
    height = (tl.sum(tl.where(reached, others, 0), 0) + total) // tl.sum(reached.to(tl.int64), 0)
    while tl.max(tl.where(reached, others, -1), 0) > height:
        reached = reached & (others <= height)
        height = (tl.sum(tl.where(reached, others, 0), 0) + total) // tl.sum(reached.to(tl.int64), 0)
    poured = tl.where(has, tl.maximum(height - others, 0), 0)
    rest = total - tl.sum(poured, 0)
    if last:
        upto = tl.sum((reached[:, None] & (position[:, None] <= position[None, :])).to(tl.int32), 0)
        poured += (reached & (upto <= rest)).to(tl.int64)
    else:
        poured += tl.where(has & (position == 0), rest, 0)
    return poured


@triton.jit
def instances(expert, names, by_class, by_expert, ranks, per_node, experts, local, WIDTH: tl.constexpr, LATE):
    """Of one expert: whether each rank holds it, the rank's position in its chain, and the physical number there.

    names: int64 [physical], the expert of each physical number; read for the last LATE of each rank.
    """
    rank = tl.arange(0, WIDTH)
    class_index, home = tl.load(by_expert + expert), tl.load(by_expert + experts + expert)
    row = by_class + tl.maximum(class_index, 0) * ROWS * WIDTH + rank
    alone = class_index < 0
    mask = rank * 0 + class_index >= 0
    has = (alone & (rank == home // local)) | (mask & (tl.load(row + EXPERT * WIDTH, mask=mask, other=-1) == expert))
    position = tl.load(row + POSITION * WIDTH, mask=mask, other=0)
    physical = tl.where(alone, home, tl.load(row + PHYSICAL * WIDTH, mask=mask, other=0))
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


@triton.jit
def divide(
    load, quota, served, first, last, expert, at, position, physical, has, ranks, per_node, experts, physicals, source,
    sources, WIDTH: tl.constexpr,
):  # fmt: skip
    """Divide the quotas of one expert over source ranks, first the same rank, then the same node.

    load, quota, served, first, last, source, sources: as of `split_tokens`.
    at: [instance], the rank of each, in ascending order. position: in the chain. has: whether there is an instance.
    """
    rank, at = tl.arange(0, WIDTH), tl.maximum(at, 0)
    starting = tl.load(load + rank * experts + expert, mask=rank < ranks, other=0)
    wanted = tl.load(quota + physical, mask=has, other=0)
    kept = tl.minimum(tl.load(load + at * experts + expert, mask=has, other=0), wanted)
    here = (at[:, None] == rank[None, :]) & has[:, None]
    stays = tl.where(here, kept[:, None], 0)
    supply = starting - tl.sum(stays, 0)
    wanted -= kept
    chain_upto = position[:, None] <= position[None, :]
    # As many tokens as possible are served within their node, in proportion.
    node, of = rank // per_node, at // per_node
    upto = tl.cumsum(supply)
    earlier = tl.gather(upto - supply, node * per_node, 0)
    offered = tl.gather(upto, tl.minimum((node + 1) * per_node, WIDTH) - 1, 0) - earlier
    inside = (of[:, None] == node[None, :]) & has[:, None]
    matched = tl.minimum(offered, tl.sum(tl.where(inside, wanted[:, None], 0), 0))
    upto -= earlier
    upper = upto * matched // tl.maximum(offered, 1)
    lower = (upto - supply) * matched // tl.maximum(offered, 1)
    together = of[:, None] == of[None, :]
    asked = tl.sum(tl.where(together, wanted[:, None], 0), 0)
    matched = tl.minimum(tl.gather(offered, at, 0), asked)
    end = tl.sum(tl.where(together & chain_upto, wanted[:, None], 0), 0)
    high = end * matched // tl.maximum(asked, 1)
    low = (end - wanted) * matched // tl.maximum(asked, 1)
    # The remaining tokens cross nodes.
    supply -= upper - lower
    wanted -= high - low
    upto = tl.cumsum(supply)
    end = tl.sum(tl.where(chain_upto, wanted[:, None], 0), 0)
    given = stays + _shared(upto - supply, upto, end - wanted, end)
    given += tl.where(inside, _shared(lower, upper, low, high), 0)
    mask = has[:, None] & (rank < ranks)[None, :]
    tl.store(served + rank[None, :] * physicals + physical[:, None], given, mask=mask)
    mask &= ((rank >= source) & (rank < source + sources))[None, :]
    ends = tl.cumsum(given, 0)
    row = (rank[None, :] - source) * physicals + physical[:, None]
    tl.store(first + row, ends - given, mask=mask)
    tl.store(last + row, ends, mask=mask)


@triton.jit
def _shared(lower, upper, low, high):
    """Length of the overlap of each interval [low, high] with each interval [lower, upper], as a matrix."""
    both = tl.minimum(high[:, None], upper[None, :]) - tl.maximum(low[:, None], lower[None, :])
    return tl.maximum(both, 0)


@triton.jit
def class_cells(shares, cells, by_class, neighbors, index, classes, WIDTH: tl.constexpr, CHAIN: tl.constexpr):
    """What `pour` takes of a class: the shares, totals, positions and neighbors. Without classes there is nothing."""
    rank = tl.arange(0, WIDTH)
    cell = index * WIDTH + rank
    real = cell < classes * WIDTH
    share, total = tl.load(shares + cell, mask=real, other=0), tl.load(cells + cell, mask=real, other=-1)
    position = tl.load(by_class + (index * ROWS + POSITION) * WIDTH + rank, mask=real, other=-1)
    chain = neighbors + (index * CHAIN + tl.arange(0, CHAIN))[:, None] * WIDTH + rank[None, :]
    return share, total, position, tl.load(chain, mask=real[None, :], other=-1)
