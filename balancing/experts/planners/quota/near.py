"""Replicas that keep tokens in their node, so that an all-to-all sends less between nodes than with even routing.

Without replicas on N nodes, (N - 1) / N of all tokens leave their node even if routing is even, and an all-to-all takes
as long as the busiest NIC. A node with a replica of an expert serves its own tokens of that expert. The weights and
gradients of such a replica cross nodes once an iteration, but the replica saves tokens in every micro-batch.

The next replica goes to the node and expert with the most tokens that would otherwise leave the node, on the rank of
that node with the fewest tokens. The split (`balancing.experts.split.split`) then balances ranks first, and keeps
tokens in their node as far as balance allows.
"""

from collections.abc import Sequence

import numpy as np

__all__ = ["near_slots"]


def near_slots(
    load: np.ndarray,
    home: np.ndarray,
    starts: Sequence[np.ndarray],
    *,
    ranks_per_node: int,
    numbers: Sequence[int],
) -> list[np.ndarray]:
    """Add replicas to empty slots. Returns an int64 [rank, slot] for each pair of `starts` and `numbers`.

    load: [source_rank, expert], tokens.
    home: int [expert], home ranks.
    starts: int [rank, slot] each, the replicas so far, -1 in empty slots.
    ranks_per_node: ranks of a node; it divides the ranks.
    numbers: numbers of replicas to add, ascending. If slots or useful replicas run out, the last placement of a start
        has fewer, and larger numbers get no placement.
    """
    experts = load.shape[1]
    wanted = load.reshape(-1, ranks_per_node, experts).sum(1)  # [node, expert]
    wanted[home // ranks_per_node, np.arange(experts)] = 0
    order = np.argsort(-wanted, axis=None, kind="stable")[: np.count_nonzero(wanted)]
    node, expert = np.divmod(order, experts)
    leaving = node.tolist(), expert.tolist(), wanted[node, expert].tolist()
    return [placement for slots in starts for placement in _near(load, home, slots, ranks_per_node, numbers, leaving)]


def _near(
    load: np.ndarray,
    home: np.ndarray,
    start: np.ndarray,
    ranks_per_node: int,
    numbers: Sequence[int],
    leaving: tuple[list[int], list[int], list[float]],
) -> list[np.ndarray]:
    """`near_slots` for one start.

    leaving: nodes, experts and tokens that leave the node without replicas, most tokens first.
    """
    ranks, experts = len(start), load.shape[1]
    rank, slot = np.nonzero(start >= 0)
    replicated = start[rank, slot]
    share = load.sum(0) / (1 + np.bincount(replicated, minlength=experts))
    serves = (np.bincount(home, share, ranks) + np.bincount(rank, share[replicated], ranks)).tolist()
    served = set(zip((rank // ranks_per_node).tolist(), replicated.tolist(), strict=True))
    filled = start.tolist()
    # The empty slots of each rank in descending order, and the ranks of each node with empty slots.
    free = [[slot for slot, expert in enumerate(row) if expert < 0][::-1] for row in filled]
    nodes = [range(first, first + ranks_per_node) for first in range(0, ranks, ranks_per_node)]
    able = [[rank for rank in node if free[rank]] for node in nodes]
    placements: list[np.ndarray] = []
    homes, added, most = home.tolist(), 0, min(numbers[-1], sum(map(len, free)))
    for node, expert, tokens in zip(*leaving, strict=True):
        if added == most:
            break
        if not able[node] or (node, expert) in served:
            continue
        best = min(able[node], key=serves.__getitem__)
        filled[best][free[best].pop()] = expert
        if not free[best]:
            able[node].remove(best)
        serves[best] += tokens
        serves[homes[expert]] -= tokens
        added += 1
        if added in numbers:
            placements.append(np.array(filled))
    return placements if not added or added in numbers else [*placements, np.array(filled)]
