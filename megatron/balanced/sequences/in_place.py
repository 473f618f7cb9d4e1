"""Balanced attention in a loop that decides where tokens are: each sequence whole on a rank, or cut in a zig-zag.

Loops of fine-tuning and reinforcement learning give each data-parallel rank whole sequences, packed one after another
(`PackedSeqParams`, "thd"). Over context-parallel ranks they cut each sequence in the zig-zag of Transformer Engine.
They balance tokens, so ranks differ in query-key pairs. Here only core attention is balanced: it sends queries, keys
and values when it is called, and its output back (`balancing.sequences.engine`). Data, positions and losses do not
change.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import is_layer_window_attention
from megatron.core.utils import unwrap_model

from balancing.ranges import named
from balancing.sequences.ahead import PlanningAhead
from balancing.sequences.planners.stay import Lengths
from megatron.balanced.sequences.attention import BatchAttention, window_of
from megatron.balanced.sequences.events import MicroBatch
from megatron.balanced.sequences.tokens import Sharing, Tokens
from megatron.balanced.shared.log import print_once
from megatron.balanced.shared.micro_batches import get_num_microbatches
from megatron.balanced.shared.process_groups import gather_objects

__all__ = ["AttentionInPlace"]


class _Layer(NamedTuple):
    """A layer of self-attention.

    chunk: number of its model chunk.
    windowed: whether it has a sliding window.
    plain: `forward` of its core attention in the model.
    """

    chunk: int
    windowed: bool
    plain: Callable[..., torch.Tensor]


class AttentionInPlace(Tokens):
    """The mode of a `SequenceBalancer` in which tokens stay.

    The domain "data" balances over all data-parallel ranks and their context-parallel ranks; all need the same number
    of micro-batches. "context" balances over the context-parallel ranks of each data-parallel rank.
    """

    def __init__(self) -> None:
        self._layers: dict[Any, _Layer] = {}  # by core attention
        self._active = False  # while a training schedule runs
        # Of the micro-batches of the schedule in progress, by the `id` of their parameters, which are kept.
        self._known: dict[int, tuple[PackedSeqParams, BatchAttention]] = {}

    @property
    def stay(self) -> bool:
        return True

    def attach(self, chunks: list[Any], sharing: Sharing) -> None:
        self._chunks, self._sharing, planner = chunks, sharing, sharing.planner
        self._planned = PlanningAhead(planner.plan_in_place, planner.compile)  # type: ignore[arg-type]
        self.layers_moved()

    def layers_moved(self) -> None:
        self.close()
        for chunk, model in enumerate(unwrap_model(self._chunks)):
            for attention in _self_attentions(model):
                core, config = attention.core_attention, attention.config
                windows = window_of(config) or (), config.window_attn_skip_freq
                windowed = is_layer_window_attention(*windows, attention.layer_number)
                self._layers[core] = _Layer(chunk, windowed, core.forward)
                core.forward = partial(self._forward, core)

    def close(self) -> None:
        while self._layers:
            core, layer = self._layers.popitem()
            del core.forward
            if core.forward != layer.plain:
                core.forward = layer.plain

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
        if self._layers and not self._known:  # a stage may have no attention
            print_once("> sequences are not balanced: attention got no PackedSeqParams with cu_seqlens_q")
        self.abandon_schedule()

    def abandon_schedule(self) -> None:
        self._active, self._known = False, {}

    # A call.

    def _forward(
        self,
        core: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Core attention of a layer: [rows, heads x head_dim] for query [rows, heads, head_dim], key and value
        [rows, kv_heads, head_dim] of a packed micro-batch."""
        layer, packed = self._layers[core], packed_seq_params
        if not self._active or packed is None or packed.cu_seqlens_q is None:
            return layer.plain(query, key, value, *args, packed_seq_params=packed, **kwargs)
        if id(packed) not in self._known:
            self._known[id(packed)] = packed, self._attention(packed, layer.chunk, query.device)
        _, attention = self._known[id(packed)]
        sink, scale = getattr(core, "softmax_offset", None), core.config.softmax_scale
        return attention.attend(query, key, value, windowed=layer.windowed, softmax_scale=scale, sink=sink)

    @named("plan of sequences")
    def _attention(self, packed: PackedSeqParams, chunk: int, device: torch.device) -> BatchAttention:
        """The attention of a micro-batch, planned by all ranks of the domain together."""
        if packed.local_cp_size is not None:
            raise ValueError("micro-batches of different context-parallel sizes cannot be balanced; use one size")
        sharing = self._sharing
        ends = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
        own = tuple(stop - start for start, stop in pairwise(ends.tolist()) if stop > start)
        ways = sharing.domain.ranks // sharing.domain.origins
        lengths: Lengths = tuple(gather_objects(own, sharing.hosts)[::ways])
        plan, programs, milliseconds = self._planned(lengths)  # type: ignore[arg-type]
        tokens = int(plan.linear_tokens[sharing.domain.rank])
        attention = BatchAttention.of(programs, sharing.layers, tokens, timed=sharing.record.timed)
        for kind in attention.kinds:
            kind.upload(device)
        origins = tuple(origin for origin, of_rank in enumerate(lengths) for _ in of_rank)
        drawn = plan, origins, tuple(range(len(origins)))
        sharing.record.add(MicroBatch(chunk, *drawn, attention.kinds, milliseconds, milliseconds))
        return attention


def _self_attentions(model: torch.nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, SelfAttention)]
