"""Documents spread over context-parallel ranks while Megatron-LM trains (`--balance-sequences`).

Plans are made where batches are made (`megatron.balanced.sequence_data`), followed by every layer's attention
(`megatron.balanced.sequence_attention`), and never talked about: ranks of a context-parallel group read the same
documents and plan alike. That they did is checked once an iteration, before the optimizer acts on it.
"""

import argparse
import pickle
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.utils import unwrap_model
from megatron.training.training import update_seqlen_stats_from_cu_seqlens

from balancing import sequences
from balancing.cluster import Cluster
from balancing.sequences.ahead import PlanningAhead
from balancing.sequences.config import SequenceConfig
from balancing.sequences.layout import AttentionShape, SequencePlan
from megatron.balanced.group import cluster_of
from megatron.balanced.sequence_attention import DocumentRotaryEmbedding, PlannedSequences
from megatron.balanced.sequence_data import PlannedDataset, Rows, positions, receive

__all__ = ["SequenceBalancer"]

_KEPT = 64  # plans that are ready to run; those of the micro-batches in flight are among them


class SequenceBalancer:
    """A `megatron.balanced.step.StepCallback`. One on each rank; ranks of a context-parallel group plan alike.

    machine: what transfers and computation take, for plans to weigh. report: is given the events of a step.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        config: SequenceConfig,
        machine: Cluster | None,
        report: Callable[[dict[str, Any]], None],
    ) -> None:
        self.config, self._args, self._machine, self._report = config, args, machine, report
        self._ready: OrderedDict[bytes, tuple[SequencePlan, Callable[..., torch.Tensor]]] = OrderedDict()

    # The model and the data, as they are built.

    def attach(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Have positions follow documents. Returns `chunks`, as Megatron's model hooks must."""
        for model in unwrap_model(chunks):
            if getattr(model, "rotary_pos_emb", None) is not None:
                model.rotary_pos_emb = DocumentRotaryEmbedding(model.rotary_pos_emb, self._args.seq_length)
        return chunks

    def datasets(self, provider: Callable) -> Callable:
        """Megatron's dataset provider with planned datasets in the place of its own."""

        def planned(dataset: Any) -> Any:
            if dataset is None or isinstance(dataset, list):
                return dataset and [planned(part) for part in dataset]
            padding = dataset.config.tokenizer.pad if self._args.sft else None
            rank = mpu.get_context_parallel_rank()
            return PlannedDataset(dataset, PlanningAhead(self._make), rank, self._rows, padding)

        def build(sizes: list[int | None], vp_stage: int | None = None) -> tuple[Any, ...]:
            return tuple(planned(dataset) for dataset in provider(sizes, vp_stage=vp_stage))

        build.is_distributed = True  # type: ignore[attr-defined]
        return build

    @cached_property
    def _cluster(self) -> Cluster:
        return cluster_of(dist.get_process_group_ranks(mpu.get_context_parallel_group()), self._machine)

    @cached_property
    def _make(self) -> Callable[[tuple[int, ...]], SequencePlan]:
        return partial(
            sequences.plan_sequences,
            cluster=self._cluster,
            shape=_shape_of(self._args),
            method=self.config.sequence_planner,
            token_capacity=self.config.sequence_token_capacity or None,
            chunk=self.config.sequence_chunk or None,
        )

    @property
    def _rows(self) -> Rows:
        args = self._args
        counted_on = args.pipeline_model_parallel_size > 1 or args.moe_token_dispatcher_type == "allgather"
        multiple = args.tensor_model_parallel_size if args.sequence_parallel else 1
        return Rows(args.context_parallel_size, multiple, fixed=bool(counted_on or not args.sft))

    # Around a step.

    def begin_step(self, iteration: int, config: Any) -> None:
        pass

    def begin_schedule(self) -> None:
        pass

    def end_schedule(self) -> None:
        pass

    def end_step(self) -> None:
        pass

    # A micro-batch.

    def next_batch(
        self, data_iterator: Iterator | None, chunk: int
    ) -> tuple[dict[str, Any], PlannedSequences, SequencePlan]:
        """The next micro-batch of this rank: what its model chunk is given, and the plan of the whole."""
        sample = None
        if mpu.get_tensor_model_parallel_rank() == 0:
            assert data_iterator is not None, "a stage has no data iterator"
            sample = next(data_iterator)
        group, source = mpu.get_tensor_model_parallel_group(), mpu.get_tensor_model_parallel_src_rank()
        batch, pickled, milliseconds = receive(sample, group, source, torch.cuda.current_device())
        plan, attention = self._get_ready(pickled)
        update_seqlen_stats_from_cu_seqlens(torch.tensor([0, *accumulate(plan.lengths)]))
        rank, rows = mpu.get_context_parallel_rank(), batch["tokens"].shape[1]
        planned = PlannedSequences(
            qkv_format="sbhd",  # one row after the other: where documents begin is for the plan to say
            max_seqlen_q=max(plan.lengths),
            max_seqlen_kv=max(plan.lengths),
            attention=attention,
            positions=positions(plan, rank, rows).cuda(non_blocking=True),
            tokens=int(plan.linear_tokens[rank]),
        )
        return batch | {"attention_mask": None}, planned, plan

    def _get_ready(self, pickled: bytes) -> tuple[SequencePlan, Callable[..., torch.Tensor]]:
        if pickled in self._ready:
            self._ready.move_to_end(pickled)
        else:
            plan = pickle.loads(pickled)
            attention = sequences.SequenceAttention(
                plan,
                rank=mpu.get_context_parallel_rank(),
                group=mpu.get_context_parallel_group(),
                cluster=self._cluster,
                routing=self.config.routing,
            )
            self._ready[pickled] = (plan, attention)
            if len(self._ready) > _KEPT:
                self._ready.popitem(last=False)
        return self._ready[pickled]


def _shape_of(args: argparse.Namespace) -> AttentionShape:
    ffn = args.ffn_hidden_size
    if args.num_experts:
        ffn = args.moe_ffn_hidden_size * args.moe_router_topk
    return AttentionShape(
        hidden=args.hidden_size,
        heads=args.num_attention_heads,
        kv_heads=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        layers=args.num_layers,
        ffn_hidden=ffn,
        head_size=args.kv_channels,
    )
