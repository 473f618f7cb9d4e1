"""Balanced attention in a loop that decides where tokens are: each sequence whole on a rank, or cut in a zig-zag.

Loops of fine-tuning and reinforcement learning give each data-parallel rank whole sequences, packed one after another
(`PackedSeqParams`, "thd"). Over context-parallel ranks they cut each sequence in the zig-zag of Transformer Engine.
They balance tokens, so ranks differ in query-key pairs. Here only core attention is balanced: it sends queries, keys
and values when it is called, and its output back (`balancing.sequences.engine`). Data, positions and losses do not
change.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from megatron.core import mpu
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.utils import unwrap_model

from balancing.ranges import named
from balancing.sequences.plan import PlanCache
from balancing.sequences.planners.minimal_reshard import Lengths
from megatron.balanced.sequences.attention import BatchAttention
from megatron.balanced.sequences.events import MicroBatch
from megatron.balanced.sequences.latents import Latents, adds_to_gradient, latents_of
from megatron.balanced.sequences.mask import not_causal, why_alone
from megatron.balanced.sequences.shape import layer_kind
from megatron.balanced.sequences.tokens import Sharing, Tokens, by_value
from megatron.balanced.shared.log import print_once
from megatron.balanced.shared.model_checks import check_configs

__all__ = ["AttentionInPlace"]


class _Given(NamedTuple):
    """What the parameters of a micro-batch hold, as far as the host knows without waiting for the device. A loop may
    set the fields of one object anew, or copy numbers into one tensor.

    ends: `cu_seqlens_q_padded`, else `cu_seqlens_q`.
    version: of `ends`; each operation in place is a new one.
    lengths: `packed.lengths` if the loop has set it.
    """

    packed: PackedSeqParams
    ends: torch.Tensor
    version: int
    lengths: tuple[int, ...] | None

    @classmethod
    def of(cls, packed: PackedSeqParams | None) -> "_Given | None":
        if packed is None or packed.cu_seqlens_q is None:
            return None
        ends = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
        lengths = getattr(packed, "lengths", None)
        version = 0 if ends.is_inference() else ends._version
        return cls(packed, ends, version, None if lengths is None else tuple(int(length) for length in lengths))

    def same(self, other: "_Given") -> bool:
        return self.ends is other.ends and self[2:] == other[2:]

    def rewritten_in(self, other: "_Given") -> bool:
        """Whether `other` has the object or the tensor of this one, with something else in it."""
        return (self.packed is other.packed or self.ends is other.ends) and not self.same(other)

    def read(self, before: "_Given | None" = None) -> tuple[int, ...]:
        """Tokens of each sequence on all context-parallel ranks together, padding of sequences included: `lengths`, or
        else from the device, for which the host waits.

        before: of the micro-batch before. If its lengths are still there beside other `ends`, they are not read.
        """
        lengths = self.lengths
        if lengths is None or (before is not None and before.rewritten_in(self) and before.lengths == lengths):
            lengths = tuple(stop - start for start, stop in pairwise(self.ends.tolist()))
        if len(lengths) != len(self.ends) - 1:
            raise ValueError(
                f"lengths of {len(lengths)} sequences are given with cu_seqlens of {len(self.ends) - 1}; pass one for "
                "each"
            )
        return tuple(length for length in lengths if length)


class _Batch(NamedTuple):
    """A micro-batch in the layers of one config, on which the ranks have agreed.

    opener: the first of these layers that it passed.
    given, own: its parameters and lengths on this rank; None if it is not packed.
    attention: balanced; None if it is not packed.
    trains: whether some rank passes gradients back through it.
    """

    opener: "_Layer"
    given: _Given | None
    own: tuple[int, ...] | None
    attention: BatchAttention | None
    trains: bool

    def holds(self, given: _Given | None) -> bool:
        """Whether `given` are the parameters of this micro-batch, perhaps in a copy."""
        if given is None or self.given is None:
            return given is self.given
        return given.same(self.given) or given.read() == self.own


@dataclass
class _Pass:
    """A micro-batch that has passed a layer forward. recomputed: how many times this layer was recomputed for it."""

    given: _Given | None
    batch: _Batch
    recomputed: int = 0


@dataclass
class _Layer:
    """A layer of self-attention.

    name: name of Megatron's module in its chunk.
    attention: this module.
    chunk: number of its model chunk.
    latents: latents of the keys and values of the next call of core attention, if ranks exchange latents.
    passes: the passes of the schedule in progress, in order.
    """

    name: str
    attention: Any
    chunk: int
    latents: Latents | None = None
    passes: list[_Pass] = field(default_factory=list)

    @property
    def kind(self) -> int:
        """Attention of the layer, as in `BatchAttention`."""
        return layer_kind(self.attention.config, self.attention.layer_number)

    @property
    def softmax_scale(self) -> float | None:
        """None: 1 / sqrt(head_dim)."""
        core, config = self.attention.core_attention, self.attention.config
        scales = (getattr(module, "softmax_scale", None) for module in (core, self.attention, config))
        return next((scale for scale in scales if scale), None)


class AttentionInPlace(Tokens):
    """The mode of a `SequenceBalancer` in which tokens stay.

    The domain "data" balances over all data-parallel ranks and their context-parallel ranks; all need the same number
    of micro-batches. "context" balances over the context-parallel ranks of each data-parallel rank.

    Layers whose attention is not known to be causal and a plain softmax (`mask.why_alone`) run as the loop has them.
    """

    def __init__(self) -> None:
        # Module, name of a method, and the attribute that replaced it before.
        self._plain: list[tuple[Any, str, Any]] = []
        self._hooks: list[Any] = []
        self._layers: list[_Layer] = []
        self._active = False  # while a training schedule runs
        self._goes_back = False  # whether a gradient goes back to the input of the latest layers
        self._balanced = False  # whether a micro-batch of the schedule in progress was
        self._batches: dict[tuple[int, int], _Batch] = {}  # the latest, by chunk and config
        self._latest: dict[tuple[int, int], _Given | None] = {}  # its parameters, also of an earlier schedule

    @property
    def stay(self) -> bool:
        return True

    def attach(self, chunks: list[Any], sharing: Sharing) -> None:
        self._chunks, self._sharing, planner = chunks, sharing, sharing.planner()
        self._planned = PlanCache(planner.plan_in_place, planner.compile)  # type: ignore[arg-type]
        for reason, names in self._replace_all().items():
            if mpu.get_tensor_model_parallel_rank() or mpu.get_data_parallel_rank(with_context_parallel=True):
                continue  # one rank of each stage prints it
            more = f" and {len(names) - 1} more" * (len(names) > 1)
            print(f"> sequences: {names[0]}{more}: {reason}; run as the loop has them, unbalanced", flush=True)

    def layers_moved(self) -> None:
        self._replace_all()

    def _replace_all(self) -> dict[str, list[str]]:
        """Balance the layers of the model. Returns the names of those that stay as they are, by reason."""
        self.close()
        alone: dict[str, list[str]] = defaultdict(list)
        for chunk, model in enumerate(unwrap_model(self._chunks)):
            for name, attention in model.named_modules():
                if not isinstance(attention, SelfAttention | MLASelfAttention):
                    continue
                if reason := why_alone(attention, self._sharing.model):
                    alone[reason].append(name)
                    continue
                if attention.config is not self._sharing.model:
                    check_configs("SequenceBalancer", attention.config)
                layer = _Layer(name, attention, chunk)
                self._layers.append(layer)
                self._replace(attention.core_attention, "forward", partial(self._forward, layer))
                if self._sharing.shape.latent is not None:
                    self._replace(attention, "get_query_key_value_tensors", partial(self._project, layer))
            balanced = {layer.attention for layer in self._layers if layer.chunk == chunk}
            for block in model.modules():  # not a tower's
                if isinstance(block, TransformerBlock | HybridStack) and not balanced.isdisjoint(block.modules()):
                    # What recomputation is given: a loop may change the input of the block on its way.
                    self._hooks.append(block.layers[0].register_forward_pre_hook(self._look, with_kwargs=True))
        return alone

    def _replace(self, module: Any, name: str, method: Callable) -> None:
        """Replace a method of one module. method: its first argument is the replaced one."""
        self._plain.append((module, name, vars(module).get(name)))
        setattr(module, name, partial(method, getattr(module, name)))

    def close(self) -> None:
        self._layers.clear()
        self._latest.clear()
        while self._plain:
            module, name, before = self._plain.pop()
            delattr(module, name)
            if before is not None:
                setattr(module, name, before)
        while self._hooks:
            self._hooks.pop().remove()

    def _look(self, layer: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        states = args[0] if args else kwargs.get("hidden_states")
        if torch._C._current_graph_task_id() == -1:  # not in a backward pass
            self._goes_back = isinstance(states, torch.Tensor) and states.requires_grad

    # A schedule.

    def begin_schedule(self, data: Any, micro_batches: int) -> None:
        numbers = self._sharing.compare("the beginning of a schedule", micro_batches)
        if len({*numbers}) > 1:
            raise ValueError(
                f"ranks {self._sharing.ranks} run {numbers} micro-batches; balanced sequences need the same number on "
                'each rank, or domain "context"'
            )
        self._active = True

    def end_schedule(self) -> None:
        if self._plain and not self._balanced:  # a stage may have no attention
            print_once("> sequences are not balanced: attention got no PackedSeqParams with cu_seqlens_q")
        self.abandon_schedule()

    def abandon_schedule(self) -> None:
        self._active = self._balanced = False
        self._batches.clear()
        for layer in self._layers:
            layer.passes.clear()

    # A call.

    def _project(
        self, layer: _Layer, plain: Callable, states: torch.Tensor, other: Any, positions: Any, packed: Any, **rest: Any
    ) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values of multi-latent attention. Keeps the latents for core attention."""
        if balances := self._active and _Given.of(packed) is not None:
            adds_to_gradient(layer.attention)
        projected = plain(states, other, positions, packed, **rest)
        layer.latents = latents_of(layer.attention, projected[4]) if balances else None
        return projected

    def _forward(
        self,
        layer: _Layer,
        plain: Callable,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **rest: Any,
    ) -> torch.Tensor:
        """Core attention of a layer: [rows, heads x value_dim] for query [rows, heads, head_dim], key
        [rows, kv_heads, head_dim] and value [rows, kv_heads, value_dim] of a packed micro-batch."""
        latents, layer.latents = layer.latents, None
        given = _Given.of(packed_seq_params) if self._active else None
        attention = None
        if self._active:
            refused = not_causal(layer.name, attn_mask_type, attention_bias) if given is not None else ""
            batch = self._batch(layer, given, (query, key, value), refused)
            attention = batch.attention
        if attention is None:
            options = {"attn_mask_type": attn_mask_type, "packed_seq_params": packed_seq_params, **rest}
            if attention_bias is not None:
                options["attention_bias"] = attention_bias
            return plain(query, key, value, attention_mask, **options)
        if batch.trains and torch.is_grad_enabled() and not _trains(query, key, value):
            query = query.detach().requires_grad_()  # other ranks send gradients back through this call
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

    def _batch(self, layer: _Layer, given: _Given | None, inputs: tuple[torch.Tensor, ...], refused: str) -> _Batch:
        """The micro-batch that passes a layer. A new one begins where the first layer of the one before is called
        again, or with other sequences.

        given: its parameters.
        inputs: query, key and value.
        refused: why this call cannot be balanced, or "".
        """
        if torch._C._current_graph_task_id() != -1:  # inside a backward pass
            return _recomputed(layer, given)
        at = layer.chunk, id(layer.attention.config)
        batch = self._batches.get(at)
        if batch is None or batch.opener is layer or not batch.holds(given):
            batch = self._agreed(layer, given, self._latest.get(at), inputs, refused)
        elif refused:
            raise ValueError(refused)
        self._batches[at], self._latest[at] = batch._replace(given=given), given
        layer.passes.append(_Pass(given, batch))
        return batch

    @named("plan of sequences")
    def _agreed(
        self,
        layer: _Layer,
        given: _Given | None,
        before: _Given | None,
        inputs: tuple[torch.Tensor, ...],
        refused: str,
    ) -> _Batch:
        """A new micro-batch. All ranks of the domain plan it together, and each learns why another one cannot.

        before: parameters of the micro-batch before. The others: as in `_batch`.
        """
        sharing, own = self._sharing, None
        ways, query = sharing.domain.ranks // sharing.domain.origins, inputs[0]
        try:
            if given is not None and not refused:
                own = _read(given, before, query.shape[0], ways)
        except ValueError as error:
            refused = str(error)
        # Without a gradient to the input of recomputed layers, a rank does not recompute them, for which others wait.
        recomputes = self._goes_back or _trains(*inputs) if not torch.is_grad_enabled() else None
        told = sharing.compare(layer.name, (own, refused, recomputes is None and _trains(*inputs), recomputes))
        for text, ranks in by_value(sharing.ranks, [text for _, text, *_ in told]).items():
            if text:
                raise ValueError(f"{text} (ranks {ranks})")
        unpacked = by_value(sharing.ranks, [lengths is None for lengths, *_ in told])
        if len(unpacked) > 1:
            raise ValueError(
                f"ranks {unpacked[True]} got a micro-batch without PackedSeqParams, and ranks {unpacked[False]} one "
                "with them; pass them on every rank (a single sequence has cu_seqlens_q [0, tokens]), or use "
                'domain "context"'
            )
        trains = any(trains for _, _, trains, _ in told)
        if own is None:
            return _Batch(layer, None, None, None, trains)
        back = by_value(sharing.ranks, [recomputes for *_, recomputes in told])
        if len(back) > 1:
            again = back.get(True) or back[None]
            others = [rank for rank in sharing.ranks if rank not in again]
            raise ValueError(
                f"{layer.name} is recomputed on ranks {again} and not on ranks {others}, where no gradient goes back "
                "to its input; let the input require one on all ranks, or switch recomputation off"
            )
        lengths: Lengths = tuple(lengths for lengths, *_ in told[::ways])
        for at, (other, *_) in enumerate(told):
            if other != lengths[at // ways]:
                first = sharing.ranks[at // ways * ways]
                raise ValueError(
                    f"ranks {first} and {sharing.ranks[at]} are context-parallel ranks of one micro-batch, but got "
                    "sequences of other lengths; give them the same"
                )
        plan, programs, milliseconds = self._planned(lengths)  # type: ignore[arg-type]
        tokens = int(plan.linear_tokens[sharing.domain.rank])
        attention = BatchAttention.of(programs, sharing.layers, tokens, **sharing.options)
        for kind in attention.kinds:
            kind.upload(query.device)
        origins = tuple(origin for origin, own_lengths in enumerate(lengths) for _ in own_lengths)
        drawn = plan, origins, tuple(range(len(origins)))
        sharing.record.add(MicroBatch(layer.chunk, *drawn, attention.kinds, milliseconds, milliseconds))
        self._balanced = True
        return _Batch(layer, given, own, attention, trains)


def _recomputed(layer: _Layer, given: _Given | None) -> _Batch:
    """The micro-batch for which a layer is recomputed: the next one with these sequences that has not been. Raises
    ValueError if the loop has changed the parameters meanwhile."""
    waiting = [one for one in layer.passes if not one.recomputed]
    if given is not None and any(one.given is not None and one.given.rewritten_in(given) for one in waiting):
        raise ValueError(
            f"the PackedSeqParams of a micro-batch were set anew before {layer.name} was recomputed for it; give each "
            "micro-batch an object of its own, or switch recomputation off"
        )
    if given is None:
        found = [one for one in layer.passes if one.given is None]
    else:
        known = [one for one in layer.passes if one.given is not None]
        found = [one for one in known if given.same(one.given)] or [
            one for one in known if given.read() == one.batch.own
        ]
    if not found:
        raise ValueError(
            f"{layer.name} is recomputed with PackedSeqParams that it did not have in a forward pass; pass it the same"
        )
    # Without a pipeline, several micro-batches wait only if one loss has them all, which goes back from the last one.
    in_turn = (
        mpu.get_pipeline_model_parallel_world_size() > 1 or layer.attention.config.overlap_moe_expert_parallel_comm
    )
    one = ([one for one in found if not one.recomputed] or found)[0 if in_turn else -1]
    one.recomputed += 1
    return one.batch


def _read(given: _Given, before: _Given | None, rows: int, ways: int) -> tuple[int, ...]:
    """`given.read(before)`, checked. rows: of a query. ways: context-parallel ranks."""
    if given.packed.local_cp_size is not None:
        raise ValueError("micro-batches of different context-parallel sizes cannot be balanced; use one size")
    own = given.read(before)
    if sum(own) > rows * ways:
        raise ValueError(
            f"the sequences of a micro-batch have {sum(own)} tokens, and attention got {rows} on each of {ways} "
            "context-parallel ranks; pass the lengths of this micro-batch"
        )
    return own


def _trains(*inputs: torch.Tensor) -> bool:
    return any(one.requires_grad for one in inputs)
