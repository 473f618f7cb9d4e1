"""The fewest replicas that level a load that is known, most useful first.

Where copies cost time, or slots are so few that the exact prediction has to be packed into them, what counts is how
much a single replica levels. The fullest rank gives its largest instance a replica on the emptiest rank, all instances
of that expert are filled up to one level, and so on until ranks are level or slots are full.
"""

import math

import numpy as np

__all__ = ["pack_replicas"]

# After this many replicas a fullest rank so little over the mean is level: what is left takes as many again.
_MANY, _LEVEL = 64, 1.003


def pack_replicas(
    totals: np.ndarray,
    home: np.ndarray,
    ranks: int,
    slots: int,
    *,
    ranks_per_node: int,
    least: tuple[float, float] = (0.0, 0.0),
) -> tuple[list[tuple[int, int]], float]:
    """Replicas as (expert, rank), in the order in which they help, and the tokens of the fullest rank with all of them.

    totals: float [expert], tokens. home: int [expert]. least: tokens that a replica must take over, within a node and
    between nodes, for its copy to pay. Every step looks at what the one before did, so this is plain Python.
    """
    load = np.bincount(home, weights=totals, minlength=ranks).tolist()
    serves: list[dict[int, float]] = [{} for _ in range(ranks)]
    for expert, (rank, total) in enumerate(zip(home.tolist(), totals.tolist(), strict=True)):
        serves[rank][expert] = total
    holders = [[rank] for rank in home.tolist()]
    free, mean = [slots] * ranks, sum(load) / ranks
    # The loads of ranks that may still give a replica away and take one; the others stand where they are not looked at.
    giving, taking = load.copy(), load.copy() if slots else [math.inf] * ranks
    copies: list[tuple[int, int]] = []
    while len(copies) < ranks * slots:
        height = max(giving)
        if height <= mean + 1 or (len(copies) >= _MANY and height <= _LEVEL * mean):
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
        level = _level(float(totals[expert]), others)
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
    """The largest instance on the fullest rank for which some rank can take a replica that pays, and that rank."""
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


def _level(total: float, heights: list[float]) -> float:
    """How high `total` stands when it is poured on columns of these heights."""
    level, below = float("inf"), total
    for number, height in enumerate(sorted(heights), 1):
        below += height
        if below / number > level:
            break
        level = below / number
    return level
