"""The number of turns in which gathered keys arrive.

More turns let a rank begin with the first keys earlier, and cost it a call of attention and a transfer group each. So a
turn has at least as many bytes as its link carries in several latencies of a message, and there are at most eight: with
an eighth of the keys a rank is busy for long enough.
"""

from typing import Any, NamedTuple

import numpy as np

from balancing.cluster import Cluster

__all__ = ["MOST_TURNS", "SMALLEST_TURNS", "TurnTokens", "number_of_turns", "turn_tokens"]

MOST_TURNS = 8
_LATENCIES = 8  # that a turn takes at least, so that latency is an eighth of it at most


class TurnTokens(NamedTuple):
    """Least tokens of a turn of gathering, inside a node and between nodes; indexed by whether it is between nodes."""

    intra: int
    inter: int


SMALLEST_TURNS = TurnTokens(1, 1)  # for as many turns as there may be


def turn_tokens(cluster: Cluster, kv_bytes: float) -> TurnTokens:
    """For a cluster. kv_bytes: bytes of one token's keys and values in one layer."""
    seconds = _LATENCIES * cluster.message_seconds
    rates = cluster.intra_node_bandwidth, cluster.nic_bandwidth * max(1, len(cluster.nics(0)))
    # An unknown bandwidth is that of a link that the cluster does not have.
    return TurnTokens(*(max(1, int(min(rate * seconds / kv_bytes, 2**40))) for rate in rates))


def number_of_turns(tokens: Any, least: Any) -> np.ndarray:
    """int64: turns for `tokens`, of which each has `least` at least."""
    return np.clip(np.asarray(tokens) // np.asarray(least), 1, MOST_TURNS)
