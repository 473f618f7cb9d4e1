"""Whether ranks compute with something of their own. Where they share cores, or a GPU without shares, a step takes as
long as the sum of their work, whoever does it: balance cannot make it shorter."""

import os
import socket
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from megatron.balanced.cpu.device import is_cpu
from megatron.balanced.shared.process_groups import gather_objects

__all__ = ["what_ranks_share"]


def what_ranks_share() -> str | None:
    """What ranks of the job share, such as "4 ranks share 2 cores"; None if each has its own. All ranks call it
    together and get the same answer."""
    share = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    if is_cpu():
        own: list[Any] = sorted(os.sched_getaffinity(0))
    else:
        own = [] if share else [str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)]
    by_host: dict[str, list[list[Any]]] = {}
    for host, units in gather_objects((socket.gethostname(), own), dist.group.WORLD):
        by_host.setdefault(host, []).append(units)
    for ranks in by_host.values():
        users = Counter(unit for units in ranks for unit in units)
        if is_cpu() and len(ranks) > len(users):
            return f"{len(ranks)} ranks share {len(users)} core{'s' * (len(users) > 1)}"
        if not is_cpu() and users and (most := users.most_common(1)[0])[1] > 1:
            return f"{most[1]} ranks share the GPU {most[0]}"
    return None
