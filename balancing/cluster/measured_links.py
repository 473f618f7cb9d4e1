"""Speeds of links, measured between ranks of the default process group: by `python -m balancing.cluster --measure`, and
in a training job by `--cluster auto`."""

import statistics
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from balancing.cluster.cluster import Cluster
from balancing.messages import runs_nccl

__all__ = ["gather_values", "measure_links", "message_latency", "pair_bandwidth", "seconds_now", "with_measured_links"]

_PAIR_REPEATS = 5
_MESSAGES = 50  # a latency is the mean of as many
_LONG_ENOUGH = 0.1  # seconds of one transfer: far above latency, and longer than the burst that a shaped NIC permits
_IN_A_JOB = 2**26  # most bytes of a message where a model fills the memory


def measure_links(
    per_node: int, nics_per_node: int, device: torch.device, most_bytes: int | None = None
) -> dict[str, Any]:
    """Speeds of the links of a job, as fields of `Cluster`, without those that its ranks cannot measure.

    All ranks of the default process group call this, and all return the same. One pair sends while the others are idle.
    Gloo sends through one NIC of a rank; NCCL spreads a transfer over all of them.

    per_node: ranks on each node, numbered in order.
    nics_per_node: NICs of each node; a rank has an equal part of them, at least one.
    most_bytes: of a message; None for 1 GiB on a GPU and 256 MiB on a CPU.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    speeds: dict[str, Any] = {}
    if per_node > 1:
        speeds["intra_node_bandwidth"] = pair_bandwidth(0, 1, device, most_bytes)
    if ranks > per_node:
        nics = max(1, nics_per_node // per_node) if runs_nccl() else 1
        speeds["nic_bandwidth"] = pair_bandwidth(0, per_node, device, most_bytes) / nics
    if ranks > 1:
        speeds["message_seconds"] = message_latency(0, per_node if ranks > per_node else 1, device)
    return speeds


def with_measured_links(cluster: Cluster, device: torch.device) -> tuple[Cluster, str]:
    """`cluster`, of the ranks of the default process group, with measured links, and a few words on them. All ranks
    call it together, while a model fills the memory."""
    speeds = measure_links(cluster.ranks_per_node, cluster.nics_per_node, device, _IN_A_JOB)
    names = {"intra_node_bandwidth": "in a node", "nic_bandwidth": "through a NIC"}
    told = [f"{speeds[name] / 1e9:,.2f} GB/s {where}" for name, where in names.items() if name in speeds]
    if "message_seconds" in speeds:
        told.append(f"{speeds['message_seconds'] * 1e6:,.0f} us a message")
    return replace(cluster, **speeds), ", ".join(told)


def message_latency(sender: int, receiver: int, device: torch.device) -> float:
    """Seconds of a message of eight bytes from rank `sender` to rank `receiver`: half of a round trip.

    All ranks of the default process group call this, and all return the figure. Raises RuntimeError when the group's
    timeout passes.
    """
    rank, took = dist.get_rank(), 0.0
    if rank in (sender, receiver):
        message = torch.zeros(1, dtype=torch.int64, device=device)
        for repeat in range(1 + _PAIR_REPEATS):  # the first one opens the connection
            begin = seconds_now(device)
            for _ in range(_MESSAGES):
                for source, target in ((sender, receiver), (receiver, sender)):
                    if rank == source:
                        dist.send(message, target)
                    else:
                        dist.recv(message, source)
            seconds = (seconds_now(device) - begin) / (2 * _MESSAGES)
            took = seconds if repeat == 1 else min(took, seconds)
    return gather_values(took)[sender]


def pair_bandwidth(sender: int, receiver: int, device: torch.device, most_bytes: int | None = None) -> float:
    """Bytes/s from rank `sender` to rank `receiver`, through the default process group.

    All ranks of the group call this, and all return the figure. The size grows until one transfer takes 0.1 s, or up to
    `most_bytes`, as in `measure_links`. The median of 5 transfers counts. A transfer ends when the receiver's answer
    has arrived. Raises RuntimeError when the group's timeout passes.
    """
    rate = 0.0
    if dist.get_rank() == sender:
        rate = _send_until_long(receiver, device, most_bytes or (2**30 if device.type == "cuda" else 2**28))
    elif dist.get_rank() == receiver:
        _receive_until_told(sender, device)
    return gather_values(rate)[sender]


def _send_until_long(receiver: int, device: torch.device, most_bytes: int) -> float:
    answer = torch.zeros(1, dtype=torch.int64, device=device)
    size = 2**20
    while True:
        dist.send(torch.tensor([size], device=device), receiver)
        payload = torch.zeros(size, dtype=torch.uint8, device=device)
        seconds = []
        for _ in range(1 + _PAIR_REPEATS):  # the first one opens the connection
            begin = seconds_now(device)
            dist.send(payload, receiver)
            dist.recv(answer, receiver)
            seconds.append(seconds_now(device) - begin)
        took = statistics.median(seconds[1:])
        if took >= _LONG_ENOUGH or size >= most_bytes:
            dist.send(torch.tensor([0], device=device), receiver)
            return size / took
        size *= 2


def _receive_until_told(sender: int, device: torch.device) -> None:
    size = torch.zeros(1, dtype=torch.int64, device=device)
    while True:
        dist.recv(size, sender)
        if size.item() == 0:
            return
        payload = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
        for _ in range(1 + _PAIR_REPEATS):
            dist.recv(payload, sender)
            dist.send(size, sender)


def gather_values[T](value: T) -> list[T]:
    """The values of all ranks, in rank order. Also synchronizes the ranks."""
    if not dist.is_initialized():
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def seconds_now(device: torch.device) -> float:
    """The host's clock, once the device has done what was started on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
