"""Balanced attention in a loop that decides where tokens are: each sequence whole on a rank, or cut in a zig-zag.

Loops of fine-tuning and reinforcement learning give each data-parallel rank whole sequences, packed one after another
(`PackedSeqParams`, "thd"). Over context-parallel ranks they cut each sequence in the zig-zag of Transformer Engine.
They balance tokens, so ranks differ in query-key pairs. Here only core attention is balanced: it sends queries, keys
and values when it is called, and its output back (`balancing.sequences.engine`). Data, positions and losses do not
change.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.utils import unwrap_model

from balancing.ranges import named
from balancing.sequences.plan import PlanCache
from balancing.sequences.planners.minimal_reshard import Lengths
from megatron.balanced.sequences.attention import BatchAttention
from megatron.balanced.sequences.events import MicroBatch
from megatron.balanced.sequences.latents import Latents, latents_of
from megatron.balanced.sequences.shape import layer_kind
from megatron.balanced.sequences.tokens import Sharing, Tokens
from megatron.balanced.shared.log import print_once
from megatron.balanced.shared.num_microbatches import get_num_microbatches
from megatron.balanced.shared.process_groups import gather_objects

__all__ = ["AttentionInPlace"]


@dataclass
class _Layer:
    """A layer of self-attention.

    attention: Megatron's module.
    chunk: number of its model chunk.
    latents: of the keys and values of the next call of core attention, if ranks exchange latents.
    """

    attention: Any
    chunk: int
    latents: Latents | None = None

    @property
    def kind(self) -> int:
        """Of the layer, as in `BatchAttention`."""
        return layer_kind(self.attention.config, self.attention.layer_number)

    @property
    def softmax_scale(self) -> float | None:
        """None: 1 / sqrt(head_dim)."""
        return getattr(self.attention, "softmax_scale", None) or self.attention.config.softmax_scale


class AttentionInPlace(Tokens):
    """The mode of a `SequenceBalancer` in which tokens stay.

    The domain "data" balances over all data-parallel ranks and their context-parallel ranks; all need the same number
    of micro-batches. "context" balances over the context-parallel ranks of each data-parallel rank.
    """

    def __init__(self) -> None:
        # Module, name of a method, and the attribute that replaced it before.
        self._plain: list[tuple[Any, str, Any]] = []
        self._active = False  # while a training schedule runs
        # Of the micro-batches of the schedule in progress, by the `id` of their parameters, which are kept.
        self._known: dict[int, tuple[PackedSeqParams, BatchAttention]] = {}

    @property
    def stay(self) -> bool:
        return True

    def attach(self, chunks: list[Any], sharing: Sharing) -> None:
        self._chunks, self._sharing, planner = chunks, sharing, sharing.planner()
        self._planned = PlanCache(planner.plan_in_place, planner.compile)  # type: ignore[arg-type]
        self.layers_moved()

    def layers_moved(self) -> None:
        self.close()
        for chunk, model in enumerate(unwrap_model(self._chunks)):
            for attention in _self_attentions(model):
                layer = _Layer(attention, chunk)
                self._replace(attention.core_attention, "forward", partial(self._forward, layer))
                if self._sharing.shape.latent is not None:
                    self._replace(attention, "get_query_key_value_tensors", partial(self._project, layer))

    def _replace(self, module: Any, name: str, method: Callable) -> None:
        """Replace a method of one module. method: its first argument is the replaced one."""
        self._plain.append((module, name, vars(module).get(name)))
        setattr(module, name, partial(method, getattr(module, name)))

    def close(self) -> None:
        while self._plain:
            module, name, before = self._plain.pop()
            delattr(module, name)
            if before is not None:
                setattr(module, name, before)

    # A schedule.

    def begin_schedule(self) -> None:
        hosts = self._sharing.hosts
        numbers = gather_objects(get_num_microbatches(), hosts)
        if len({*numbers}) > 1:
            raise ValueError(
                f"ranks {dist.get_process_group_ranks(hosts)} run {numbers} micro-batches; balanced sequences need the "
                'same number on each rank, or domain "context"'
            )
        self._active = True

    def end_schedule(self) -> None:
        if self._plain and not self._known:  # a stage may have no attention
            print_once("> sequences are not balanced: attention got no PackedSeqParams with cu_seqlens_q")
        self.abandon_schedule()

    def abandon_schedule(self) -> None:
        self._active, self._known = False, {}

    # A call.

    def _balances(self, packed: PackedSeqParams | None) -> bool:
        """Whether attention of a micro-batch is balanced."""
        return self._active and packed is not None and packed.cu_seqlens_q is not None

    def _project(
        self, layer: _Layer, plain: Callable, states: torch.Tensor, other: Any, positions: Any, packed: Any, **rest: Any
    ) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values of multi-latent attention. Keeps the latents for core attention."""
        projected = plain(states, other, positions, packed, **rest)
        layer.latents = latents_of(layer.attention, projected[4]) if self._balances(packed) else None
        return projected

    def _forward(
        self,
        layer: _Layer,
        plain: Callable,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Core attention of a layer: [rows, heads x value_dim] for query [rows, heads, head_dim], key
        [rows, kv_heads, head_dim] and value [rows, kv_heads, value_dim] of a packed micro-batch."""
        packed = packed_seq_params
        if packed is None or not self._balances(packed):
            return plain(query, key, value, *args, packed_seq_params=packed, **kwargs)
        if id(packed) not in self._known:
            self._known[id(packed)] = packed, self._attention(packed, layer.chunk, query)
        _, attention = self._known[id(packed)]
        latents, layer.latents = layer.latents, None
        # Megatron-LM pads values of multi-latent attention to the size of keys, and cuts the padding off the output.
        size, padded = self._sharing.shape.value_size or value.shape[-1], value.shape[-1]
        output = attention.attend(
            query,
            key,
            value[..., :size],
            kind=layer.kind,
            softmax_scale=layer.softmax_scale,
            sink=getattr(layer.attention.core_attention, "softmax_offset", None),
            in_place_of_kv=latents,
        )
        if size == padded:
            return output
        return torch.nn.functional.pad(output.unflatten(1, (-1, size)), (0, padded - size)).flatten(1)

    @named("plan of sequences")
    def _attention(self, packed: PackedSeqParams, chunk: int, query: torch.Tensor) -> BatchAttention:
        """The attention of a micro-batch, planned by all ranks of the domain together. query: of any layer."""
        if packed.local_cp_size is not None:
            raise ValueError("micro-batches of different context-parallel sizes cannot be balanced; use one size")
        sharing = self._sharing
        own, ways = _lengths(packed), sharing.domain.ranks // sharing.domain.origins
        if sum(own) > query.shape[0] * ways:
            raise ValueError(
                f"the sequences of a micro-batch have {sum(own)} tokens, and attention got {query.shape[0]} on each of "
                f"{ways} context-parallel ranks; pass the lengths of this micro-batch"
            )
        lengths: Lengths = tuple(gather_objects(own, sharing.hosts)[::ways])
        plan, programs, milliseconds = self._planned(lengths)  # type: ignore[arg-type]
        tokens = int(plan.linear_tokens[sharing.domain.rank])
        options = {"kernel": sharing.kernel.kernel, "timed": sharing.record.timed}
        attention = BatchAttention.of(programs, sharing.layers, tokens, **options)
        for kind in attention.kinds:
            kind.upload(query.device)
        origins = tuple(origin for origin, own_lengths in enumerate(lengths) for _ in own_lengths)
        drawn = plan, origins, tuple(range(len(origins)))
        sharing.record.add(MicroBatch(chunk, *drawn, attention.kinds, milliseconds, milliseconds))
        return attention


def _lengths(packed: PackedSeqParams) -> tuple[int, ...]:
    """Tokens of each sequence on all context-parallel ranks together, padding of sequences included: `packed.lengths`
    if the loop has set it, else from the device, for which the host waits."""
    ends = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    lengths = getattr(packed, "lengths", None)
    if lengths is None:
        lengths = [stop - start for start, stop in pairwise(ends.tolist())]
    if len(lengths) != len(ends) - 1:
        raise ValueError(
            f"lengths of {len(lengths)} sequences are given with cu_seqlens of {len(ends) - 1}; pass one for each"
        )
    return tuple(int(length) for length in lengths if length)


def _self_attentions(model: torch.nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, SelfAttention | MLASelfAttention)]
