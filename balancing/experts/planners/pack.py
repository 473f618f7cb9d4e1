"""Greedy placement of few replicas for a load that is known, most useful first.

Where transfers cost time, or slots are so few that even the predicted load can hardly be balanced, each replica should
balance as much as possible. In every step the busiest rank gives its largest instance a replica on the least loaded
rank, and the tokens of that expert are divided over its instances by water-filling, until ranks are balanced or slots
are full.
"""

import math

import numpy as np

__all__ = ["pack_replicas"]

# After this many replicas, a busiest rank that exceeds the mean by so little counts as balanced: the rest would take as
# many replicas again.
_MANY, _BALANCED = 64, 1.003


def pack_replicas(
    totals: np.ndarray,
    home: np.ndarray,
    ranks: int,
    slots: int,
    *,
    ranks_per_node: int,
    least: tuple[float, float] = (0.0, 0.0),
) -> tuple[list[tuple[int, int]], float]:
    """Choose replicas; returns them as (expert, rank), most useful first, and the tokens of the busiest rank with all.

    totals: float [expert], tokens.
    home: int [expert], home ranks.
    ranks: number of ranks.
    slots: maximal number of replicas on a rank.
    ranks_per_node: ranks of a node.
    least: tokens that a replica must serve to pay for its transfer, within a node and between nodes.

    Every step depends on the one before, so this is plain Python.
    """
    load = np.bincount(home, weights=totals, minlength=ranks).tolist()
    serves: list[dict[int, float]] = [{} for _ in range(ranks)]
    for expert, (rank, total) in enumerate(zip(home.tolist(), totals.tolist(), strict=True)):
        serves[rank][expert] = total
    holders = [[rank] for rank in home.tolist()]
    free, mean = [slots] * ranks, sum(load) / ranks
    # Loads of the ranks that may still give a replica and of those that may take one; infinite for the others.
    giving, taking = load.copy(), load.copy() if slots else [math.inf] * ranks
    copies: list[tuple[int, int]] = []
    while len(copies) < ranks * slots:
        height = max(giving)
        if height <= mean + 1 or (len(copies) >= _MANY and height <= _BALANCED * mean):
            break
        fullest = giving.index(height)
        found = _copy(fullest, height, serves[fullest], holders, taking, mean, ranks_per_node, least)
        if found is None:
            giving[fullest] = -math.inf
            continue
        expert, rank = found
        copies.append(found)
        free[rank] -= 1
        holders[expert].append(rank)
        serves[rank][expert] = 0.0
        others = [load[at] - serves[at][expert] for at in holders[expert]]
        level = _water_level(float(totals[expert]), others)
        for at, other in zip(holders[expert], others, strict=True):
            serves[at][expert] = poured = level - other if level > other else 0.0
            load[at] = after = other + poured
            if giving[at] > -math.inf:
                giving[at] = after
            taking[at] = after if free[at] else math.inf
    return copies, max(load)


def _copy(
    fullest: int,
    height: float,
    serves: dict[int, float],
    holders: list[list[int]],
    taking: list[float],
    mean: float,
    ranks_per_node: int,
    least: tuple[float, float],
) -> tuple[int, int] | None:
    """The largest instance on the busiest rank of which a replica pays on some rank, and that rank."""
    first = fullest // ranks_per_node * ranks_per_node
    node = slice(first, first + ranks_per_node)
    anywhere, in_node = min(taking), min(taking[node])
    if anywhere >= height - 1 or max(height - in_node - 2 * least[0], height - anywhere - 2 * least[1]) <= 0:
        return None
    emptiest, floor = (taking.index(in_node, first), taking.index(anywhere)), min(least)
    for expert in sorted(serves, key=serves.__getitem__, reverse=True):
        if serves[expert] <= floor:
            break
        (near, far), open_to = emptiest, taking
        if near in holders[expert] or far in holders[expert]:
            open_to = taking.copy()
            for rank in holders[expert]:
                open_to[rank] = math.inf
            near, far = open_to.index(min(open_to[node]), first), open_to.index(min(open_to))
        # A rank of the node will do if it has half as much room as the emptiest of all.
        order = (near, far) if mean - open_to[near] >= (mean - open_to[far]) / 2 else (far, near)
        for rank in order:
            takes = min(serves[expert], (height - open_to[rank]) / 2)
            if open_to[rank] < height - 1 and takes > least[0 if first <= rank < first + ranks_per_node else 1]:
                return expert, rank
    return None


def _water_level(total: float, heights: list[float]) -> float:
    """Water level when `total` is poured on columns of these heights."""
    level, below = float("inf"), total
    for number, height in enumerate(sorted(heights), 1):
        below += height
        if below / number > level:
            break
        level = below / number
    return level
