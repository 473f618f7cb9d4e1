"""DeepSeek's expert-parallel load balancer (EPLB), a baseline: copies by load, packed evenly, used evenly.

EPLB is made for inference. It may put every copy of every expert anywhere (`rebalance_experts`): copies go one by one
to the expert with the most load per copy, and copies are packed on GPUs heaviest first. Where experts come in groups
that divide by the nodes, groups are packed on nodes before that. Tokens then choose among copies evenly.

In training an expert has a home with its optimizer state, and moving homes every step costs far more than it gains. So
the plan for training (`eplb_slots`) keeps homes and packs only the copies beyond them; how many each expert gets, and
the even use of all, is EPLB's.
"""

import numpy as np

__all__ = ["eplb_slots", "rebalance_experts"]


def rebalance_experts(
    load: np.ndarray, *, copies: int, groups: int, nodes: int, gpus: int
) -> tuple[np.ndarray, np.ndarray]:
    """Where EPLB puts every copy when nothing is fixed.

    load: [layer, expert]. copies: all instances together, a multiple of gpus. groups: of neighbouring experts; they
    stay on one node if they divide by the nodes, else nodes and groups are ignored.

    Returns the expert of each instance, int64 [layer, copies], GPU by GPU, and the number of instances of each expert,
    int64 [layer, expert]. Raises ValueError for numbers that do not divide.
    """
    layers, experts = load.shape
    if copies % gpus or experts % groups or gpus % nodes or copies < experts:
        raise ValueError(
            f"{copies} copies of {experts} experts in {groups} groups on {gpus} GPUs in {nodes} nodes: copies must "
            "divide by GPUs, experts by groups, GPUs by nodes, and every expert needs a copy"
        )
    if groups % nodes:
        groups, nodes = 1, 1
    of_instance, count = np.zeros((layers, copies), dtype=np.int64), np.zeros((layers, experts), dtype=np.int64)
    for layer in range(layers):
        of_group = load[layer].reshape(groups, -1).sum(1)
        instances: list[int] = []
        for members in _pack(of_group, nodes):
            size = experts // groups
            local = np.concatenate([np.arange(group * size, (group + 1) * size) for group in members])
            # In the order in which copies are made: every expert once, then the additional ones as they come.
            made = np.concatenate([np.arange(len(local)), _additional(load[layer, local], copies // nodes)])
            number = np.bincount(made)
            count[layer, local] = number
            share = (load[layer, local] / number)[made]
            for bin_ in _pack(share, gpus // nodes):
                instances += local[made[bin_]].tolist()
        of_instance[layer] = instances
    return of_instance, count


def _additional(load: np.ndarray, copies: int) -> np.ndarray:
    """The expert of each copy beyond the first of every expert, in the order they are made."""
    count, made = np.ones(len(load)), []
    for _ in range(copies - len(load)):
        made.append(int((load / count).argmax()))
        count[made[-1]] += 1
    return np.array(made, dtype=np.int64)


def _pack(weight: np.ndarray, bins: int) -> list[list[int]]:
    """Items in `bins` bins of equal number, heaviest first, each into the lightest bin that has room."""
    room = len(weight) // bins
    content: list[list[int]] = [[] for _ in range(bins)]
    filled = [0.0] * bins
    for item in np.argsort(-weight, kind="stable").tolist():
        target = min((b for b in range(bins) if len(content[b]) < room), key=lambda b: filled[b])
        content[target].append(item)
        filled[target] += float(weight[item])
    return content


def eplb_slots(load: np.ndarray, home: np.ndarray, slots: int) -> np.ndarray:
    """One layer's plan with fixed homes: int64 [rank, slot], the expert in each slot, -1 in empty ones.

    load: [source_rank, expert], tokens. home: int [expert]. No rank gets two instances of an expert.
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
