"""Tokens that a plan places on ranks, in a loop that reads its data through the balancer (`--balance-sequences`).

The data loader's worker plans each micro-batch (`dataset`) and reads the tokens of its rank. Documents of a step may
also change their micro-batch (`micro_batch_schedule`). `MovedTokens.next_batch` gives the loop a micro-batch whose
attention, positions and losses follow the plan.
"""

import math
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.utils import unwrap_model

from balancing.pipeline.schedule import Schedule
from balancing.ranges import named
from balancing.sequences import SequencePlan
from balancing.sequences.micro_batches import MICRO_BATCH_ROOM
from balancing.upload import upload
from megatron.balanced.run import Run, Trained
from megatron.balanced.sequences.attention import BatchAttention, DocumentPositions, PlannedSequences, SampleRows
from megatron.balanced.sequences.dataset import INTEGERS, PlannedBatch, PlannedDataset, Rows
from megatron.balanced.sequences.domain import LossTokens
from megatron.balanced.sequences.events import MicroBatch
from megatron.balanced.sequences.mamba import DocumentOrder, document_rows
from megatron.balanced.sequences.micro_batch_schedule import DrawnSteps, Steps, StepSeconds, WholeSteps
from megatron.balanced.sequences.packed_messages import expect, expect_one_size
from megatron.balanced.sequences.prediction import Prediction
from megatron.balanced.sequences.router import tell_routers
from megatron.balanced.sequences.tokens import Sharing, Tokens
from megatron.balanced.shared.process_groups import duplicate_group
from megatron.balanced.shared.tail import tail_layers

__all__ = ["Batches", "MovedBatch", "MovedTokens", "positions", "row_origins"]

_KEPT = 64  # plans, with their programs, in the cache


@dataclass(frozen=True)
class Batches:
    """Facts about a loop and its model that the model's config does not have.

    step_samples: samples of a step, of all ranks.
    numbered: whether the number of a sample tells its step.
    group: micro-batches that an interleaved pipeline groups together; None for the number of stages.
    conversations: whether samples are conversations, which are padded.
    masks_documents: whether the documents of a sample do not attend to each other.
    whole: whether documents that were drawn for one micro-batch must run in the same micro-batch.
    one_size: whether every micro-batch must have the same number of rows on each rank.
    tells_samples: whether a router loss needs the sample of each token.
    passes_states: whether layers pass a state from each token of a document to the next.
    """

    step_samples: int
    numbered: bool
    group: int | None
    conversations: bool
    masks_documents: bool
    whole: bool
    one_size: bool
    tells_samples: bool
    passes_states: bool


class MovedBatch(NamedTuple):
    """A micro-batch of this rank.

    inputs: the inputs of its model chunk, by name.
    packed: parameters of its layers.
    plan: the plan of its documents.
    losses: tells the weight of each row in the loss.
    """

    inputs: dict[str, Any]
    packed: PlannedSequences
    plan: SequencePlan
    losses: LossTokens


class _Columns(NamedTuple):
    """Index arrays of a micro-batch: in NumPy first, then int32 on the device, uploaded in one copy.

    positions: [row], position of the row's token in its document; 0 in padding.
    origins: [row], origin of the row's token; 0 in padding.
    samples: [row], sample of the row's token; empty if no router needs it.
    document_ends: [document + 1], 0 and the ends of this data-parallel rank's documents, packed one after another.
    order, back, documents: as in `document_rows`; empty if no layer passes a state from token to token.
    """

    positions: Any
    origins: Any
    samples: Any
    document_ends: Any
    order: Any
    back: Any
    documents: Any


class MovedTokens(Tokens):
    """The mode of a `SequenceBalancer` in which tokens move. The loop wraps its provider of datasets by `datasets`,
    calls it after the balancer is constructed, and takes each micro-batch from `next_batch`.

    run: the run; `job` and `trained` are read.
    batches: how the loop makes batches.
    count_documents: receives the ends of the documents of each micro-batch, for a trainer that counts FLOPs.
    """

    sharing: Sharing  # from `attach` on

    def __init__(self, run: Run, batches: Batches, count_documents: Callable[[torch.Tensor], None]) -> None:
        assert run.job is not None
        self._run, self._job, self._batches, self._count_documents = run, run.job, batches, count_documents
        # Chunks of an interleaved pipeline and later epochs receive the same bytes again.
        self._unpickled: Callable[[bytes], PlannedBatch] = lru_cache(_KEPT)(pickle.loads)
        self._chunks: list[Any] = []
        self._tensor_hosts: dist.ProcessGroup | None = None  # tensor-parallel ranks on gloo, if there are several
        self._read: ReadStep | None = None  # the training step in progress, if it was read ahead

    def attach(self, chunks: list[Any], sharing: Sharing) -> None:
        self._chunks, self.sharing = chunks, sharing
        if mpu.get_tensor_model_parallel_world_size() > 1:
            minutes = self._job.timeout_minutes
            self._tensor_hosts = duplicate_group(mpu.get_tensor_model_parallel_group(), minutes, on_host=True)
        self.layers_moved()

    def layers_moved(self) -> None:
        for model in unwrap_model(self._chunks):
            tell_routers(model)

    @property
    def may_stay(self) -> bool:
        """Over context-parallel ranks Megatron-LM pads each message of a conversation."""
        batches, cuts = self._batches, self.sharing.domain.ranks > self.sharing.domain.origins
        known = self._run.left_out_ahead is not None and batches.numbered
        return known and not (batches.conversations and cuts)

    @property
    def padded(self) -> bool:
        return not self._batches.masks_documents or self._batches.conversations

    # The data.

    def datasets(self, provider: Callable) -> Callable:
        """Megatron's dataset provider, with its datasets wrapped in planned ones."""

        def build(sizes: list[int | None], vp_stage: int | None = None) -> tuple[Any, ...]:
            train, *others = provider(sizes, vp_stage=vp_stage)
            return self._planned(train, self._steps or self._whole_steps, self._drawn_steps), *map(
                self._planned, others
            )

        build.is_distributed = True  # type: ignore[attr-defined]
        return build

    def _planned(
        self, dataset: Any, steps: Steps | WholeSteps | None = None, drawn_steps: DrawnSteps | None = None
    ) -> Any:
        if dataset is None or isinstance(dataset, list):
            return dataset and [self._planned(part, steps, drawn_steps) for part in dataset]
        padding = dataset.config.tokenizer.pad if self._batches.conversations else None
        planner = self.sharing.planner(cuts_documents=not self._batches.masks_documents)
        rows = replace(self._rows, fixed=False) if isinstance(steps, Steps) else self._rows
        return PlannedDataset(dataset, planner, self.sharing.domain, rows, padding, steps, drawn_steps)

    @cached_property
    def _drawn_steps(self) -> DrawnSteps | None:
        if not self.may_stay:
            return None
        assert self._run.left_out_ahead is not None
        steps, samples = self._trained
        return DrawnSteps(self._batches.step_samples, samples, steps, self._run.left_out_ahead("sequences"))

    @property
    def _trained(self) -> Trained:
        assert self._run.trained is not None
        return self._run.trained()

    @property
    def _rows(self) -> Rows:
        multiple = mpu.get_tensor_model_parallel_world_size() if self.sharing.model.sequence_parallel else 1
        fixed = not self._batches.conversations or self._batches.one_size
        return Rows(self.sharing.domain.ranks, multiple, fixed, self._shifts)

    @property
    def _shifts(self) -> int:
        """Tokens that are predicted beyond the next one."""
        return tail_layers(self.sharing.model)

    @cached_property
    def _steps(self) -> Steps | None:
        """How documents are distributed over the micro-batches of training steps; None if they stay where drawn."""
        if self.step_seconds is None or self._batches.whole:
            return None
        job, domain = self._job, self.sharing.domain
        drawn = job.seq_length * job.micro_batch_size * domain.origins
        capacity = self.sharing.config.token_capacity or math.ceil(MICRO_BATCH_ROOM * drawn / domain.ranks)
        return Steps(*self._of_one_size(self.step_seconds), capacity)

    @cached_property
    def _whole_steps(self) -> WholeSteps | None:
        """How whole micro-batches of Megatron-LM are distributed over those of training steps; None if they stay."""
        if self.step_seconds is None or self._steps is not None:
            return None
        return WholeSteps(*self._of_one_size(self.step_seconds))

    def _of_one_size(self, seconds: StepSeconds) -> tuple[Any, ...]:
        first, sharing = self._trained.samples, self.sharing
        return get_num_microbatches(), self._batches.step_samples, first, sharing.cluster, sharing.shape, seconds

    @property
    def step_seconds(self) -> StepSeconds | None:
        if not self.sharing.config.micro_batches:
            return None
        stages, model = mpu.get_pipeline_model_parallel_world_size(), self.sharing.model
        chunks = model.virtual_pipeline_model_parallel_size or 1
        return StepSeconds(stages, chunks, Schedule(group=self._batches.group))

    # A schedule.

    def begin_schedule(self, data: Any, micro_batches: int) -> None:
        if self._steps is None:
            return
        iterators: list[Any] = []
        if mpu.get_tensor_model_parallel_rank() == 0:
            iterators = data if isinstance(data, list) else [data]
        self._read = ReadStep.read(
            iterators, self._steps.micro_batches, self._shifts, self.sharing, self._tensor_hosts, self._unpickled
        )
        expect([rows // self._rows.multiple for rows in self._read.rows], self.sharing.model)

    def end_schedule(self) -> None:
        if self._read is not None:
            self._read = None
            expect_one_size(self.sharing.model)

    # A micro-batch.

    @named("plan of sequences")
    def next_batch(self, data_iterator: Iterator | None, chunk: int) -> MovedBatch:
        """The next micro-batch of this rank.

        data_iterator: iterator over the data loader; None on tensor-parallel ranks without one.
        chunk: number of the model chunk.
        """
        sharing, batches, domain = self.sharing, self._batches, self.sharing.domain
        tensors, read, planning_ms, waited_ms = self._receive(data_iterator, chunk)
        plan = read.plan
        tokens = int(plan.linear_tokens[domain.rank])
        attention = BatchAttention.of(read.programs, sharing.layers, tokens, **sharing.options)
        first, *others = attention.kinds
        drawn = plan, read.origins, read.numbers
        sharing.record.add(MicroBatch(chunk, *drawn, attention.kinds, planning_ms, waited_ms))
        shifted = {name: values.chunk(1 + self._shifts, dim=1) for name, values in tensors.items()}
        inputs: dict[str, Any] = {name: values[0] for name, values in shifted.items()}
        device = inputs["tokens"].device
        columns = self._columns(plan, read.origins, inputs["tokens"].shape[1])
        columns = _Columns(*first.upload(device, columns))
        for other in others:
            other.upload(device)
        self._count_documents(columns.document_ends)
        counted = None if self._read is None else self._read.counts
        losses = LossTokens(columns.origins, domain.origins, sharing.process_group, counted)
        packed = PlannedSequences(
            qkv_format="sbhd",  # rows in sequence; document boundaries are in the plan
            max_seqlen_q=max(plan.lengths),
            max_seqlen_kv=max(plan.lengths),
            attention=attention,
            positions=DocumentPositions(columns.positions, self._job.seq_length),
        )
        if self._shifts:
            names = ("tokens", "labels", "position_ids", "loss_mask")
            packed.prediction = Prediction(*(shifted[name] for name in names), losses=losses)
        if batches.tells_samples:
            samples, apart = sum(plan.lengths) // self._job.seq_length, domain.groups > 1
            process_group = sharing.process_group if apart else None
            packed.samples = SampleRows(columns.samples, samples, domain.origins, process_group)
        if batches.passes_states:
            packed.order = DocumentOrder(sharing.layers, columns.order, columns.back)
            packed.seq_idx = columns.documents[None]
        return MovedBatch(inputs | {"attention_mask": None}, packed, plan, losses)

    def _receive(
        self, data_iterator: Iterator | None, chunk: int
    ) -> tuple[dict[str, torch.Tensor], PlannedBatch, float, float]:
        """Rows of the next micro-batch, its plan, and milliseconds of planning and of waiting for the plan.

        data_iterator, chunk: as in `next_batch`.
        """
        sample, waited = None, 0.0
        if mpu.get_tensor_model_parallel_rank() == 0:
            assert data_iterator is not None, "a stage has no data iterator"
            begin = time.perf_counter()
            sample = next(data_iterator) if self._read is None else self._read.samples[chunk].pop(0)
            waited = (time.perf_counter() - begin) * 1e3
        tensor_parallel, source = mpu.get_tensor_model_parallel_group(), mpu.get_tensor_model_parallel_src_rank()
        device = torch.cuda.current_device()
        tensors, pickled, milliseconds = receive(sample, tensor_parallel, self._tensor_hosts, source, device)
        begin = time.perf_counter()
        read = self._unpickled(pickled)
        waited = min(waited, milliseconds) + (time.perf_counter() - begin) * 1e3
        return tensors, read, milliseconds, waited

    def _columns(self, plan: SequencePlan, origins: tuple[int, ...], rows: int) -> _Columns:
        """The index arrays. origins: [document]. rows: of the micro-batch on this rank."""
        domain = self.sharing.domain
        if self._read is None:  # number the origins within this micro-batch
            origins = tuple(np.unique(origins, return_inverse=True)[1].tolist())
        # Each data-parallel rank counts its own documents, since Megatron-LM adds up their lengths over these ranks.
        drawn = zip(plan.lengths, origins, strict=True)
        lengths = [length for length, origin in drawn if origin % domain.origins == domain.origin]
        samples = np.zeros(0, np.int64)
        if self._batches.tells_samples:
            samples = row_origins(plan, domain.rank, rows, self._samples(plan))
        states = 3 * (np.zeros(0, np.int64),)
        if self._batches.passes_states:
            states = document_rows(plan, domain.ranks, rows)
        return _Columns(
            positions(plan, domain.rank, rows),
            row_origins(plan, domain.rank, rows, origins),
            samples,
            np.cumsum((0, *lengths)),
            *states,
        )

    def _samples(self, plan: SequencePlan) -> list[int]:
        """[document], its sample, numbered within the micro-batch. Where router losses are accepted, samples are full
        and in order."""
        assert int(plan.linear_tokens.min()) == int(plan.linear_tokens.max()), "ranks have different numbers of tokens"
        return [
            (stop - length) // self._job.seq_length
            for stop, length in zip(accumulate(plan.lengths), plan.lengths, strict=True)
        ]


@dataclass
class ReadStep:
    """A training step whose documents are distributed over its micro-batches, read before it begins.

    Pipeline stages must know the sizes of all micro-batches, for their messages. If Megatron-LM averages a loss over
    micro-batches, every rank must know the number of tokens with a loss of each origin, which are in several of them.

    samples: [chunk] of those that are not taken yet, on the first tensor-parallel rank; elsewhere empty.

    counts: float64 [shift, origin], tokens with a loss on all ranks, by the shift of rows in their documents.
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
        micro_batches: number of micro-batches of the step.
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


def positions(plan: SequencePlan, rank: int, rows: int) -> np.ndarray:
    """int64 [row], each row's position in its document; 0 in padding."""
    ranges = [np.arange(shard.start, shard.stop) for shard in plan.shards(rank, linear=True)]
    return np.pad(np.concatenate([np.zeros(0, np.int64), *ranges]), (0, rows - int(plan.linear_tokens[rank])))


def row_origins(plan: SequencePlan, rank: int, rows: int, origins: Sequence[int]) -> np.ndarray:
    """int64 [row], the origin of each row's token; 0 in padding. origins: [document]."""
    shards = plan.shards(rank, linear=True)
    runs = np.array([(origins[shard.sequence], shard.tokens) for shard in shards], dtype=np.int64).reshape(-1, 2)
    token_origins = np.repeat(*runs.T)
    return np.pad(token_origins, (0, rows - len(token_origins)))


def receive(
    sample: dict[str, Any] | None,
    process_group: dist.ProcessGroup,
    hosts: dist.ProcessGroup | None,
    source: int,
    device: Any,
) -> tuple[dict[str, torch.Tensor], bytes, float]:
    """Broadcast a micro-batch to all tensor-parallel ranks. Returns its rows [1, rows] by name, the pickled
    `PlannedBatch`, and the milliseconds of planning.

    sample: from the data loader on the source; None on other ranks.
    process_group: of tensor parallelism.
    hosts: the same ranks on gloo, so that no host waits for its device to learn the plan; None for a single rank.
    source: global rank of the group's source.
    device: of tensors that are broadcast.
    """
    plan, milliseconds = b"", 0.0
    batch: dict[str, torch.Tensor] = {}
    if sample is not None:
        (plan,), milliseconds = sample["plan"], float(sample["plan_ms"])
        batch = {name: sample[name].cuda(non_blocking=True) for name in (*INTEGERS, "loss_mask")}
    if hosts is None:
        return batch, plan, milliseconds
    told: list[Any] = [batch["tokens"].shape[1], plan] if sample is not None else [None, None]
    dist.broadcast_object_list(told, source, group=hosts)
    rows, plan = told
    if sample is not None:
        integers, mask = torch.cat([batch[name] for name in INTEGERS]), batch["loss_mask"]
    else:
        integers = torch.empty(len(INTEGERS), rows, dtype=torch.int64, device=device)
        mask = torch.empty(1, rows, dtype=torch.float32, device=device)
    for tensor in (integers, mask):
        dist.broadcast(tensor, source, group=process_group)
    return dict(zip(INTEGERS, integers.split(1), strict=True)) | {"loss_mask": mask}, plan, milliseconds
