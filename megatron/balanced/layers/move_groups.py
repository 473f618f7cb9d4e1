"""The process groups of moves."""

import datetime
from itertools import chain
from operator import itemgetter
from typing import Any

import torch.distributed as dist
from megatron.core import mpu

from balancing.messages import connect
from megatron.balanced.shared.process_groups import duplicate_group, gather_objects, options_like, pipeline_group

__all__ = ["MoveGroups"]


class MoveGroups:
    """Process groups of all ranks of the job, apart from those of training. All ranks call the methods together.

    timeout_minutes: timeout of their collectives.

    The attribute `tensors` is the group that layers travel in, and `timeout` its timeout.
    """

    tensors: dist.ProcessGroup

    def __init__(self, timeout_minutes: float) -> None:
        self.timeout = datetime.timedelta(minutes=timeout_minutes)
        self._minutes = timeout_minutes
        self._stage_hosts: Any = None
        self._pipeline_hosts: Any = None

    def connect(self) -> None:
        """Make and connect the groups. Call it before anything measures the free memory. A second call does nothing."""
        if self._stage_hosts is None:
            # gloo opens a socket to each rank of a group. These two groups need fewer sockets than one of all ranks.
            stage = mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)
            self._stage_hosts = duplicate_group(stage, self._minutes, on_host=True)
            self.renew()

    def renew(self) -> None:
        """Make the groups across stages anew: ranks have left the job, but none left the group of its stage."""
        self._pipeline_hosts = duplicate_group(pipeline_group(), self._minutes, on_host=True)
        self.tensors = dist.new_group(timeout=self.timeout, pg_options=options_like(pipeline_group(), self.timeout))
        rank, per_stage = dist.get_rank(), dist.get_world_size(self._stage_hosts)
        # Ranks with equal tensors share transfers, so most weights come from the same place in a neighbouring stage.
        connect(self.tensors, (rank - per_stage, rank + per_stage))

    def gather(self, local: Any) -> list[Any]:
        """All-gather an object over the ranks of the job. Returns the objects in the order of ranks."""
        from_stage = gather_objects((dist.get_rank(), local), self._stage_hosts)
        gathered = chain.from_iterable(gather_objects(from_stage, self._pipeline_hosts))
        return [value for _, value in sorted(gathered, key=itemgetter(0))]

    def along_pipeline(self, local: Any) -> list[Any]:
        """All-gather an object over the ranks that have this rank's place in each stage, in the order of stages."""
        return gather_objects(local, self._pipeline_hosts)
