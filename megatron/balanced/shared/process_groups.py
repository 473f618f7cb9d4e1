"""Process groups: duplicate or split a group, gather objects, find the part of the cluster that a group runs on."""

import datetime
import os
import resource
from typing import Any

import torch
import torch.distributed as dist

from balancing.cluster import Cluster
from balancing.launch import detect_launch
from balancing.messages import connect, runs_nccl

__all__ = [
    "DEFAULT_MACHINE",
    "SocketLimitError",
    "cluster_of",
    "default_machine",
    "duplicate_group",
    "gather_objects",
    "options_like",
    "pipeline_group",
    "split_group",
]

DEFAULT_MACHINE = "h200-8x400g"  # a preset
# A rank on one core, over gloo: measured with two ranks on two cores of an AMD EPYC, torch 2.14.1, by
# `torchrun --nproc-per-node 2 -m balancing.cluster --measure --device cpu`. Between hosts: 10 Gbit/s, not measured.
_CPU = Cluster(
    nodes=1,
    ranks_per_node=8,
    nics_per_node=1,
    intra_node_bandwidth=3.4e9,
    nic_bandwidth=1.2e9,
    flops=69e9,
    memory=8e9,
    message_seconds=175e-6,
)
_SPARE_FILES = 256  # files that a rank may open in addition to the sockets of a new group
_OPTIONS = ("cga_cluster_size", "max_ctas", "min_ctas", "net_name")  # NCCL options that a user can set


class SocketLimitError(ValueError):
    """A rank may not open a socket to each rank of a group."""


def cluster_of(ranks: list[int], cluster: Cluster | None) -> Cluster:
    """The part of `cluster` that a group of global `ranks` runs on, with ranks numbered within the group.

    cluster: the cluster of the whole job. None: the launcher tells which ranks share a node, and speeds are those of
        `default_machine`.
    """
    per_node = detect_launch().ranks_per_node if cluster is None else cluster.ranks_per_node
    nodes = len({rank // per_node for rank in ranks})
    if len(ranks) % nodes or ranks != sorted(ranks):
        nodes = 1
    if cluster is None:
        cluster = default_machine(on_cpus=dist.is_initialized() and not runs_nccl())
    return cluster.relabel(nodes=nodes, ranks_per_node=len(ranks) // nodes)


def default_machine(*, on_cpus: bool) -> Cluster:
    """A node for plans without `--cluster`. On CPUs all attention has one rate, so it is planned by area."""
    return _CPU if on_cpus else Cluster.preset(DEFAULT_MACHINE)


def duplicate_group(group: dist.ProcessGroup, timeout_minutes: float, *, on_host: bool = False) -> dist.ProcessGroup:
    """A new process group with the ranks of `group`, so that messages of the two do not mix. All ranks of the job call
    it together.

    timeout_minutes: timeout of the new group.
    on_host: use gloo, for small messages that hosts exchange without waiting for their devices. Otherwise the new group
        has the NCCL options of `group`.

    Raises SocketLimitError if `on_host` and this rank may not open a socket to each rank.
    """
    return _new_group(dist.get_process_group_ranks(group), group, timeout_minutes, on_host)


def pipeline_group() -> dist.ProcessGroup:
    """The process group of the ranks that have this rank's place in each stage."""
    from megatron.core import mpu  # command lines that need no Megatron-LM import this file

    process_groups = mpu.get_pipeline_model_parallel_group()  # Megatron-LM may have several of the same ranks
    return process_groups[0] if isinstance(process_groups, list) else process_groups


def split_group(group: dist.ProcessGroup, parts: int, timeout_minutes: float) -> dist.ProcessGroup:
    """Split `group` into equal parts of neighbouring ranks. Returns a new process group for the part with this rank.
    All ranks of the job call it together. timeout_minutes: of the new group."""
    ranks = dist.get_process_group_ranks(group)
    size = len(ranks) // parts
    first = ranks.index(dist.get_rank()) // size * size
    return _new_group(ranks[first : first + size], group, timeout_minutes, on_host=False)


def gather_objects(local: Any, process_group: dist.ProcessGroup) -> list[Any]:
    """All-gather an object over the ranks of `process_group`. Returns the objects in the order of ranks."""
    gathered: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(gathered, local, group=process_group)
    return gathered


def options_like(process_group: dist.ProcessGroup, timeout: datetime.timedelta) -> Any:
    """A copy of the NCCL options that the user set for `process_group` (--nccl-communicator-config-path,
    --high-priority-stream-groups); None on other backends."""
    if not runs_nccl(process_group):
        return None
    given = process_group._get_backend(torch.device("cuda")).options
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=given.is_high_priority_stream)
    options._timeout = timeout
    for name in _OPTIONS:
        if getattr(given.config, name) is not None:
            setattr(options.config, name, getattr(given.config, name))
    return options


def _new_group(ranks: list[int], like: dist.ProcessGroup, timeout_minutes: float, on_host: bool) -> dist.ProcessGroup:
    members = gather_objects(ranks, dist.group.WORLD)
    timeout = datetime.timedelta(minutes=timeout_minutes)
    if on_host:
        _allow_sockets(len(ranks))
    made = {
        group: dist.new_group(
            list(group),
            timeout=timeout,
            backend="gloo" if on_host else None,
            pg_options=None if on_host else options_like(like, timeout),
        )
        for group in sorted({tuple(each) for each in members})
    }
    duplicate = made[tuple(ranks)]
    if not on_host:
        connect(duplicate)
    return duplicate


def _allow_sockets(ranks: int) -> None:
    """Raise this process's limit of open files so that gloo can open a socket to each of `ranks` ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir("/proc/self/fd"))
    needed = opened + ranks + _SPARE_FILES
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise SocketLimitError(
            f"a rank needs a socket to each of {ranks} ranks; it has {opened} open files and is limited to {hard}; "
            f"allow {needed} (ulimit -Hn)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
