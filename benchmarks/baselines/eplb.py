"""DeepSeek's expert-parallel load balancer (EPLB, https://github.com/deepseek-ai/EPLB) with fixed homes, a baseline.

EPLB is made for inference, where every instance of every expert may be placed on any GPU: replicas are added one at a
time to the expert with the highest load per instance, instances are packed heaviest first, and tokens are divided
equally over the instances of their expert. In training an expert's home holds its optimizer state, and moving homes in
every step costs far more than it gains. This planner therefore keeps the homes and packs only the replicas; their
number per expert and the equal division of tokens are EPLB's.
"""

import numpy as np

__all__ = ["eplb_slots"]


def eplb_slots(load: np.ndarray, home: np.ndarray, slots: int) -> np.ndarray:
    """One layer's plan with fixed homes: int64 [rank, slot], the expert in each slot, -1 in empty ones.

    No rank gets two instances of an expert.

    load: [source_rank, expert], tokens.
    home: int [expert], home ranks.
    slots: maximal number of replicas on a rank.
    """
    ranks, experts = load.shape
    total, count = load.sum(0).astype(float), np.ones(experts)
    for _ in range(ranks * slots):
        share = np.where(count < ranks, total / count, -1.0)
        if share.max() <= 0:
            break
        count[share.argmax()] += 1
    share = total / count
    filled = np.bincount(home, weights=share, minlength=ranks)
    placed, used = np.full((ranks, slots), -1), np.zeros(ranks, dtype=np.int64)
    holds = home[:, None] == np.arange(ranks)
    for expert in np.argsort(-share, kind="stable").tolist():
        for _ in range(int(count[expert]) - 1):
            candidates = np.where((used < slots) & ~holds[expert], filled, np.inf)
            rank = int(candidates.argmin())
            if candidates[rank] == np.inf:
                break
            placed[rank, used[rank]] = expert
            used[rank] += 1
            holds[expert, rank] = True
            filled[rank] += share[expert]
    return placed
