"""Placement of replicas that stays balanced when the load differs from its prediction.

Replicas are placed from a predicted load, but tokens are divided by the true load. A good placement therefore uses all
slots, so that every rank that may become overloaded can pass tokens to others. It is made in two greedy steps:

1. The number of replicas of each expert. The next replica goes to the expert with the largest product of two loads: of
   one of its instances, and of its home rank, both with equal shares. The first factor spreads hot experts. The second
   makes sure that the home experts of every rank can be relieved. A part of the load is assumed to be equal over
   experts, since an expert that is cold now may be hot when the placement is used.
2. The ranks of the replicas. Largest instance first, each on the least loaded rank: in the home's node if that rank
   stays below the mean, else anywhere, since transfers within a node are about ten times cheaper than between nodes.
"""

import math
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

__all__ = ["fill_slots", "spread_counts", "spread_slots"]

# The fraction of the load that is assumed to be equal over experts. With 0, experts that are cold now get no replicas;
# on recorded loads, a placement that is ten iterations old is then imbalanced in one of ten micro-batches. From 0.5 on,
# hot experts get too few replicas if the prediction is right.
_EVEN_PART = 0.25


def spread_counts(totals: np.ndarray, home: np.ndarray, ranks: int, slots: int) -> np.ndarray:
    """The expert of each successive replica, most urgent first: int64 [layer, ranks * slots].

    The first n entries are the choice for n replicas. An entry is -1 if all experts have an instance on every rank.

    totals: float [layer, expert], tokens.
    home: int [expert], home ranks.
    ranks: number of ranks.
    slots: largest number of replicas on a rank.

    A choice lowers only the urgencies of experts of the same home rank. Choices are therefore found for all ranks and
    layers at once, each rank's in the order of falling urgency, and are merged by sorting.
    """
    layers, experts = totals.shape
    totals = (1 - _EVEN_PART) * totals + _EVEN_PART * totals.mean(1, keepdims=True)
    wanted, per_rank = ranks * slots, experts // ranks
    order = np.argsort(home, kind="stable")  # experts, by home rank
    total = totals[:, order].reshape(-1, per_rank)  # [layer x rank, home expert]
    count, carried, left = np.ones(total.shape), total.copy(), total.sum(1)
    first = np.arange(len(total)) * per_rank
    picks = np.empty((wanted, len(total)), dtype=np.int64)  # of each layer and rank, most urgent first
    urgencies = np.empty((wanted, layers, ranks))
    number = 0
    while number < wanted:
        urgency = np.where(count < ranks, carried * left[:, None], -1.0)
        chosen = first + urgency.argmax(1)
        highest = urgency.take(chosen).reshape(layers, ranks)
        # Done when, in every layer, at least `wanted` choices are more urgent than all remaining ones.
        more_urgent = urgencies[:number] > highest.max(1)[:, None]
        if number >= slots and (np.count_nonzero(more_urgent, axis=(0, 2)) >= wanted).all():
            break
        picks[number], urgencies[number] = chosen, highest
        number += 1
        count.reshape(-1)[chosen] += 1
        share = total.take(chosen) / count.take(chosen)
        left += share - carried.take(chosen)
        carried.reshape(-1)[chosen] = share
    picked = order[picks[:number].reshape(-1, layers, ranks) % experts]
    urgency = urgencies[:number].swapaxes(0, 1).reshape(layers, -1)
    picked = np.where(urgency > 0, picked.swapaxes(0, 1).reshape(layers, -1), -1)
    return np.take_along_axis(picked, np.argsort(-urgency, axis=1, kind="stable")[:, :wanted], 1)


def spread_slots(
    totals: np.ndarray,
    picks: np.ndarray,
    home: np.ndarray,
    ranks: int,
    slots: int,
    *,
    ranks_per_node: int,
) -> np.ndarray:
    """Choose the ranks of one layer's replicas: int64 [rank, slot], -1 in empty slots.

    totals: float [expert], tokens.
    picks: int [replica], experts, -1 for none (a row of `spread_counts`).
    home: int [expert], home ranks.
    ranks: number of ranks.
    slots: largest number of replicas on a rank.
    ranks_per_node: ranks of a node.

    This is plain Python, since every step depends on the one before.
    """
    picked = picks[picks >= 0]
    share = totals / (1 + np.bincount(picked, minlength=len(totals)))
    load = np.bincount(home, weights=share, minlength=ranks).tolist() if slots else [math.inf] * ranks
    mean, holders = float(totals.sum()) / ranks, [[rank] for rank in home.tolist()]
    placed: list[list[int]] = [[] for _ in range(ranks)]
    order = picked[np.argsort(-share[picked], kind="stable")]
    for expert, tokens in zip(order.tolist(), share[order].tolist(), strict=True):
        first = holders[expert][0] // ranks_per_node * ranks_per_node
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
    placed = [[*experts, *[-1] * (slots - len(experts))] for experts in placed]
    return np.array(placed, dtype=np.int64).reshape(ranks, slots)


def fill_slots(
    slot_expert: np.ndarray, totals: np.ndarray, home: np.ndarray, ranks_per_node: int | None = None
) -> np.ndarray:
    """Fill empty slots. Returns int64 [rank, slot].

    Each empty slot gets the expert with the most tokens per instance that is not yet on the rank.

    slot_expert: int [rank, slot], -1 in empty slots.
    totals: float [expert], tokens; experts without tokens are left out.
    home: int [expert], home ranks.
    ranks_per_node: if given, only experts with an instance in the rank's node are used, so that no transfer crosses
        nodes.
    """
    filled, ranks = slot_expert.copy(), len(slot_expert)
    empty = np.argwhere(slot_expert < 0).tolist()
    if not empty:
        return filled
    count = (1 + np.bincount(slot_expert[slot_expert >= 0], minlength=len(totals))).tolist()
    total, present = totals.tolist(), [set(experts) for experts in filled.tolist()]
    for expert, rank in enumerate(home.tolist()):
        present[rank].add(expert)
    size = ranks_per_node or ranks
    hottest: list[tuple[float, int]] = []
    node = -1
    for rank, slot in empty:
        if rank // size != node:
            node = rank // size
            experts = (
                set().union(*present[node * size : (node + 1) * size]) - {-1} if ranks_per_node else range(len(total))
            )
            hottest = [(-total[expert] / count[expert], expert) for expert in experts]
            heapify(hottest)
        passed = []
        while hottest and hottest[0][1] in present[rank]:
            passed.append(heappop(hottest))
        if hottest and hottest[0][0] < 0:
            expert = hottest[0][1]
            filled[rank, slot] = expert
            present[rank].add(expert)
            count[expert] += 1
            heapreplace(hottest, (-total[expert] / count[expert], expert))
        for skipped in passed:
            heappush(hottest, skipped)
    return filled
