"""Replicas spread so that a load that is not known yet can be levelled.

The placement is made from a predicted load and the tokens are split on the true one. So a good placement is not one
that levels the prediction with the fewest copies: it gives every rank that may become too full a way to shed load, and
spends all slots on it. Two greedy steps:

1. How many replicas an expert gets. The next one goes to the expert with the largest product of what one of its
   instances carries and what its home rank is left with, both under equal shares. The first factor spreads hot experts,
   the second sees to it that no rank is stuck with home experts that cannot be relieved. A part of the load is taken as
   even over experts for this, since what is cold now may be hot when it counts.
2. On which ranks. Heaviest instance first, each to the rank with the least load: in the home's node if a rank there has
   room below the mean, else anywhere, because copies within a node are some ten times cheaper than between nodes.
"""

import math
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

__all__ = ["fill_slots", "spread_counts", "spread_slots"]

# The part that is taken as even. 0 forgets experts that are cold now: on recorded loads a plan ten iterations old is
# then uneven in one micro-batch of ten. From 0.5 on, hot experts get too few replicas where the prediction is right.
_EVEN_PART = 0.25


def spread_counts(totals: np.ndarray, home: np.ndarray, ranks: int, slots: int) -> np.ndarray:
    """Which expert gets the next replica, and the next: int64 [layer, ranks * slots], the most urgent first.

    totals: float [layer, expert], tokens. home: int [expert]. The first n entries are the plan for n replicas. -1 where
    no expert can use another one, having an instance on every rank.

    A pick changes urgencies at its home rank only, and lowers them all. So each rank's own picks come in the order of
    falling urgency, can be found for all ranks and layers at once, and are merged by sorting.
    """
    layers, experts = totals.shape
    totals = (1 - _EVEN_PART) * totals + _EVEN_PART * totals.mean(1, keepdims=True)
    wanted, per_rank = ranks * slots, experts // ranks
    order = np.argsort(home, kind="stable").reshape(ranks, per_rank)  # experts of one home rank side by side
    total = totals[:, order]
    count, carried, left = np.ones(total.shape), total.copy(), total.sum(2)
    layer, rank = np.arange(layers)[:, None], np.arange(ranks)[None, :]
    picks: list[np.ndarray] = []
    urgencies: list[np.ndarray] = []
    for _ in range(wanted):
        urgency = np.where(count < ranks, carried * left[:, :, None], -1.0)
        at = urgency.argmax(2)
        highest = urgency[layer, rank, at]
        # Enough are found where as many as wanted come before whatever any rank could still pick.
        if len(urgencies) >= slots and ((np.stack(urgencies) > highest.max(1)[:, None]).sum((0, 2)) >= wanted).all():
            break
        picks.append(np.where(highest > 0, order[rank, at], -1))
        urgencies.append(highest)
        count[layer, rank, at] += 1
        share = total[layer, rank, at] / count[layer, rank, at]
        left += share - carried[layer, rank, at]
        carried[layer, rank, at] = share
    if not picks:
        return np.full((layers, 0), -1)
    found, urgency = (np.stack(each, axis=1).reshape(layers, -1) for each in (picks, urgencies))
    return np.take_along_axis(found, np.argsort(-urgency, axis=1, kind="stable")[:, :wanted], 1)


def spread_slots(
    totals: np.ndarray,
    picks: np.ndarray,
    home: np.ndarray,
    ranks: int,
    slots: int,
    *,
    ranks_per_node: int,
) -> np.ndarray:
    """Put one layer's replicas on ranks: int64 [rank, slot], -1 in empty slots.

    totals: float [expert]. picks: int [replica], experts, -1 for none (a row of `spread_counts`).
    Every step looks at what the one before did, so this is plain Python.
    """
    picked = picks[picks >= 0]
    share = totals / (1 + np.bincount(picked, minlength=len(totals)))
    load = np.bincount(home, weights=share, minlength=ranks).tolist() if slots else [math.inf] * ranks
    mean, holders = float(totals.sum()) / ranks, [[rank] for rank in home.tolist()]
    placed: list[list[int]] = [[] for _ in range(ranks)]
    for expert in picked[np.argsort(-share[picked], kind="stable")].tolist():
        tokens, first = float(share[expert]), holders[expert][0] // ranks_per_node * ranks_per_node
        open_to = load.copy()
        for rank in holders[expert]:
            open_to[rank] = math.inf
        node = open_to[first : first + ranks_per_node]
        height = min(node)
        best = first + node.index(height)
        if height > mean - tokens:
            height = min(open_to)
            best = open_to.index(height)
        if height < math.inf:
            placed[best].append(expert)
            holders[expert].append(best)
            load[best] = height + tokens if len(placed[best]) < slots else math.inf  # full
    placed = [[*own, *[-1] * (slots - len(own))] for own in placed]
    return np.array(placed, dtype=np.int64).reshape(ranks, slots)


def fill_slots(
    slot_expert: np.ndarray, totals: np.ndarray, home: np.ndarray, ranks_per_node: int | None = None
) -> np.ndarray:
    """Fill empty slots, each with the expert that carries most on an instance and that the rank lacks: [rank, slot].

    slot_expert: int [rank, slot], -1 in empty ones. totals: float [expert]; experts without tokens are left out.
    ranks_per_node: take only experts with an instance in the rank's node, so that nothing crosses nodes. None: any.
    """
    filled, ranks = slot_expert.copy(), len(slot_expert)
    empty = np.argwhere(slot_expert < 0).tolist()
    if not empty:
        return filled
    count = (1 + np.bincount(slot_expert[slot_expert >= 0], minlength=len(totals))).tolist()
    total, held = totals.tolist(), [set(own) for own in filled.tolist()]
    for expert, rank in enumerate(home.tolist()):
        held[rank].add(expert)
    size = ranks_per_node or ranks
    hottest: list[tuple[float, int]] = []
    node = -1
    for rank, slot in empty:
        if rank // size != node:
            node = rank // size
            experts = (
                set().union(*held[node * size : (node + 1) * size]) - {-1} if ranks_per_node else range(len(total))
            )
            hottest = [(-total[expert] / count[expert], expert) for expert in experts]
            heapify(hottest)
        passed = []
        while hottest and hottest[0][1] in held[rank]:
            passed.append(heappop(hottest))
        if hottest and hottest[0][0] < 0:
            expert = hottest[0][1]
            filled[rank, slot] = expert
            held[rank].add(expert)
            count[expert] += 1
            heapreplace(hottest, (-total[expert] / count[expert], expert))
        for each in passed:
            heappush(hottest, each)
    return filled
