"""Exact attention over a batch of sequences whose tokens a plan has spread over ranks.

q, k, v and the output have the layout of the linear layers. Where attention has another layout, tokens are remapped
before and after, with q, k and v in one message to each peer. In between the rank runs its program (`program`): keys
and values are sent while the rank computes. Partial results are merged in float32 (float64 stays float64) in a fixed
order, so that a run repeats bit for bit. No query-key pair that the mask hides is computed, except inside tiles
(Zeppelin, arXiv 2509.21841, section 4). An attention sink is merged once for each query, after its last keys. With
multi-latent attention, latents can be sent in place of keys and values (`latents`).

There is no dropout: its masks would have to be the same under every plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist

from balancing.kernels import merging
from balancing.kernels.base import Kernel, accumulation_dtype, sink_gradient, with_sink
from balancing.kernels.choice import choose_kernel
from balancing.kernels.trial import AttentionHeads
from balancing.ranges import named
from balancing.sequences.engine.compiler import RankProgram
from balancing.sequences.engine.latents import Projection, is_received, shared_size
from balancing.sequences.engine.program import (
    TO_ATTENTION,
    TO_LINEAR,
    Compute,
    Kind,
    Messages,
    ProgramStep,
    Start,
    TransferGroup,
)
from balancing.sequences.engine.row_indices import CallRows, MessageRows, rows_of, rows_on_device
from balancing.sequences.engine.transport import Chain, Exchange, Pending, Statistics, Transport
from balancing.sequences.sequence_plan import SequencePlan

__all__ = ["AttentionCall", "SequenceAttention", "prepare_exchanges"]


class SequenceAttention:
    """Attention within each sequence of a plan, with the plan's mask, forward and backward.

    All layers of a step that follow this plan may share one object.

    plan: the plan of the whole batch.
    program: this rank's part of the plan, from `compile_rank`.
    process_group: plan.ranks processes, in which this process has rank program.rank; all processes by default. All of
        them must call attention the same number of times in the same order, and must not use the group for anything
        else meanwhile.
    kernel: computes attention of pieces; by default the fastest for the device and the shapes, which all ranks
        of the group measure at the first call.
    timed: as in `Statistics`.

    `statistics` counts the bytes sent.

    Raises ValueError for the program of another plan, and for a group whose size or rank does not fit the plan.
    """

    def __init__(
        self,
        plan: SequencePlan,
        *,
        program: RankProgram,
        process_group: dist.ProcessGroup | None = None,
        kernel: Kernel | None = None,
        timed: bool = True,
    ) -> None:
        self._process_group = process_group
        self.transport = Transport(process_group)
        size, rank = dist.get_world_size(process_group), program.rank
        if (size, self.transport.rank) != (plan.ranks, rank):
            raise ValueError(
                f"rank {rank} of a plan for {plan.ranks} ranks cannot run as rank {self.transport.rank} of a group "
                f"of {size}; plan for the group"
            )
        if program.program.shards != tuple(sorted(plan.shards(rank))):
            raise ValueError(f"the program of rank {rank} belongs to another plan; compile it from this one")
        self.plan, self.program = plan, program
        self.statistics = Statistics(timed=timed)
        self._kernel = kernel
        self._device: torch.device | None = None
        self._calls: list[CallRows] = []
        self._exchanges: dict[TransferGroup, Exchange] = {}

    def upload(self, device: torch.device, more: Sequence[np.ndarray] = ()) -> list[torch.Tensor]:
        """Copy the program's tables to the device in one asynchronous copy.

        more: further arrays of whole numbers below 2^31 for the same copy. Returns them, int32 on the device.
        """
        rows, uploaded = rows_on_device(self.program.program.calls, self.program.table, device, more)
        self._calls, self._exchanges = rows.calls, prepare_exchanges(self.program, self.transport, rows.messages)
        self._device = device
        return uploaded

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        softmax_scale: float | None = None,
        sink: torch.Tensor | None = None,
        latent: torch.Tensor | None = None,
        projection: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The output [tokens, heads, value_size] of this rank's tokens, in the order of the linear layout.

        q: [tokens, heads, head_size], of this rank's tokens in the linear layout, in order.
        k: [tokens, kv_heads, head_size], of the same tokens.
        v: [tokens, kv_heads, value_size], of the same tokens.
        softmax_scale: 1 / sqrt(head_size) by default.
        sink: [heads], an additional score of every query of a head, without a value, as in GPT-OSS. Its gradient covers
            this rank's queries.
        latent: [tokens, latent], from which k and v were projected; it is sent in their place. The last elements of a
            key that are not projected are the same in all heads.
        projection: [kv_heads x (projected elements of a key + value_size), latent], the weight. Its gradient covers
            only keys and values that this rank receives. The gradients of k and v cover the rank's own tokens.

        Raises ValueError for shapes or types that do not fit the plan or each other, and for `latent` without
        `projection` or `projection` without `latent`.
        """
        self._check(q, k, v, sink)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        kernel = self._kernel or self._choose(q, v)
        if self._device != q.device:
            self.upload(q.device)
        if (latent is None) != (projection is None):
            raise ValueError("latent and projection go together; give both or neither")
        return _Attention.apply(q, k, v, sink, latent, projection, self.call(kernel, scale))

    def call(self, kernel: Kernel, scale: float) -> "AttentionCall":
        """What runs the passes of a layer with this kernel and scale."""
        return AttentionCall(self.program, self.transport, self._exchanges, self.statistics, kernel, scale, self._calls)

    def _choose(self, q: torch.Tensor, v: torch.Tensor) -> Kernel:
        heads = AttentionHeads(q.dtype, q.shape[1], v.shape[1], q.shape[2], v.shape[2], not self.plan.sees_all)
        return choose_kernel(q.device, heads, process_group=self._process_group).kernel

    def _check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None) -> None:
        tokens = int(self.plan.linear_tokens[self.transport.rank])
        if q.shape[0] != tokens:
            raise ValueError(f"q has {q.shape[0]} tokens; the plan's linear layout has {tokens} on this rank")
        if k.shape[:2] != v.shape[:2] or k.shape[::2] != q.shape[::2]:
            raise ValueError(
                f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} must agree in tokens, k and v "
                "in heads, and q and k in head size"
            )
        if q.shape[1] % k.shape[1]:
            raise ValueError(f"{q.shape[1]} query heads are no multiple of {k.shape[1]} key-value heads")
        if not q.dtype == k.dtype == v.dtype:
            raise ValueError(f"q, k and v must be of one type, not {q.dtype}, {k.dtype} and {v.dtype}")
        if sink is not None and sink.shape != q.shape[1:2]:
            raise ValueError(f"the sink has shape {list(sink.shape)}; it takes one score a query head, {q.shape[1]}")


@dataclass(frozen=True)
class AttentionCall:
    """The forward and the backward pass of one call, and the objects that they share.

    rank_program: the program of this rank.
    transport: carries the program's messages.
    exchanges: the exchanges of the program, from `prepare_exchanges`.
    statistics: counts the bytes of the messages.
    kernel: computes attention of pieces.
    scale: factor of the scores.
    calls: rows of the program's calls, on the device.
    """

    rank_program: RankProgram
    transport: Transport
    exchanges: dict[TransferGroup, Exchange]
    statistics: Statistics
    kernel: Kernel
    scale: float
    calls: list[CallRows]

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        latent: torch.Tensor | None,
        weight: torch.Tensor | None,
    ) -> tuple[torch.Tensor, list[torch.Tensor | None], Projection | None]:
        """The output, and what the backward pass needs. Arguments as of `SequenceAttention`."""
        projection = None
        if latent is not None and weight is not None:
            projection = Projection(weight, k.shape[1], k.shape[2], shared_size(k, v, weight, latent))
            latent = latent[:, None]
        to_attention, to_linear = self.rank_program.to_attention, self.rank_program.to_linear
        if to_attention is not None:
            q, k, v, *rest = self.change_layout(to_attention, q, k, v, *(() if latent is None else (latent,)))
            latent = rest[0] if rest else None
        program = self.rank_program.program
        kv = _workspace(program.rows if latent is None else program.tokens, k, v)
        travelling = None
        if latent is not None and projection is not None:
            travelling = _workspace(program.rows, latent, _shared(k, projection))
        out, logsumexp = _Forward(self, q, kv, travelling, projection).result(sink)
        saved = [kv] if travelling is None else [kv, travelling]
        if program.rows > program.tokens:  # the last one is sent, and holds received rows as well
            saved[-1] = saved[-1][: program.tokens].clone()
        result = out if to_linear is None else self.change_layout(to_linear, out)[0]
        return result, [q, out, logsumexp, sink, *saved], projection

    def backward(
        self, grad: torch.Tensor, saved: Sequence[torch.Tensor], projection: Projection | None, needs_sink: bool
    ) -> list[torch.Tensor | None]:
        """The gradients of the arguments of `forward`, whose other results are `saved` and `projection`."""
        to_attention, to_linear = self.rank_program.to_attention, self.rank_program.to_linear
        program = self.rank_program.program
        q, out, logsumexp, sink, *rest = saved
        grad = grad.contiguous() if to_attention is None else self.change_layout(to_attention, grad)[0]
        if program.rows > program.tokens:  # the last saved tensor is sent and needs rows for received tokens
            own_rows, rest[-1] = rest[-1], rest[-1].new_empty(program.rows, *rest[-1].shape[1:])
            rest[-1][: program.tokens] = own_rows
        kv, travelling = rest if len(rest) > 1 else (rest[0], None)
        backward = _Backward(self, grad, q, kv, travelling, projection, out, logsumexp)
        dq, dkv = backward.result()
        dkv = dkv[: program.tokens]
        dweight, dlatents = None, []
        if projection is not None:
            size, came = projection.weight.shape[1], backward.dsent[: program.tokens]
            _shared(dkv[..., : q.shape[2]], projection).add_(came[..., size:])
            dlatents = [came[..., :size].to(q.dtype)]
            dweight = backward.dweight.to(projection.weight.dtype)
        gradients = [dq.to(q.dtype), *_halves(dkv.to(q.dtype), q), *dlatents]
        dsink = sink_gradient(grad, out, logsumexp, sink) if needs_sink else None
        if to_linear is not None:
            gradients = list(self.change_layout(to_linear, *gradients))
        dlatent = gradients.pop().squeeze(1) if dlatents else None
        return [*gradients, dsink, dlatent, dweight]

    def start(
        self,
        transfer_group: TransferGroup,
        rows: torch.Tensor,
        dtype: torch.dtype,
        into: torch.Tensor | None = None,
    ) -> Pending:
        """Start the messages of a transfer group.

        transfer_group: the transfer group of the program.
        rows: [row, kv_heads, head_size + value_size], of which rows are sent: the workspace of keys and values, sums of
            their gradients, or the buffer of the group.
        dtype: of keys.
        into: [row, ...], which received rows are written or added to; `rows` by default.

        Gradients of gathered keys are sent in the type of keys: each rank that saw the keys rounds its gradients, and
        the sum of a node's ranks is rounded before it leaves the node. Sums on a ring keep their type inside a node and
        are rounded before they leave it.
        """
        exchange = self.exchanges[transfer_group]
        wide, near, far = exchange.sent
        number = rows.shape[1:].numel()
        self.statistics.intra_bytes += number * (wide * rows.itemsize + near * dtype.itemsize)
        self.statistics.inter_bytes += number * far * dtype.itemsize
        return self.transport.start(exchange, rows, rows if into is None else into, dtype)

    def chain(self, rows: torch.Tensor, dtype: torch.dtype) -> Chain:
        """The chain of the program's transfer groups of keys that ranks send on. rows, dtype: as in `start`."""
        groups = self.rank_program.program.chained
        stream = self.transport.stream(rows.device) if groups and rows.is_cuda else None
        starts = {group: partial(self.start, group, rows, dtype) for group in groups}
        return Chain(starts, self.transport.in_order, stream)

    @named("remap of tokens")
    def change_layout(self, messages: Messages, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Send `parts` to the other layout, in one message to each peer; returns them in that layout.

        messages: the program's `to_attention` or `to_linear`.
        parts: [token, heads, head_size] each; heads and sizes may differ.
        """
        exchange = self.exchanges[TO_ATTENTION if messages is self.rank_program.to_attention else TO_LINEAR]
        flat = len({part.shape[2] for part in parts}) > 1  # heads of several sizes: [token, numbers]
        joined = [part.flatten(1) for part in parts] if flat else parts
        before = (torch.cat(joined, 1) if len(parts) > 1 else parts[0]).contiguous()
        after = before.new_empty(exchange.tokens, *before.shape[1:])
        _, near, far = exchange.sent
        number = before.shape[1:].numel() * before.itemsize
        self.statistics.remap_intra_bytes += number * near
        self.statistics.remap_inter_bytes += number * far
        self.statistics.wait(self.transport.start(exchange, before, after, before.dtype))
        after_parts = after.split([part.shape[1] for part in joined], 1)
        return (
            tuple(one.unflatten(1, part.shape[1:]) for one, part in zip(after_parts, parts, strict=True))
            if flat
            else after_parts
        )


def prepare_exchanges(
    program: RankProgram, transport: Transport, rows: Mapping[TransferGroup, MessageRows]
) -> dict[TransferGroup, Exchange]:
    """The transfer groups of a rank's program, ready to start. rows: of its messages, on the device."""
    cluster, own = program.cluster, program.program
    changes = ((TO_ATTENTION, program.to_attention), (TO_LINEAR, program.to_linear))
    groups = own.messages | {group: messages for group, messages in changes if messages is not None}
    collective = transport.in_order or not own.chained
    exchanges = {}
    for group, messages in groups.items():
        together = program.remapped if group in (TO_ATTENTION, TO_LINEAR) else group.kind in ("gather", "return")
        exchanges[group] = transport.prepare(
            messages,
            rows[group],
            program.routes.get(group),
            lambda peer: cluster.same_node(peer, program.rank),
            tag=_tag(group),
            collective=collective and together,
            alone=not program.remapped and group in (TO_ATTENTION, TO_LINEAR),
            wide=group.kind == "ring return",
        )
    return exchanges


def _tag(transfer_group: TransferGroup) -> int:
    """A number for each transfer group, the same on all ranks."""
    kinds = get_args(Kind)
    return kinds.index(transfer_group.kind) + len(kinds) * (transfer_group.inter + 2 * transfer_group.round)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        *tensors, ctx.call = inputs
        out, saved, ctx.projection = ctx.call.forward(*tensors)
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*ctx.call.backward(grad, ctx.saved_tensors, ctx.projection, ctx.needs_input_grad[3]), None)


class _Pass:
    """The steps of one direction, run on this rank."""

    def __init__(
        self,
        call: AttentionCall,
        q: torch.Tensor,
        kv: torch.Tensor,
        latents: torch.Tensor | None,
        projection: Projection | None,
    ) -> None:
        self.call, self.q, self.kv, self.projection = call, q, kv, projection
        self.sent = kv if latents is None else latents  # the workspace whose rows are sent
        self.received = () if projection is None else is_received(call.rank_program.program)
        self.dtype = accumulation_dtype(q.dtype)
        self.moving: dict[TransferGroup, Pending] = {}
        self._taken: tuple[slice | torch.Tensor, tuple[torch.Tensor, ...]] | None = None

    def steps(self, steps: tuple[ProgramStep, ...]) -> None:
        call, chained = self.call, self.call.rank_program.program.chained
        chain = call.chain(self.sent, self.q.dtype) if chained else None
        for step in steps:
            if isinstance(step, Compute):
                self.compute(step)
            elif chain is not None and step.group in chained:
                if isinstance(step, Start):
                    chain.start(step.group)
                else:
                    call.statistics.timed_wait(partial(chain.wait, step.group), chain.on_cuda)
            elif isinstance(step, Start):
                self.moving[step.group] = call.start(step.group, *self.ends(step.group))
            else:
                call.statistics.wait(self.moving.pop(step.group))
        assert not self.moving, "every started transfer group is waited for"

    def ends(self, transfer_group: TransferGroup) -> tuple[torch.Tensor, torch.dtype, torch.Tensor]:
        """What a group sends rows of, their type, and what they are received into."""
        return self.sent, self.q.dtype, self.sent

    def projects(self, call: int) -> Projection | None:
        """The projection for the keys and values of a call; None for the rank's own keys."""
        return self.projection if self.projection is not None and self.received[call] else None

    def keys(self, call: int, rows: CallRows) -> tuple[torch.Tensor, torch.Tensor]:
        if (projection := self.projects(call)) is not None:
            return projection.project(rows_of(self.sent, rows.keys))
        return _halves(rows_of(self.kv, rows.keys), self.q)

    def query_rows(self, rows: CallRows) -> tuple[torch.Tensor, ...]:
        """The tensors of a call's queries. They are kept, since consecutive rounds mostly have the same queries."""
        if self._taken is None or self._taken[0] is not rows.queries:
            self._taken = rows.queries, self.take(rows.queries)
        return self._taken[1]

    def take(self, rows: slice | torch.Tensor) -> tuple[torch.Tensor, ...]:
        raise NotImplementedError

    def compute(self, step: Compute) -> None:
        raise NotImplementedError


class _Forward(_Pass):
    def result(self, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        q, program = self.q, self.call.rank_program.program
        self.merge = merging.choose_merge(q.device)
        self.out_dtype = self.dtype if program.merges else q.dtype  # type of the output until the last merge
        if not program.in_one_call:
            self.out = q.new_empty(*q.shape[:2], self.kv.shape[2] - q.shape[2], dtype=self.out_dtype)
            self.logsumexp = q.new_empty(q.shape[1], q.shape[0], dtype=self.dtype)
        self.steps(program.forward)
        if sink is not None:
            self.out, self.logsumexp = with_sink(self.out, self.logsumexp, sink)
        return self.out.to(q.dtype), self.logsumexp

    def take(self, rows: slice | torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (rows_of(self.q, rows),)

    def compute(self, step: Compute) -> None:
        if step.call is None:
            return
        rows = self.call.calls[step.call]
        (q,) = self.query_rows(rows)
        out, logsumexp = self.call.kernel.forward(q, *self.keys(step.call, rows), rows.pieces, self.call.scale)
        if rows.merges:
            self.merge(self.out, self.logsumexp, out, logsumexp, rows.queries)
        elif len(out) == len(self.q):
            self.out, self.logsumexp = out.to(self.out_dtype), logsumexp.contiguous()  # merged into in place
        else:
            self.out[rows.queries], self.logsumexp[:, rows.queries] = out.to(self.out_dtype), logsumexp


class _Backward(_Pass):
    def __init__(
        self,
        call: AttentionCall,
        grad: torch.Tensor,
        q: torch.Tensor,
        kv: torch.Tensor,
        latents: torch.Tensor | None,
        projection: Projection | None,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
    ) -> None:
        super().__init__(call, q, kv, latents, projection)
        self.grad, self.out, self.logsumexp = grad, out, logsumexp

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.in_one_call = self.call.rank_program.program.in_one_call
        if not self.in_one_call:
            self.dq = torch.zeros_like(self.q, dtype=self.dtype)
        self.table, self.buffers = self.call.rank_program.table, dict[TransferGroup, torch.Tensor]()
        self.dkv = self.dsent = self.sent.new_zeros(self.table.sums, *self.sent.shape[1:], dtype=self.dtype)
        if self.projection is not None:
            self.dkv = torch.zeros_like(self.kv, dtype=self.dtype)
            self.dweight = torch.zeros_like(self.projection.weight, dtype=self.dtype)
        self.add = merging.choose_add(self.q.device)
        self.steps(self.call.rank_program.program.backward)
        return self.dq, self.dkv

    def ends(self, transfer_group: TransferGroup) -> tuple[torch.Tensor, torch.dtype, torch.Tensor]:
        if transfer_group.kind == "return":
            buffer = self.buffer(transfer_group)
            if (summed := self.call.exchanges[transfer_group].rows.summed) is not None:
                self.add(buffer, summed.rows, (self.dsent,), summed.terms, stores=True)
            return self.buffers.pop(transfer_group), self.q.dtype, self.dsent
        rows = self.dsent if transfer_group.kind == "ring return" else self.sent
        return rows, self.q.dtype, rows

    def buffer(self, transfer_group: TransferGroup) -> torch.Tensor:
        """The gradients that a group sends. Calls and sums fill each row once."""
        if transfer_group not in self.buffers:
            sends = self.call.exchanges[transfer_group].rows.sends
            assert isinstance(sends, slice), "a buffer is sent as a whole"
            self.buffers[transfer_group] = self.sent.new_empty(sends.stop, *self.sent.shape[1:])
        return self.buffers[transfer_group]

    def take(self, rows: slice | torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.in_one_call:
            return self.grad, self.q, self.out, self.logsumexp
        if isinstance(rows, slice):
            return self.grad[rows], self.q[rows], self.out[rows], self.logsumexp[:, rows]
        return *(x.index_select(0, rows) for x in (self.grad, self.q, self.out)), self.logsumexp.index_select(1, rows)

    def compute(self, step: Compute) -> None:
        if step.clear is not None:
            cleared = slice(*(row - self.table.direct for row in step.clear))
            self.dsent[cleared] = 0
        if step.call is None:
            return
        rows = self.call.calls[step.call]
        grad, q, out, logsumexp = self.query_rows(rows)
        keys = self.keys(step.call, rows)
        dq, dk, dv = self.call.kernel.backward(grad, q, *keys, out, logsumexp, rows.pieces, self.call.scale)
        if self.in_one_call:
            self.dq = dq
        else:
            self.add(self.dq, rows.queries, (dq,))
        parts: tuple[torch.Tensor, ...] = (dk, dv)
        total = self.dkv
        if (projection := self.projects(step.call)) is not None:
            latents = rows_of(self.sent, rows.keys)
            dlatents, dweight = projection.gradients(latents, dk, dv, self.dtype)
            self.dweight += dweight
            parts, total = (dlatents,), self.dsent
        for group, into, terms in rows.gradients:
            if group is None:
                self.add(total, into, parts, terms)
            else:
                self.add(self.buffer(group), into, parts, terms, stores=True)


def _workspace(rows: int, *parts: torch.Tensor) -> torch.Tensor:
    """[row, heads, sizes of the parts together], of which the first rows hold the parts side by side."""
    tokens, heads = parts[0].shape[:2]
    workspace = parts[0].new_empty(rows, heads, sum(part.shape[2] for part in parts))
    torch.cat(parts, 2, out=workspace[:tokens])
    return workspace


def _shared(k: torch.Tensor, projection: Projection) -> torch.Tensor:
    """The part of keys that all heads share, taken from the first head, [row, 1, shared]."""
    return k[:, :1, projection.head_size - projection.shared :]


def _halves(kv: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of rows of the workspace. A key has the size of a query."""
    size = q.shape[2]
    keys, values = kv.split((size, kv.shape[2] - size), 2)
    return keys, values
