"""Where the tokens of a micro-batch are: the part of sequence balancing that depends on the loop.

`SequenceBalancer` balances attention in two modes. In a loop that decides where tokens are, attention sends queries,
keys and values (`in_place`). In a loop that reads its data through the balancer, the tokens themselves are where the
plan puts them (`moved_tokens`). A mode makes the plans and calls attention; all else is the same for both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.transformer.transformer_config import TransformerConfig

from balancing.clock import CpuClock, CudaClock
from balancing.cluster import Cluster
from balancing.kernels.choice import Choice, choose_kernel
from balancing.kernels.timed import TimedKernel
from balancing.messages import connect
from balancing.sequences import AttentionShape
from balancing.sequences.config import SequenceConfig
from balancing.sequences.engine.captured import Graphs
from megatron.balanced.cpu.device import is_cpu
from megatron.balanced.sequences.domain import Domain
from megatron.balanced.sequences.events import StepRecord
from megatron.balanced.sequences.planner import Planner
from megatron.balanced.sequences.shape import heads_of_rank
from megatron.balanced.shared.log import print_once
from megatron.balanced.shared.process_groups import (
    cluster_of,
    duplicate_group,
    gather_objects,
    pipeline_group,
    split_group,
)

__all__ = ["Sharing", "Tokens", "by_value"]


@dataclass(frozen=True)
class Sharing:
    """The ranks that share micro-batches, as one of them sees it, and what they balance.

    domain: these ranks.
    process_group: the same, a group of Megatron-LM or a part of it.
    layers: the same, for messages of layers.
    hosts: the same on gloo, for messages that hosts exchange without waiting for their devices.
    cluster: the same; its speeds are for plans.
    config: settings.
    model: its config.
    shape: shape of the model's attention.
    kernel: of attention.
    record: the record of the step in progress.
    graphs: of attention, for `attention_cuda_graphs`.
    """

    domain: Domain
    process_group: dist.ProcessGroup
    layers: dist.ProcessGroup
    hosts: dist.ProcessGroup
    cluster: Cluster
    config: SequenceConfig
    model: TransformerConfig
    shape: AttentionShape
    kernel: Choice
    record: StepRecord
    graphs: Graphs = field(default_factory=Graphs)

    @classmethod
    def connect(
        cls,
        config: SequenceConfig,
        model: TransformerConfig,
        shape: AttentionShape,
        machine: Cluster | None,
        timeout_minutes: float,
        *,
        timed: bool,
        had_kernel: str | None = None,
    ) -> "Sharing":
        """All ranks of the job call it together. On GPUs rank 0 prints which kernel of attention was chosen.

        config, model, shape: as above. Data-parallel ranks share micro-batches unless config.domain is "context".
        machine: the cluster of the job; None for defaults.
        timeout_minutes: timeout of new process groups.
        timed: whether someone reads the times of messages and of calls of the kernel.
        had_kernel: the name of the kernel of attention that a resumed run had.

        Raises KernelError, a ValueError, if the kernel that `config` names does not run here.
        """
        device = torch.empty(0, device=torch.cuda.current_device()).device
        kernel = choose_kernel(device, heads_of_rank(shape, model), config.kernel, had=had_kernel)
        if device.type != "cpu":  # which has one kernel, named in the line on all kernels
            print_once(f"> {kernel.line}")
        if timed:
            kernel = kernel._replace(kernel=TimedKernel(kernel.kernel, CpuClock() if is_cpu() else CudaClock()))
        domain = Domain.context_parallel() if config.domain == "context" else Domain.data_parallel()
        if config.domain == "context":
            process_group = layers = mpu.get_context_parallel_group()
            connect(layers)
        elif domain.groups > 1:
            whole = mpu.get_data_parallel_group(with_context_parallel=True)
            process_group = layers = split_group(whole, domain.groups, timeout_minutes)
        else:  # Megatron-LM reduces gradients in its own group meanwhile
            process_group = mpu.get_data_parallel_group(with_context_parallel=True)
            layers = duplicate_group(process_group, timeout_minutes)
        cluster = cluster_of(dist.get_process_group_ranks(process_group), machine)
        nodes = gather_objects(cluster.nodes, dist.group.WORLD)
        if len({nodes[rank] for rank in dist.get_process_group_ranks(pipeline_group())}) > 1:
            # Stages hold the same tokens, so they need the same plans, however they lie on nodes.
            cluster = cluster.relabel(1, cluster.world_size)
        return cls(
            domain,
            process_group,
            layers,
            duplicate_group(process_group, timeout_minutes, on_host=True),
            cluster.with_kernel(kernel.name),
            config,
            model,
            shape,
            kernel,
            StepRecord(timed),
        )

    @property
    def ranks(self) -> list[int]:
        """Numbers of these ranks in the job."""
        return dist.get_process_group_ranks(self.hosts)

    @property
    def options(self) -> dict[str, Any]:
        """Of `BatchAttention.of`. Without a report nobody reads the times."""
        graphs = self.graphs if self.config.attention_cuda_graphs else None
        return {"kernel": self.kernel.kernel, "timed": self.record.timed, "graphs": graphs}

    def compare(self, place: str, value: Any) -> list[Any]:
        """`value` of each of these ranks; all of them call this together.

        place: where this rank is. Raises ValueError on all ranks if one is somewhere else.
        """
        places, values = zip(*gather_objects((place, value), self.hosts), strict=True)
        if len(apart := by_value(self.ranks, places)) > 1:
            where = ", ".join(f"ranks {ranks} are at {one}" for one, ranks in apart.items())
            raise ValueError(
                f"ranks that share micro-batches call different layers: {where}; call the same layers for each "
                'micro-batch, or use domain "context"'
            )
        return list(values)

    def planner(self, *, cuts_documents: bool = False) -> Planner:
        """Makes plans. cuts_documents: as in `Planner`."""
        return Planner(self.config, self.cluster, self.domain.rank, self.shape, cuts_documents)


class Tokens:
    """Base class of the two modes. All ranks of the job make the same calls."""

    @property
    def stay(self) -> bool:
        """Whether a schedule may run as the loop has it, without plans."""
        return False

    @property
    def may_stay(self) -> bool:
        """Whether tokens stay where the loop, without balancing, would have them in steps that leave out balancing.
        They then run by plans as well."""
        return False

    @property
    def padded(self) -> bool:
        """Whether the loop, without balancing, would cut each sequence by itself, as a padded sample."""
        return True

    @property
    def step_seconds(self) -> Callable[[np.ndarray], float] | None:
        """Costs of micro-batches [micro-batch] -> seconds of a step, if documents change their micro-batch. None if
        they stay."""
        return None

    def attach(self, chunks: list[Any], sharing: Sharing) -> None:
        """The balancer has been constructed. chunks: the model chunks of this rank."""

    def layers_moved(self) -> None:
        """Layers of the chunks may be other modules."""

    def begin_schedule(self, data: Any, micro_batches: int) -> None:
        """Before the first forward pass of a training schedule.

        data: its iterator, or a list with one a chunk.
        micro_batches: the number of its micro-batches.
        """

    def end_schedule(self) -> None:
        """After the last backward pass of a training schedule."""

    def abandon_schedule(self) -> None:
        """The schedule has failed on this rank. Do not communicate."""

    def close(self) -> None:
        """The balancer ends. The model is plain from now on."""


def by_value(ranks: Sequence[int], values: Sequence[Any]) -> dict[Any, list[int]]:
    """The ranks with each value, in order of the first. values: [rank]."""
    found: dict[Any, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        found.setdefault(value, []).append(rank)
    return found
