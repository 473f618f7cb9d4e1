"""Spreads documents over ranks while Megatron-LM trains (`--balance-sequences`).

The data loader's worker plans each micro-batch (`megatron.balanced.sequences.dataset`). The attention of every layer
follows the plan (`megatron.balanced.sequences.attention`). The ranks that share micro-batches
(`megatron.balanced.sequences.domain`) know the same documents, so they make the same plan without communication. Once
an iteration, before the optimizer's step, they check that their plans are equal.
"""

import hashlib
import math
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model

from balancing.cluster import Cluster
from balancing.messages import connect
from balancing.pipeline.schedule import Schedule
from balancing.ranges import named
from balancing.sequences import (
    SequencePlan,
    deal_whole,
    plan_micro_batches,
    plan_sequences,
)
from balancing.sequences.ahead import PlanningAhead
from balancing.sequences.config import SequenceConfig
from balancing.sequences.engine.kernels import accumulation_dtype
from balancing.sequences.micro_batches import MICRO_BATCH_ROOM, document_seconds
from balancing.upload import upload
from megatron.balanced.sequences.attention import DocumentRotaryEmbedding, PlannedSequences
from megatron.balanced.sequences.batches import Batches
from megatron.balanced.sequences.dataset import PlannedBatch, PlannedDataset, Rows, positions, receive, row_origins
from megatron.balanced.sequences.domain import Domain, count_tokens, token_weights, weights_of_counts
from megatron.balanced.sequences.events import MicroBatch, Sharing, spent, step_event
from megatron.balanced.sequences.packed_messages import expect, expect_one_size
from megatron.balanced.sequences.prediction import Prediction
from megatron.balanced.sequences.programs import attentions_of, compile_layers, routing_of, token_bytes
from megatron.balanced.sequences.states import DocumentOrder, document_rows
from megatron.balanced.sequences.steps import Steps, WholeSteps, deal_documents, step_seconds
from megatron.balanced.shared.callbacks import HeldBytes, StepCallback, trained
from megatron.balanced.shared.process_groups import cluster_of, duplicate_group, split_group

__all__ = ["SequenceBalancer"]

_KEPT = 64  # plans, with their programs, in the cache


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


class SequenceBalancer(StepCallback):
    """One on each rank. Ranks that share micro-batches make the same plans.

    batches: how the loop makes batches.
    model: its config.
    config: settings of this balancer.
    machine: the cluster whose speeds plans use; None for defaults.
    report: receives the events of a step; None without a report.
    count_documents: receives the ends of the documents of each micro-batch, for a trainer that counts FLOPs.
    """

    def __init__(
        self,
        batches: Batches,
        model: TransformerConfig,
        config: SequenceConfig,
        machine: Cluster | None,
        report: Callable[[dict[str, Any]], None] | None,
        count_documents: Callable[[torch.Tensor], None],
    ) -> None:
        self.config, self._machine, self._report = config, machine, report
        self._batches, self._job, self._model, self._shape = batches, batches.job, model, batches.shape
        self._count_documents = count_documents
        # Chunks of an interleaved pipeline and later epochs receive the same bytes again.
        self._unpickled: Callable[[bytes], PlannedBatch] = lru_cache(_KEPT)(pickle.loads)
        self._iteration = 0
        self._config: Any = None  # of the model, which the schedule reads
        self._step: list[MicroBatch] | None = None  # of the training step in progress; None outside of one
        # If documents are distributed over the micro-batches of a step: samples that were read ahead, and on the device
        # the number of tokens with a loss by origin.
        self._ahead: list[list[dict[str, Any]]] = []
        self._counts: torch.Tensor | None = None
        # With the domain "data", a process group for attention, since Megatron-LM reduces gradients in its own group
        # meanwhile.
        self._data: Any = None
        # gloo groups: of the ranks that share micro-batches, and of the tensor-parallel ranks if there are several.
        self._hosts: Any = None
        self._tensor_hosts: Any = None
        self._most_rows = 0  # most rows of keys and values, own and received, in a micro-batch so far

    # Building the model and the data.

    def before_wrapping(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Replace rotary embeddings by ones with positions in documents. Returns `chunks`, as Megatron's model hooks
        must. Data parallelism keeps a table of the modules that it wraps, so they are replaced before.
        """
        minutes = self._job.timeout_minutes
        if self.config.domain == "data":
            self._data = duplicate_group(self._sharing, minutes)
        else:
            connect(self._sharing)
        self._hosts = duplicate_group(self._sharing, minutes, on_host=True)
        if mpu.get_tensor_model_parallel_world_size() > 1:
            self._tensor_hosts = duplicate_group(mpu.get_tensor_model_parallel_group(), minutes, on_host=True)
        for model in unwrap_model(chunks):
            if getattr(model, "rotary_pos_emb", None) is not None:
                model.rotary_pos_emb = DocumentRotaryEmbedding(model.rotary_pos_emb)
        return chunks

    def datasets(self, provider: Callable) -> Callable:
        """Megatron's dataset provider, with its datasets wrapped in planned ones."""

        def planned(dataset: Any, steps: Steps | WholeSteps | None = None) -> Any:
            if dataset is None or isinstance(dataset, list):
                return dataset and [planned(part, steps) for part in dataset]
            padding = dataset.config.tokenizer.pad if self._batches.conversations else None
            compile = partial(
                compile_layers,
                shape=self._shape,
                rank=self.domain.rank,
                cluster=self._cluster,
                routing=routing_of(self.config, self._cluster),
                token_bytes=token_bytes(self._shape, self._model),
            )
            rows = replace(self._rows, fixed=False) if isinstance(steps, Steps) else self._rows
            ahead = PlanningAhead(self._plan, compile)
            return PlannedDataset(dataset, ahead, self.domain, rows, padding, steps)

        def build(sizes: list[int | None], vp_stage: int | None = None) -> tuple[Any, ...]:
            train, *others = provider(sizes, vp_stage=vp_stage)
            return planned(train, self._steps or self._whole_steps), *map(planned, others)

        build.is_distributed = True  # type: ignore[attr-defined]
        return build

    @cached_property
    def domain(self) -> Domain:
        """The ranks that share micro-batches with this one."""
        return Domain.of_data() if self.config.domain == "data" else Domain.of_context()

    @cached_property
    def _sharing(self) -> dist.ProcessGroup:
        """The ranks that share micro-batches: a group of Megatron-LM, or a part of it."""
        if self.config.domain != "data":
            return mpu.get_context_parallel_group()
        whole = mpu.get_data_parallel_group(with_context_parallel=True)
        if self.domain.groups == 1:
            return whole
        return split_group(whole, self.domain.groups, self._job.timeout_minutes)

    @property
    def _of_layers(self) -> dist.ProcessGroup:
        """The process group of these ranks for messages of layers."""
        return self._sharing if self._data is None else self._data

    @cached_property
    def _cluster(self) -> Cluster:
        return cluster_of(dist.get_process_group_ranks(self._sharing), self._machine)

    @cached_property
    def _plan(self) -> Callable[[tuple[int, ...]], SequencePlan]:
        return partial(
            plan_sequences,
            cluster=self._cluster,
            shape=self._shape,
            method=self.config.planner,
            token_capacity=self.config.token_capacity or None,
            chunk=self.config.chunk or None,
        )

    @cached_property
    def _steps(self) -> Steps | None:
        """How documents are distributed over the micro-batches of training steps; None if they stay where drawn."""
        if not self.config.micro_batches or self._batches.whole:
            return None
        ranks, drawn = self.domain.ranks, self._job.seq_length * self._job.micro_batch_size * self.domain.origins
        plan = partial(
            plan_micro_batches,
            micro_batches=get_num_microbatches(),
            cluster=self._cluster,
            shape=self._shape,
            token_capacity=self.config.token_capacity or math.ceil(MICRO_BATCH_ROOM * drawn / ranks),
            step=self._step_seconds,
        )
        deal = partial(deal_documents, ranks=self._cluster.world_size, plan=plan)
        return Steps(get_num_microbatches(), self._batches.step_samples, self._batches.trained_samples(), deal)

    @cached_property
    def _whole_steps(self) -> WholeSteps | None:
        """How whole micro-batches of Megatron-LM are distributed over those of training steps; None if they stay."""
        if not self.config.micro_batches or self._steps is not None:
            return None
        samples, trained_samples = self._batches.step_samples, self._batches.trained_samples()
        cost = partial(document_seconds, cluster=self._cluster, shape=self._shape)
        deal = partial(deal_whole, micro_batches=get_num_microbatches(), step=self._step_seconds)
        return WholeSteps(get_num_microbatches(), samples, trained_samples, cost, deal)

    @property
    def _step_seconds(self) -> Callable[[np.ndarray], float]:
        return partial(
            step_seconds,
            stages=mpu.get_pipeline_model_parallel_world_size(),
            chunks=self._model.virtual_pipeline_model_parallel_size or 1,
            schedule=Schedule(group=self._batches.group),
        )

    @property
    def _shifts(self) -> int:
        """Tokens that are predicted beyond the next one."""
        return self._model.mtp_num_layers or 0

    @property
    def _rows(self) -> Rows:
        multiple = mpu.get_tensor_model_parallel_world_size() if self._model.sequence_parallel else 1
        fixed = not self._batches.conversations or self._batches.one_size
        return Rows(self.domain.ranks, multiple, fixed, self._shifts)

    def held(self) -> HeldBytes:
        """Memory for the keys and values of one layer and micro-batch, and for their gradients in the accumulation
        type. Before the first micro-batch it is an upper bound."""
        rows = self._most_rows or self._job.micro_batch_size * self._job.seq_length
        shape, dtype = self._shape, self._model.params_dtype
        numbers = rows * max(shape.kv_heads // mpu.get_tensor_model_parallel_world_size(), 1)
        numbers *= shape.head_size + (shape.value_size or shape.head_size)
        return HeldBytes(buffers=float(numbers * (dtype.itemsize + accumulation_dtype(dtype).itemsize)))

    # Around a step.

    def begin_step(self, iteration: int, config: Any) -> None:
        self._iteration, self._config = iteration, config

    def begin_schedule(self) -> None:
        self._step = []
        if self._steps is not None:
            self._read_step()
            self._config.variable_seq_lengths = True  # for messages between stages, in training only

    def end_schedule(self) -> None:
        """Check that all ranks of the domain followed the same plans, without waiting for the device."""
        assert self._step is not None
        if self._steps is not None:
            self._config.variable_seq_lengths = False
            expect_one_size()
        digests = "".join(batch.plan.digest for batch in self._step).encode()
        digest = int.from_bytes(hashlib.sha256(digests).digest()[:7], "little")
        if len(set(self._gather([digest])[:, 0].tolist())) > 1:
            raise RuntimeError(
                f"ranks {dist.get_process_group_ranks(self._sharing)} made different plans; they must read the same "
                "documents, with the same versions of Python, NumPy and this package"
            )

    def _gather(self, numbers: list[int]) -> np.ndarray:
        """int64 [rank, number], the numbers of all ranks of the domain."""
        gathered = torch.empty(self._cluster.world_size, len(numbers), dtype=torch.int64)
        dist.all_gather(list(gathered), torch.tensor(numbers), group=self._hosts)
        return gathered.numpy()

    def end_step(self) -> None:
        """Report what the ranks of the domain sent and waited for."""
        batches, self._step = self._step, None
        if not batches or self._report is None:
            return
        numbers = self._gather(spent(batches))
        if not mpu.get_tensor_model_parallel_rank() and not self.domain.rank:
            stage, replica = mpu.get_pipeline_model_parallel_rank(), mpu.get_data_parallel_rank()
            self._report(
                step_event(
                    self._iteration,
                    batches,
                    numbers,
                    not self._batches.masks_documents or self._batches.conversations,
                    Sharing(self.domain, self._cluster, self._shape, stage, replica),
                    self._step_seconds if self.config.micro_batches else None,
                )
            )

    # A micro-batch.

    @named("plan of sequences")
    def next_batch(
        self, data_iterator: Iterator | None, chunk: int
    ) -> tuple[dict[str, Any], PlannedSequences, SequencePlan]:
        """The next micro-batch of this rank: inputs of its model chunk, packed-sequence parameters, and the plan.

        data_iterator: of the data loader; None on tensor-parallel ranks without one. chunk: number of the model chunk.
        """
        dealt = self._steps is not None and self._step is not None
        tensors, read, planning_ms, waited_ms = self._receive(data_iterator, chunk, dealt)
        plan = read.plan
        # Without a report nobody reads the times.
        whole, windowed = attentions_of(read.programs, self._of_layers, timed=self._report is not None)
        attentions = [one for one in (whole, None if windowed is whole else windowed) if one is not None]
        self._most_rows = max(self._most_rows, *(one.program.program.rows for one in attentions))
        if self._step is not None:
            known = plan, read.origins, read.numbers, attentions, planning_ms, waited_ms
            self._step.append(MicroBatch(chunk, *known))
        shifted = {name: values.chunk(1 + self._shifts, dim=1) for name, values in tensors.items()}
        batch = {name: values[0] for name, values in shifted.items()}
        device = batch["tokens"].device
        columns = self._columns(plan, read.origins, batch["tokens"].shape[1], dealt)
        columns = _Columns(*attentions[0].upload(device, columns))
        for attention in attentions[1:]:
            attention.upload(device)
        self._count_documents(columns.document_ends)
        weigh: Callable[[torch.Tensor], torch.Tensor]
        count: Callable[[torch.Tensor], torch.Tensor]
        if dealt:
            counts = self._counts
            assert counts is not None
            weigh, count = partial(weights_of_counts, origin=columns.origins, tokens=counts[0]), lambda masks: counts
        else:
            sharing = {"origin": columns.origins, "origins": self.domain.origins, "process_group": self._sharing}
            weigh, count = partial(token_weights, **sharing), partial(count_tokens, **sharing)
        prediction = None
        if self._shifts:
            names = ("tokens", "labels", "position_ids", "loss_mask")
            prediction = Prediction(*(shifted[name] for name in names), origin=columns.origins, count=count)
        planned = PlannedSequences(
            qkv_format="sbhd",  # rows in sequence; document boundaries are in the plan
            max_seqlen_q=max(plan.lengths),
            max_seqlen_kv=max(plan.lengths),
            attention=whole,
            windowed=windowed,
            longest=self._job.seq_length,
            positions=columns.positions,
            tokens=int(plan.linear_tokens[self.domain.rank]),
            weigh=weigh,
            prediction=prediction,
            sample=columns.samples if self._batches.tells_samples else None,
            samples=sum(plan.lengths) // self._job.seq_length,
            origins=self.domain.origins,
            order=DocumentOrder(self._of_layers, columns.order, columns.back) if self._batches.passes_states else None,
            seq_idx=columns.documents[None] if self._batches.passes_states else None,
            sharing=self._sharing if self.domain.groups > 1 else None,
        )
        return batch | {"attention_mask": None}, planned, plan

    def _receive(
        self, data_iterator: Iterator | None, chunk: int, dealt: bool
    ) -> tuple[dict[str, torch.Tensor], PlannedBatch, float, float]:
        """Rows of the next micro-batch, its plan, and milliseconds of planning and of waiting for the plan.

        data_iterator, chunk: as in `next_batch`. dealt: whether `_read_step` has read it.
        """
        sample, waited = None, 0.0
        if mpu.get_tensor_model_parallel_rank() == 0:
            assert data_iterator is not None, "a stage has no data iterator"
            begin = time.perf_counter()
            sample = self._ahead[chunk].pop(0) if dealt else next(data_iterator)
            waited = (time.perf_counter() - begin) * 1e3
        tensor_parallel, source = mpu.get_tensor_model_parallel_group(), mpu.get_tensor_model_parallel_src_rank()
        device = torch.cuda.current_device()
        tensors, pickled, milliseconds = receive(sample, tensor_parallel, self._tensor_hosts, source, device)
        begin = time.perf_counter()
        read = self._unpickled(pickled)
        waited = min(waited, milliseconds) + (time.perf_counter() - begin) * 1e3
        return tensors, read, milliseconds, waited

    def _columns(self, plan: SequencePlan, origins: tuple[int, ...], rows: int, dealt: bool) -> "_Columns":
        """The index arrays. origins: [document]. rows: of the micro-batch on this rank. dealt: as in `_receive`."""
        rank = self.domain.rank
        if not dealt:  # number the origins within this micro-batch
            origins = tuple(np.unique(origins, return_inverse=True)[1].tolist())
        # Each data-parallel rank counts its own documents, since Megatron-LM adds up their lengths over these ranks.
        of_ranks = (origin % self.domain.origins for origin in origins)
        lengths = [length for length, of in zip(plan.lengths, of_ranks, strict=True) if of == self.domain.origin]
        samples = np.zeros(0, np.int64)
        if self._batches.tells_samples:
            samples = row_origins(plan, rank, rows, self._samples(plan))
        states = 3 * (np.zeros(0, np.int64),)
        if self._batches.passes_states:
            states = document_rows(plan, self.domain.ranks, rows)
        return _Columns(
            positions(plan, rank, rows),
            row_origins(plan, rank, rows, origins),
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

    def _read_step(self) -> None:
        """Read all micro-batches of a step whose documents are distributed over them. Pipeline stages must know their
        sizes. If Megatron-LM averages a loss over micro-batches, they must also know the number of tokens with a loss
        of each origin, by shift."""
        assert self._steps is not None
        number = self._steps.micro_batches
        counts = torch.zeros(1 + self._shifts, number * self.domain.origins, dtype=torch.float64)
        rows = torch.zeros(number, dtype=torch.int64)
        if mpu.get_tensor_model_parallel_rank() == 0:
            iterators = trained().data
            iterators = iterators if isinstance(iterators, list) else [iterators]
            self._ahead = [[next(iterator) for _ in range(number)] for iterator in iterators]
            for at, sample in enumerate(self._ahead[0]):
                read = self._unpickled(*sample["plan"])
                masks = sample["loss_mask"].view(1 + self._shifts, -1)
                rows[at] = masks.shape[1]
                origins = row_origins(read.plan, self.domain.rank, masks.shape[1], read.origins)
                counts.index_add_(1, torch.from_numpy(origins), masks.double())
            if self._shifts or not self._model.calculate_per_token_loss:
                dist.all_reduce(counts, group=self._hosts)
        if self._tensor_hosts is not None:
            for numbers in (counts, rows):
                dist.broadcast(numbers, mpu.get_tensor_model_parallel_src_rank(), group=self._tensor_hosts)
        self._counts = upload(counts, torch.device("cuda", torch.cuda.current_device()))
        expect((rows // self._rows.multiple).tolist(), self._config)
