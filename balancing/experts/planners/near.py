"""Replicas that keep tokens in their node, so that an all-to-all sends less between nodes than with even routing.

With homes alone (N - 1) / N of all tokens leave their node on N nodes, however even routing is, and an all-to-all takes
as long as the busiest NIC. A node that has a replica of an expert serves its own tokens of it. Such a replica crosses
nodes once an iteration, in weights and in gradients, and saves tokens in each of its micro-batches.

The next replica goes to the node and the expert with most tokens that would otherwise leave, on the rank of that node
with the fewest tokens. What each rank is to serve then comes from the split, which levels ranks first and keeps tokens
in their node as far as that allows.
"""

from collections.abc import Sequence

import numpy as np

__all__ = ["near_slots"]


def near_slots(
    load: np.ndarray, home: np.ndarray, slot_expert: np.ndarray, *, ranks_per_node: int, numbers: Sequence[int]
) -> list[np.ndarray]:
    """`slot_expert` with so many more replicas in empty slots: one int64 [rank, slot] for each of `numbers`.

    load: [source_rank, expert], tokens.
    home: int [expert], home ranks.
    slot_expert: int [rank, slot], the replicas so far, -1 in empty slots.
    ranks_per_node: ranks of a node; it divides the ranks.
    numbers: of further replicas, ascending; fewer are added where slots, or experts that a node lacks, are used up.
    """
    ranks, experts = load.shape
    wanted = load.reshape(-1, ranks_per_node, experts).sum(1)  # [node, expert]
    rank, slot = np.nonzero(slot_expert >= 0)
    held = slot_expert[rank, slot]
    lacks = np.ones(wanted.shape, dtype=bool)
    lacks[home // ranks_per_node, np.arange(experts)] = False
    lacks[rank // ranks_per_node, held] = False
    leaving = np.where(lacks, wanted, 0.0)
    share = load.sum(0) / (1 + np.bincount(held, minlength=experts))
    serves = (np.bincount(home, share, ranks) + np.bincount(rank, share[held], ranks)).tolist()
    filled, free = slot_expert.copy(), (slot_expert < 0).sum(1).tolist()
    found: list[np.ndarray] = []
    homes, added = home.tolist(), 0
    for at in np.argsort(-leaving, axis=None, kind="stable").tolist() if numbers else ():
        node, expert = divmod(at, experts)
        tokens = float(leaving[node, expert])
        if tokens <= 0 or len(found) == len(numbers):
            break
        first = node * ranks_per_node
        able = [each for each in range(first, first + ranks_per_node) if free[each]]
        if not able:
            continue
        best = min(able, key=serves.__getitem__)
        filled[best, int(np.argmax(filled[best] < 0))] = expert
        free[best] -= 1
        serves[best] += tokens
        serves[homes[expert]] -= tokens
        added += 1
        while len(found) < len(numbers) and added == numbers[len(found)]:
            found.append(filled.copy())
    return found + [filled] * (len(found) < len(numbers) and added > (numbers[len(found) - 1] if found else 0))
