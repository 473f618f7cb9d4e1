"""Process groups: the machine as one of them sees it, which a planner is told, and a second one of the same ranks."""

import datetime
from typing import Any

import torch
import torch.distributed as dist

from balancing.cluster import Cluster
from balancing.launch import detect_launch

__all__ = ["cluster_of", "meet", "twin_of"]


def cluster_of(ranks: list[int], machine: Cluster | None) -> Cluster:
    """The part of `machine` that a group of global `ranks` runs on, in the group's own numbers.

    Without a description of the machine only who shares a node with whom is known, and speeds are any preset's.
    """
    per_node = detect_launch().ranks_per_node if machine is None else machine.ranks_per_node
    nodes = len({rank // per_node for rank in ranks})
    if len(ranks) % nodes or ranks != sorted(ranks):
        nodes = 1
    return (machine or Cluster.preset("h200-8x400g")).relabel(nodes=nodes, ranks_per_node=len(ranks) // nodes)


def twin_of(group: dist.ProcessGroup, timeout_minutes: float) -> dist.ProcessGroup:
    """A new group of the ranks of `group`, whose messages pass beside those. All ranks of the job call it together."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, dist.get_process_group_ranks(group))
    timeout = datetime.timedelta(minutes=timeout_minutes)
    groups = {ranks: dist.new_group(list(ranks), timeout=timeout) for ranks in sorted({tuple(r) for r in every})}
    twin = groups[tuple(every[dist.get_rank()])]
    meet(twin)
    return twin


def meet(group: dist.ProcessGroup) -> None:
    """Have all ranks of `group` meet in a collective. NCCL connects them in the first thing they do: were that a few
    messages between some of them, these would wait for the others, who do not come."""
    dist.all_reduce(torch.zeros(1, device=torch.cuda.current_device()), group=group)
