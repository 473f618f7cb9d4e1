"""The fewest replicas that level a load that is known, most useful first.

Where copies cost time, or slots are so few that the exact prediction has to be packed into them, what counts is how
much a single replica levels. The fullest rank gives its largest instance a replica on the emptiest rank, all instances
of that expert are filled up to one level, and so on until ranks are level or slots are full.
"""

import numpy as np

__all__ = ["fewest_copies"]


def fewest_copies(
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
    between nodes, for its copy to pay.
    """
    load = np.bincount(home, weights=totals, minlength=ranks).tolist()
    serves = [{int(e): float(totals[e]) for e in np.flatnonzero(home == rank)} for rank in range(ranks)]
    holders = [[int(rank)] for rank in home]
    free, mean = [slots] * ranks, sum(load) / ranks
    copies: list[tuple[int, int]] = []
    stuck: set[int] = set()
    while len(stuck) < ranks and len(copies) < ranks * slots:
        height, negative = max((load[rank], -rank) for rank in range(ranks) if rank not in stuck)
        fullest = -negative
        if height <= mean + 1:
            break
        found = _copy(fullest, load, serves[fullest], holders, free, mean, ranks_per_node, least)
        if found is None:
            stuck.add(fullest)
            continue
        expert, rank = found
        copies.append(found)
        free[rank] -= 1
        holders[expert].append(rank)
        others = [load[at] - serves[at].get(expert, 0.0) for at in holders[expert]]
        level = _level(float(totals[expert]), others)
        for at, height in zip(holders[expert], others, strict=True):
            serves[at][expert] = max(0.0, level - height)
            load[at] = height + serves[at][expert]
    return copies, max(load)


def _copy(
    fullest: int,
    load: list[float],
    serves: dict[int, float],
    holders: list[list[int]],
    free: list[int],
    mean: float,
    ranks_per_node: int,
    least: tuple[float, float],
) -> tuple[int, int] | None:
    """The largest instance on the fullest rank for which some rank can take a replica that pays, and that rank."""
    first = fullest // ranks_per_node * ranks_per_node
    node = range(first, min(first + ranks_per_node, len(load)))
    for expert in sorted(serves, key=lambda each: (-serves[each], each)):
        lower = load[fullest] - 1
        open_to = [
            rank for rank in range(len(load)) if free[rank] and load[rank] < lower and rank not in holders[expert]
        ]
        near = min([(load[rank], rank) for rank in open_to if rank in node], default=(0.0, -1))[1]
        far = min([(load[rank], rank) for rank in open_to], default=(0.0, -1))[1]
        # A rank of the node will do if it has half as much room as the emptiest of all.
        order = [near, far] if near >= 0 and mean - load[near] >= (mean - load[far]) / 2 else [far, near]
        for rank in order:
            if rank >= 0 and min(serves[expert], (load[fullest] - load[rank]) / 2) > least[0 if rank in node else 1]:
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
