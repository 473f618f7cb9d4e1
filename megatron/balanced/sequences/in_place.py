"""Balanced attention in a loop that decides where tokens are: each sequence whole on a rank, or cut in a zig-zag.

Loops of fine-tuning and reinforcement learning give each data-parallel rank whole sequences, packed one after another
(`PackedSeqParams`, "thd"). Over context-parallel ranks they cut each sequence in the zig-zag of Transformer Engine.
They balance tokens, so ranks differ in query-key pairs. Here only core attention is balanced: it sends queries, keys
and values when it is called, and its output back (`balancing.sequences.engine`). Data, positions and losses do not
change.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import is_layer_window_attention
from megatron.core.utils import get_model_config, unwrap_model

from balancing.cluster import Cluster
from balancing.ranges import named
from balancing.sequences import SequenceAttention, SequencePlan
from balancing.sequences.ahead import PlanningAhead
from balancing.sequences.config import SequenceConfig
from balancing.sequences.plan import plan_attention
from balancing.sequences.planners.stay import Lengths, zigzag
from megatron.balanced.sequences.attention import window_of
from megatron.balanced.sequences.domain import Domain
from megatron.balanced.sequences.events import MicroBatch, Sharing, spent, step_event
from megatron.balanced.sequences.programs import attentions_of, compile_layers, routing_of, token_bytes
from megatron.balanced.sequences.shape import shape_of
from megatron.balanced.shared.callbacks import StepCallback
from megatron.balanced.shared.log import print_once
from megatron.balanced.shared.micro_batches import get_num_microbatches
from megatron.balanced.shared.process_groups import cluster_of, duplicate_group, gather_objects, split_group

__all__ = ["AttentionBalancer"]


class _Attentions(NamedTuple):
    """The attention of one micro-batch.

    packed: its parameters, kept so that no other object gets their `id`.
    whole, windowed: of layers without and with a sliding window.
    tokens: of this rank; the rows after them are padding.
    """

    packed: PackedSeqParams
    whole: SequenceAttention | None
    windowed: SequenceAttention | None
    tokens: int


class AttentionBalancer(StepCallback):
    """One on each rank. Ranks that share sequences make the same plans. Construct it on all ranks together.

    chunks: the model chunks of this rank.
    config: `planner`, `routing` and `domain`. The domain "data" balances over all data-parallel ranks and their
        context-parallel ranks; all need the same number of micro-batches. "context" balances over the context-parallel
        ranks of each data-parallel rank.
    timeout_minutes: of collectives.
    machine: the cluster whose speeds plans use; None for defaults.
    report: called on one rank of a domain for each step, with a function that returns the event.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        config: SequenceConfig,
        timeout_minutes: float,
        machine: Cluster | None,
        report: Callable[[Callable[[], dict[str, Any]]], None] | None,
    ) -> None:
        self.chunks, self.config, self._event = list(chunks), config, report
        self._model = get_model_config(chunks[0])
        self._modules: dict[Any, tuple[int, int]] = {}  # core attention -> number of its layer, and its chunk
        self.layers_moved()
        self._shape = shape_of(self._model)
        self._domain, whole = _domain(config.domain == "context")
        groups = self._domain.groups
        if groups > 1:
            whole = split_group(whole, groups, timeout_minutes)
        elif config.domain != "context":  # Megatron-LM reduces gradients in its own group meanwhile
            whole = duplicate_group(whole, timeout_minutes)
        self._process_group = whole
        self._hosts = duplicate_group(whole, timeout_minutes, on_host=True)
        self._cluster = cluster_of(dist.get_process_group_ranks(whole), machine)
        compile_of_rank = partial(
            compile_layers,
            shape=self._shape,
            rank=self._domain.rank,
            cluster=self._cluster,
            routing=routing_of(config, self._cluster),
            token_bytes=token_bytes(self._shape, self._model),
        )
        self._planned = PlanningAhead(self._plan, compile_of_rank)
        self._classes: dict[type, type] = {}  # of core attention -> the balanced one
        self._iteration = 0
        self._known: dict[int, _Attentions] = {}  # of the micro-batches of the schedule in progress
        self._step: list[MicroBatch] = []

    def _plan(self, lengths: Lengths) -> SequencePlan:
        flat = [length for of_rank in lengths for length in of_rank]
        linear = zigzag(lengths, self._domain.ranks // len(lengths))
        return plan_attention(flat, linear, self._cluster, shape=self._shape, method=self.config.planner)

    def layers_moved(self) -> None:
        self._modules = {
            attention.core_attention: (attention.layer_number, chunk)
            for chunk, model in enumerate(unwrap_model(self.chunks))
            for attention in _self_attentions(model)
        }

    # Around a schedule.

    def begin_step(self, iteration: int, config: Any) -> None:
        self._iteration = iteration

    def begin_schedule(self) -> None:
        numbers = gather_objects(get_num_microbatches(), self._hosts)
        if len({*numbers}) > 1:
            raise ValueError(
                f"ranks {dist.get_process_group_ranks(self._process_group)} run {numbers} micro-batches; balanced "
                'sequences need the same number on each rank, or domain "context"'
            )
        self._known, self._step = {}, []
        for core in self._modules:
            plain = type(core)
            core.__class__ = self._classes.setdefault(plain, _balanced_class(plain, self))

    def end_schedule(self) -> None:
        self._plain()
        self._known = {}

    def abandon_schedule(self) -> None:
        self.end_schedule()
        self._step = []

    def _plain(self) -> None:
        plain = {balanced: own for own, balanced in self._classes.items()}
        for core in self._modules:
            core.__class__ = plain.get(type(core), type(core))

    def end_step(self) -> None:
        batches, self._step = self._step, []
        if not batches:
            if self._modules:  # a stage may have no attention
                print_once("> sequences are not balanced: attention got no PackedSeqParams with cu_seqlens_q")
            return
        if self._event is None:
            return
        numbers = gather_objects(spent(batches), self._hosts)
        if not mpu.get_tensor_model_parallel_rank() and not self._domain.rank:
            stage, replica = mpu.get_pipeline_model_parallel_rank(), mpu.get_data_parallel_rank()
            sharing = Sharing(self._domain, self._cluster, self._shape, stage, replica)
            of_ranks = np.array(numbers, dtype=np.int64)
            self._event(partial(step_event, self._iteration, batches, of_ranks, True, sharing, None))

    def close(self) -> None:
        """Give the modules their own classes back."""
        self._plain()

    # A call.

    def attend(
        self,
        core: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        packed: PackedSeqParams,
    ) -> torch.Tensor:
        """The output [rows, heads x head_dim] of core attention.

        core: the module.
        query: [rows, heads, head_dim].
        key, value: [rows, kv_heads, head_dim].
        packed: parameters of the micro-batch.
        """
        number, chunk = self._modules[core]
        found = self._known.get(id(packed))
        if found is None:
            found = self._known[id(packed)] = self._attentions(packed, chunk, query.device)
        config, rows = core.config, query.shape[0]
        windowed = is_layer_window_attention(window_of(config) or (), config.window_attn_skip_freq, number)
        attend = found.windowed if windowed else found.whole
        assert attend is not None
        inputs = [(part.squeeze(1) if part.dim() == 4 else part)[: found.tokens] for part in (query, key, value)]
        sink = getattr(core, "softmax_offset", None)
        scale = core.config.softmax_scale or inputs[0].shape[-1] ** -0.5
        output = attend(*inputs, softmax_scale=scale, sink=None if sink is None else sink.flatten()).flatten(1)
        return torch.nn.functional.pad(output, (0, 0, 0, rows - found.tokens))

    @named("plan of sequences")
    def _attentions(self, packed: PackedSeqParams, chunk: int, device: torch.device) -> _Attentions:
        """The attention of a micro-batch, planned by all ranks of the domain together."""
        if packed.local_cp_size is not None:
            raise ValueError("micro-batches of different context-parallel sizes cannot be balanced; use one size")
        ends = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
        own = tuple(stop - start for start, stop in pairwise(ends.tolist()) if stop > start)
        ways = self._domain.ranks // self._domain.origins
        lengths: Lengths = tuple(gather_objects(own, self._hosts)[::ways])
        planned = self._planned(lengths)  # type: ignore[arg-type]
        whole, windowed = attentions_of(planned.program, self._process_group, timed=self._event is not None)
        for attention in {id(each): each for each in (whole, windowed) if each is not None}.values():
            attention.upload(device)
        kinds = [whole] if windowed is whole or windowed is None else [whole, windowed]
        origins = tuple(origin for origin, of_rank in enumerate(lengths) for _ in of_rank)
        made = [each for each in kinds if each is not None]
        known = planned.plan, origins, tuple(range(len(origins))), made, planned.milliseconds, planned.milliseconds
        self._step.append(MicroBatch(chunk, *known))
        return _Attentions(packed, whole, windowed, int(planned.plan.linear_tokens[self._domain.rank]))


def _domain(of_context: bool) -> tuple[Domain, dist.ProcessGroup]:
    """The ranks that share sequences, and the group of Megatron-LM that they are in."""
    if of_context:
        return Domain.of_context(), mpu.get_context_parallel_group()
    return Domain.of_data(), mpu.get_data_parallel_group(with_context_parallel=True)


def _self_attentions(model: torch.nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, SelfAttention)]


def _balanced_class(plain: type, balancer: AttentionBalancer) -> type:
    """A class of core attention that leaves packed sequences to `balancer`."""

    class Balanced(plain):  # type: ignore[misc, valid-type]
        def forward(
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            *args: Any,
            packed_seq_params: PackedSeqParams | None = None,
            **kwargs: Any,
        ) -> torch.Tensor:
            if packed_seq_params is None or packed_seq_params.cu_seqlens_q is None:
                return super().forward(query, key, value, *args, packed_seq_params=packed_seq_params, **kwargs)
            return balancer.attend(self, query, key, value, packed_seq_params)

    Balanced.__name__ = Balanced.__qualname__ = plain.__name__
    return Balanced
