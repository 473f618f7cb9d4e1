"""Balances attention over packed sequences in a finished model, in any loop.

Ranks that share micro-batches (`domain`) know the same lengths and make the same plans. The loop decides where tokens
are (`tokens`): they stay where it has put them, and core attention sends queries, keys and values; or a plan places
them, as while `pretrain_gpt.py` trains. After each schedule the ranks check that their plans are equal.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.utils import get_model_config, unwrap_model

from balancing.cluster import Cluster
from balancing.kernels.base import accumulation_dtype
from balancing.kernels.timed import TimedKernel
from balancing.messages import runs_nccl
from balancing.report import WARM_UP
from balancing.sequences.config import SequenceConfig
from megatron.balanced.sequences.events import MicroBatch, Share, calls_event, step_event
from megatron.balanced.sequences.graphs import check_graphs
from megatron.balanced.sequences.in_place import AttentionInPlace
from megatron.balanced.sequences.shape import attention_shape
from megatron.balanced.sequences.tokens import Sharing, Tokens
from megatron.balanced.shared.callbacks import HeldBytes, StepCallback
from megatron.balanced.shared.job import Job
from megatron.balanced.shared.model_checks import check_model, mark_model

__all__ = ["SequenceBalancer"]


class SequenceBalancer(StepCallback):
    """Balances attention over packed sequences in a finished model. Construct it on all ranks together, before the
    first step.

    Tokens stay on the ranks where the loop put them: whole sequences on data-parallel ranks, or each sequence in
    Transformer Engine's zig-zag over context-parallel ranks. Lengths come from `PackedSeqParams`. Only training
    schedules of `Balancers` are balanced. Micro-batches that are not packed run unchanged.

    chunks: the model chunks of this rank, each in `DistributedDataParallel`.
    config: settings `domain`, `planner`, `routing`, `kernel` and `attention_cuda_graphs`. All data-parallel ranks share
        the work unless `domain` is "context".
    job, cluster, report: as for `ExpertBalancer`; one rank of each domain reports. Of job, the timeout is read, and the
        sizes for an estimate of memory.
    had_kernel: the name of the kernel of attention that a resumed run had.
    tokens: the mode in which tokens move, for a loop that reads its data through it
        (`megatron.balanced.sequences.moved_tokens`). None: they stay.

    `kernel` is the chosen kernel of attention. Raises ValueError for a model whose attention cannot be balanced, and if
    the kernel that `config` names does not run here, or its CUDA graphs do not.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        config: SequenceConfig | None = None,
        *,
        job: Job | None = None,
        cluster: Cluster | None = None,
        report: Callable[[Callable[[], dict[str, Any] | None]], None] | None = None,
        tokens: Tokens | None = None,
        had_kernel: str | None = None,
    ) -> None:
        facts = job or Job()
        check_model("SequenceBalancer", chunks, config=config, recaptures=facts.recaptures, wrapped=tokens is None)
        for name in ("micro_batches", "chunk", "token_capacity") if tokens is None and config is not None else ():
            if value := getattr(config, name):
                raise ValueError(f"{name} {value} of sequences does nothing where the loop places tokens; drop it")
        self.chunks, self.config = list(chunks), config or SequenceConfig(enabled=True)
        self._report, self._iteration, self._ended = report, 0, 0
        self._spent: list[int] = []  # of the last schedule, as `StepRecord` has it
        self._batches: list[MicroBatch] = []
        self._sample_rows = facts.micro_batch_size * facts.seq_length
        self._tokens: Tokens = AttentionInPlace() if tokens is None else tokens
        model = get_model_config(chunks[0])
        shape = attention_shape(model, getattr(unwrap_model(self.chunks)[0], "hybrid_layer_pattern", None))
        options = {"timed": report is not None, "had_kernel": had_kernel}
        self._sharing = Sharing.connect(self.config, model, shape, cluster, facts.timeout_minutes, **options)
        if len({*self._sharing.compare("the start", report is not None)}) > 1:
            raise ValueError("some ranks have a `report` and others none; give it on all: one rank of a domain reports")
        nccl = runs_nccl(self._sharing.layers)
        check_graphs(self.config, model, nccl=nccl, timed=report is not None)
        self.kernel = self._sharing.kernel
        self._record = self._sharing.record
        self._tokens.attach(self.chunks, self._sharing)
        mark_model("SequenceBalancer", chunks)

    @property
    def name(self) -> str | None:  # type: ignore[override]
        """A loader that moves tokens in advance must know in advance."""
        return "sequences" if self._tokens.stay or self._tokens.may_stay else None

    @property
    def follows_data(self) -> bool:  # type: ignore[override]
        return self._tokens.may_stay

    def layers_moved(self) -> None:
        self._tokens.layers_moved()

    def begin_step(self, iteration: int, config: Any) -> None:
        self._iteration = iteration

    def begin_schedule(self) -> None:
        self._record.begin()
        self._spent, self._batches = [], []
        self._tokens.begin_schedule(self.run.data, self.run.micro_batches)

    def end_schedule(self) -> None:
        """Check that all ranks of the domain followed the same plans, without waiting for the device."""
        self._tokens.end_schedule()
        self._sharing.graphs.clear()
        if len({*self._sharing.compare("the end of a schedule", self._record.digest)}) > 1:
            raise RuntimeError(
                f"ranks {self._sharing.ranks} made different plans; they must read the "
                "same documents, with the same versions of Python, NumPy and this package"
            )
        self._spent, self._batches = self._record.spent, self._record.end()

    def abandon_schedule(self) -> None:
        self._tokens.abandon_schedule()
        self._sharing.graphs.clear()
        self._record.end()

    def end_step(self) -> None:
        """Report what the ranks of the domain sent and waited for."""
        batches, self._batches = self._batches, []
        if not batches or self._report is None:
            return
        spent_by_rank = self._gather(self._spent)
        timed = self.kernel.kernel
        calls = timed.take() if isinstance(timed, TimedKernel) else []
        self._ended += 1
        domain, cluster, shape = self._sharing.domain, self._sharing.cluster, self._sharing.shape
        if not mpu.get_tensor_model_parallel_rank() and not domain.rank:
            stage, replica = mpu.get_pipeline_model_parallel_rank(), mpu.get_data_parallel_rank()
            place = stage, replica, self._tokens.padded, self._tokens.step_seconds
            share = Share(domain, cluster, shape, self.kernel.name, dict(self.kernel.rates), *place)
            self._report(partial(step_event, self._iteration, batches, spent_by_rank, share))
            for way in dict.fromkeys(call.way for call in calls) if self._ended > WARM_UP else ():
                self._report(partial(calls_event, self._iteration, timed, calls, way, self.kernel.name, cluster))

    def _gather(self, numbers: list[int]) -> np.ndarray:
        """int64 [rank, number], the numbers of all ranks of the domain."""
        gathered = torch.empty(self._sharing.domain.ranks, len(numbers), dtype=torch.int64)
        dist.all_gather(list(gathered), torch.tensor(numbers), group=self._sharing.hosts)
        return gathered.numpy()

    def held(self) -> HeldBytes:
        """Memory for the keys and values of one layer and micro-batch, and for their gradients in the accumulation
        type. Before the first micro-batch it is an upper bound, if the sizes of samples are known."""
        shape, dtype = self._sharing.shape, self._sharing.model.params_dtype
        rows, ways = self._record.most_rows or self._sample_rows, mpu.get_tensor_model_parallel_world_size()
        numbers = rows * max(shape.kv_heads // ways, 1)
        numbers *= shape.head_size + (shape.value_size or shape.head_size)
        return HeldBytes(buffers=float(numbers * (dtype.itemsize + accumulation_dtype(dtype).itemsize)))

    def close(self) -> None:
        """Leave the model plain."""
        self._tokens.close()
        self._sharing.graphs.close()
