"""Replicas on a fixed graph of ranks, a baseline after DeepSeek's LPLB (https://github.com/deepseek-ai/LPLB).

LPLB fixes which rank lends to which (a cube, hypercube or torus), copies the hottest experts of each rank by an old
load, one replica an expert, and divides tokens by linear programming on exact loads. Here the split of training divides
them, which leaves at most a hundredth more. The graph is a ring with steps of 1, 2, 4, ...
"""

import numpy as np

__all__ = ["graph_slots"]


def graph_slots(load: np.ndarray, home: np.ndarray, slots: int) -> np.ndarray:
    """One layer's plan: int64 [rank, slot], the expert in each slot, -1 in empty ones.

    load: [source_rank, expert], tokens.
    home: int [expert], home ranks.
    slots: maximal number of replicas on a rank.
    """
    ranks, total = len(load), load.sum(0)
    placed = np.full((ranks, slots), -1)
    for rank in range(ranks):
        own = np.flatnonzero(home == rank)
        hottest = own[np.argsort(-total[own], kind="stable")]
        for slot, expert in enumerate(hottest[:slots].tolist()):
            if total[expert] > 0 and 2**slot < ranks:
                placed[(rank + 2**slot) % ranks, slot] = expert
    return placed
