"""Process groups: a second group of the same ranks, and the part of the cluster that a group runs on."""

import datetime
from typing import Any

import torch.distributed as dist

from balancing.cluster import Cluster
from balancing.launch import detect_launch
from balancing.messages import connect

__all__ = ["cluster_of", "duplicate_group", "split_group"]


def cluster_of(ranks: list[int], cluster: Cluster | None) -> Cluster:
    """The part of `cluster` that a group of global `ranks` runs on, with ranks numbered within the group.

    cluster: of the whole job. Without it the launcher tells which ranks share a node, and speeds are those of a preset.
    """
    per_node = detect_launch().ranks_per_node if cluster is None else cluster.ranks_per_node
    nodes = len({rank // per_node for rank in ranks})
    if len(ranks) % nodes or ranks != sorted(ranks):
        nodes = 1
    return (cluster or Cluster.preset("h200-8x400g")).relabel(nodes=nodes, ranks_per_node=len(ranks) // nodes)


def duplicate_group(group: dist.ProcessGroup, timeout_minutes: float, *, on_host: bool = False) -> dist.ProcessGroup:
    """A new group of the ranks of `group`, so that messages of both do not mix. All ranks of the job call it together.

    timeout_minutes: of the new group.
    on_host: make it on gloo, for small messages that hosts exchange without waiting for their devices.
    """
    return _new_group(dist.get_process_group_ranks(group), timeout_minutes, on_host)


def split_group(group: dist.ProcessGroup, parts: int, timeout_minutes: float) -> dist.ProcessGroup:
    """The part of `group` that this rank is in, if it is cut into equal parts of neighbours, as a new group. All ranks
    of the job call it together. timeout_minutes: of the new group."""
    ranks = dist.get_process_group_ranks(group)
    each = len(ranks) // parts
    first = ranks.index(dist.get_rank()) // each * each
    return _new_group(ranks[first : first + each], timeout_minutes, on_host=False)


def _new_group(own: list[int], timeout_minutes: float, on_host: bool) -> dist.ProcessGroup:
    members: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(members, own)
    timeout = datetime.timedelta(minutes=timeout_minutes)
    backend = "gloo" if on_host else None
    groups = {
        ranks: dist.new_group(list(ranks), timeout=timeout, backend=backend)
        for ranks in sorted({tuple(r) for r in members})
    }
    duplicate = groups[tuple(members[dist.get_rank()])]
    if not on_host:
        connect(duplicate)
    return duplicate
