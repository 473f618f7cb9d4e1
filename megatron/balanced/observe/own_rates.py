"""`--cluster auto`: planners get the rates that the job itself has measured, once there are some.

The last rank gathers the report's records, fits rates to the measured calls among them and sends the table to all
ranks. They take it together, between two steps, and measure the links between them then, in about a second.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from balancing.cluster import Cluster
from balancing.cluster.job_rates import measured_cluster
from balancing.cluster.measured_links import with_measured_links
from balancing.report import MOST_MEASURED
from megatron.balanced.shared.log import print_once
from megatron.balanced.shared.process_groups import cluster_of

__all__ = ["OwnRates"]


class OwnRates:
    """machine: what planners have until then; None for defaults. adopt: called once on each rank, with the table."""

    def __init__(self, machine: Cluster | None, adopt: Callable[[Cluster], None]) -> None:
        self._machine, self._adopt = machine, adopt
        self._lines: deque[dict[str, Any]] = deque(maxlen=MOST_MEASURED)
        self._done = False

    def agree(self, lines: Iterable[dict[str, Any]], process_group: dist.ProcessGroup) -> None:
        """All ranks call it together, between two steps. lines: of the report that were measured, on the last rank."""
        if self._done:
            return
        self._lines += lines
        world = dist.get_world_size()
        found: list[Any] = [None]
        if dist.get_rank() == world - 1:
            found[0] = measured_cluster(cluster_of([*range(world)], self._machine), self._lines)
        dist.broadcast_object_list(found, src=world - 1, group=process_group)
        if found[0] is not None:
            self._done = True
            cluster, said = found[0]
            cluster, links = with_measured_links(cluster, torch.empty(0, device=torch.cuda.current_device()).device)
            said = f"{said}; links measured: {links}" if links else said
            print_once(f"> --cluster auto: experts are planned by these rates from now on: {said}")
            self._adopt(cluster)
