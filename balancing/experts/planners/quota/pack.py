"""Greedy placement of few replicas for a known load, most useful first.

If transfers cost time, or if slots are so few that even the predicted load can hardly be balanced, each replica should
balance as much as possible. Each step takes the largest instance of the busiest rank and places a replica of its expert
on the least loaded rank. The tokens of that expert are then divided over its instances by water-filling. The steps end
when ranks are balanced or slots are full.
"""

import math

import numpy as np

__all__ = ["pack_replicas"]

# After _MANY replicas, a busiest rank within the factor _BALANCED of the mean counts as balanced: the rest would take
# as many replicas again.
_MANY, _BALANCED = 64, 1.003


def pack_replicas(
    totals: np.ndarray,
    home: np.ndarray,
    ranks: int,
    slots: int,
    *,
    ranks_per_node: int,
    inside: bool = False,
) -> list[tuple[int, int]]:
    """Choose replicas. Returns them as (expert, rank), most useful first.

    totals: float [expert], tokens.
    home: int [expert], home ranks.
    ranks: number of ranks.
    slots: largest number of replicas on a rank.
    ranks_per_node: ranks of a node.
    inside: whether replicas must be in the node of the rank that they relieve.

    This is plain Python, since every step depends on the one before.
    """
    load, tokens = np.bincount(home, weights=totals, minlength=ranks).tolist(), totals.tolist()
    serves: list[dict[int, float]] = [{} for _ in range(ranks)]
    for expert, (rank, total) in enumerate(zip(home.tolist(), tokens, strict=True)):
        serves[rank][expert] = total
    holders = [[rank] for rank in home.tolist()]
    free, mean = [slots] * ranks, sum(load) / ranks
    # Loads of the ranks that may still give a replica (-inf for others) and that may take one (inf for others).
    giving, taking = load.copy(), load.copy() if slots else [math.inf] * ranks
    copies: list[tuple[int, int]] = []
    while len(copies) < ranks * slots:
        height = max(giving)
        if height <= mean + 1 or (len(copies) >= _MANY and height <= _BALANCED * mean):
            break
        fullest = giving.index(height)
        replica = _copy(fullest, height, serves[fullest], holders, taking, mean, ranks_per_node, inside)
        if replica is None:
            giving[fullest] = -math.inf
            continue
        expert, rank = replica
        copies.append(replica)
        free[rank] -= 1
        holders[expert].append(rank)
        serves[rank][expert] = 0.0
        others = [load[holder] - serves[holder][expert] for holder in holders[expert]]
        level = _water_level(tokens[expert], others)
        for holder, other in zip(holders[expert], others, strict=True):
            serves[holder][expert] = poured = level - other if level > other else 0.0
            load[holder] = after = other + poured
            if giving[holder] > -math.inf:
                giving[holder] = after
            taking[holder] = after if free[holder] else math.inf
    return copies


def _copy(
    fullest: int,
    height: float,
    serves: dict[int, float],
    holders: list[list[int]],
    taking: list[float],
    mean: float,
    ranks_per_node: int,
    inside: bool,
) -> tuple[int, int] | None:
    """The expert of the next replica and the rank for it; None if no replica relieves the busiest rank.

    The expert is the one with the largest instance on rank `fullest` for which a rank with fewer tokens is open.
    """
    first = fullest // ranks_per_node * ranks_per_node
    node = slice(first, first + ranks_per_node)
    in_node = min(taking[node])
    anywhere = in_node if inside else min(taking)
    if anywhere >= height - 1:
        return None
    emptiest = taking.index(in_node, first), taking.index(anywhere, first if inside else 0)
    for expert in sorted(serves, key=serves.__getitem__, reverse=True):
        if serves[expert] <= 0:
            break
        (near, far), open_to = emptiest, taking
        if near in holders[expert] or far in holders[expert]:
            open_to = taking.copy()
            for rank in holders[expert]:
                open_to[rank] = math.inf
            near = open_to.index(min(open_to[node]), first)
            far = near if inside else open_to.index(min(open_to))
        # A rank of the node is preferred if it has at least half as much room as the emptiest rank.
        order = (near, far) if mean - open_to[near] >= (mean - open_to[far]) / 2 else (far, near)
        for rank in order:
            if open_to[rank] < height - 1:
                return expert, rank
    return None


def _water_level(total: float, heights: list[float]) -> float:
    """The water level after `total` is poured over columns of these heights."""
    level, below = float("inf"), total
    for number, height in enumerate(sorted(heights), 1):
        below += height
        if below / number > level:
            break
        level = below / number
    return level
