"""The alias method on exact loads, a baseline after MoonEP's planner (Megatron-LM's pull request 6274).

MoonEP places all replicas inside the layer, from the counts of the micro-batch. As in Walker's alias method, the
busiest rank fills the emptiest up to the mean, again and again. A rank that was filled takes part no more, so its
replicas have one donor, and as many slots as homes suffice. Here it stops at a goal above the mean, which saves copies.
"""

import numpy as np

__all__ = ["alias_slots"]


def alias_slots(load: np.ndarray, home: np.ndarray, slots: int, goal: float = 1.03) -> np.ndarray:
    """One layer's plan: int64 [rank, slot], the expert in each slot, -1 in empty ones.

    load: [source_rank, expert], tokens, of the micro-batch itself.
    home: int [expert], home ranks.
    slots: maximal number of replicas on a rank.
    goal: busiest rank over the mean, to reach.
    """
    ranks = len(load)
    served = (home == np.arange(ranks)[:, None]) * load.sum(0, dtype=float)
    placed, used, tokens = np.full((ranks, slots), -1), np.zeros(ranks, dtype=np.int64), served.sum(1)
    mean = tokens.mean()
    while tokens.max() > goal * mean:
        giver, taker = int(tokens.argmax()), int(np.where(used < slots, tokens, np.inf).argmin())
        expert = int(served[giver].argmax())
        moved = min(tokens[giver] - mean, mean - tokens[taker], served[giver, expert])
        if used[taker] == slots or moved < 1:
            break
        if home[expert] != taker and expert not in placed[taker]:
            placed[taker, used[taker]] = expert
            used[taker] += 1
        for rank, sign in ((giver, -1), (taker, 1)):
            served[rank, expert] += sign * moved
            tokens[rank] += sign * moved
    return placed
