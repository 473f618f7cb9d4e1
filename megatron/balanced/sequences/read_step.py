"""A training step whose documents are distributed over its micro-batches, read before it begins.

Pipeline stages must know the sizes of all micro-batches, for their messages. If Megatron-LM averages a loss over
micro-batches, every rank must know the number of tokens with a loss of each origin, which are in several micro-batches.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu

from balancing.upload import upload
from megatron.balanced.sequences.dataset import PlannedBatch, row_origins
from megatron.balanced.sequences.tokens import Sharing

__all__ = ["ReadStep"]


@dataclass
class ReadStep:
    """samples: [chunk] of those that are not taken yet, on the first tensor-parallel rank; elsewhere empty.

    counts: float64 [shift, origin], tokens with a loss on all ranks, by shift of multi-token prediction.
    rows: of each micro-batch on this rank.
    """

    samples: list[list[dict[str, Any]]]
    counts: torch.Tensor
    rows: list[int]

    @classmethod
    def read(
        cls,
        iterators: list[Iterator],
        micro_batches: int,
        shifts: int,
        sharing: Sharing,
        tensor_hosts: dist.ProcessGroup | None,
        unpickled: Callable[[bytes], PlannedBatch],
    ) -> "ReadStep":
        """All ranks that share micro-batches call it together.

        iterators: of the data loader, one for each model chunk; empty on other tensor-parallel ranks than the first.
        micro_batches: of the step.
        shifts: tokens that are predicted beyond the next one.
        tensor_hosts: the tensor-parallel ranks on gloo; None for a single rank.
        unpickled: of the plan of a sample.
        """
        domain, samples = sharing.domain, []
        counts = torch.zeros(1 + shifts, micro_batches * domain.origins, dtype=torch.float64)
        rows = torch.zeros(micro_batches, dtype=torch.int64)
        if mpu.get_tensor_model_parallel_rank() == 0:
            samples = [[next(iterator) for _ in range(micro_batches)] for iterator in iterators]
            for at, sample in enumerate(samples[0]):
                read = unpickled(*sample["plan"])
                masks = sample["loss_mask"].view(1 + shifts, -1)
                rows[at] = masks.shape[1]
                origins = row_origins(read.plan, domain.rank, masks.shape[1], read.origins)
                counts.index_add_(1, torch.from_numpy(origins), masks.double())
            if shifts or not sharing.model.calculate_per_token_loss:
                dist.all_reduce(counts, group=sharing.hosts)
        if tensor_hosts is not None:
            for numbers in (counts, rows):
                dist.broadcast(numbers, mpu.get_tensor_model_parallel_src_rank(), group=tensor_hosts)
        return cls(samples, upload(counts, torch.device("cuda", torch.cuda.current_device())), rows.tolist())
