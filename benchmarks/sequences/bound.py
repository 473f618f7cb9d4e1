"""Seconds below which no plan of a batch comes, if keys travel to queries and all nodes hold equally many tokens.

A key enters every node with a later token of its sequence, but for the node that holds it. Let no node have a larger
area than a, or more tokens than its share. The tokens after position t of a sequence then lie on at least as many nodes
as their area is of a, or their number of a share, rounded up. All nodes but one of them receive the key at t. The sum
over positions and sequences is what all nodes receive together, and send. So

- forward, the fullest node receives at least the mean, and at least what the node with the last token of the longest
  sequence lacks: it holds no more than a share;
- backward, where it both sends and receives keys and gradients, at least twice the mean. The node with a sequence's
  last token sends each of its tokens of the sequence at least once, but for those after which no other node has any. It
  receives all tokens that it does not hold. Both together are all tokens but those at the end, whose area is at most a.

A larger a takes fewer bytes and more compute on the fullest node; the bound is the least over all a.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt

import numpy as np

from balancing.cluster import Cluster
from balancing.kernels.pairs import causal_area
from balancing.sequences import AttentionShape
from balancing.sequences.cost import hidden_seconds, linear_seconds, token_bytes

__all__ = ["bound_seconds", "least_crossing"]

_AREAS = 401  # of the fullest node that are tried, from the mean to all
_BACKWARD = 2.5  # of attention's compute over its forward


def least_crossing(lengths: Sequence[int], nodes: int, most: float) -> tuple[float, float]:
    """Tokens that the fullest node at least receives forward, and at least sends and receives together.

    most: area of the fullest node, in query-key pairs.
    """
    share = sum(lengths) / nodes
    total = forward = backward = 0.0
    for length in lengths:
        if length <= share and length * (length + 1) <= 2 * most:
            continue
        entering = []
        for further in range(1, nodes):  # positions whose keys enter at least so many nodes
            rest = length * (length + 1.0) - 2 * further * most
            end = max((sqrt(1 + 4 * rest) - 1) / 2 - 1 if rest > 0 else 0.0, length - further * share, 0.0)
            if not end:
                break
            entering.append(end)
        total += sum(entering)
        forward = max(forward, length - share)
        backward = max(backward, *entering[:1], 0.0)
    return max(forward, total / nodes), max(backward, 2 * total / nodes)


def bound_seconds(lengths: Sequence[int], cluster: Cluster, shape: AttentionShape) -> float:
    """Seconds of a step whose compute hides all transfers as long as it lasts."""
    mean = causal_area(lengths) / cluster.nodes
    token_seconds = token_bytes(shape) / (cluster.nics_per_node * cluster.nic_bandwidth)
    found = []
    for low, high in pairwise(np.geomspace(1.0, cluster.nodes, _AREAS)):  # compute of the one, bytes of the other
        exchange = [tokens * token_seconds for tokens in least_crossing(lengths, cluster.nodes, high * mean)]
        compute = hidden_seconds(low * mean / cluster.ranks_per_node, cluster, shape)
        exposed = max(0.0, exchange[0] - compute) + max(0.0, exchange[1] - _BACKWARD * compute)
        found.append((1 + _BACKWARD) * compute + exposed)
    return linear_seconds(sum(lengths) / cluster.world_size, cluster, shape) + shape.layers * min(found)
