"""The machine as one process group sees it: what a planner that balances over this group is told."""

from balancing.cluster import Cluster
from balancing.launch import detect_launch

__all__ = ["cluster_of"]


def cluster_of(ranks: list[int], machine: Cluster | None) -> Cluster:
    """The part of `machine` that a group of global `ranks` runs on, in the group's own numbers.

    Without a description of the machine only who shares a node with whom is known, and speeds are any preset's.
    """
    per_node = detect_launch().ranks_per_node
    nodes = len({rank // per_node for rank in ranks})
    if len(ranks) % nodes or ranks != sorted(ranks):
        nodes = 1
    return (machine or Cluster.preset("h200-8x400g")).relabel(nodes=nodes, ranks_per_node=len(ranks) // nodes)
