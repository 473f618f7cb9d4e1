"""Exact attention over a batch of sequences whose tokens lie on many ranks, as a plan says.

q, k and v come in the layout of the linear layers and the output goes back in it; where attention has another layout
the moves are part of the same call, q, k and v in one message a peer. Between them runs the rank's program (`tasks`):
keys and values travel while the rank computes, partial results are merged in float32 (float64 stays float64) in a fixed
order, so a run repeats bit for bit, and no pair of tokens is computed that the mask hides, apart from tiles
(Zeppelin, arXiv 2509.21841, section 4).

Attention dropout would need masks that do not depend on the plan, a sliding window would make other plans the better
ones: both are refused.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from balancing.cluster import Cluster
from balancing.sequences.kernels import Kernel, accumulation_dtype, choose_kernel, merge
from balancing.sequences.layout import SequencePlan
from balancing.sequences.remap import moved, moves
from balancing.sequences.tasks import Compute, Exchange, Program, Stage, Start, Step, make_program
from balancing.sequences.transport import Pending, Transport

__all__ = ["SequenceAttention", "Statistics"]

_PROGRAMS = 256  # kept: the micro-batches of a step, with their backward passes still to come


@dataclass
class Statistics:
    """What attention moved since it was made, on this rank: bytes sent to ranks of the same node and of other nodes,
    for keys and values and for changes of layout, and seconds in which the rank waited for transfers."""

    intra_bytes: int = 0
    inter_bytes: int = 0
    remap_intra_bytes: int = 0
    remap_inter_bytes: int = 0
    exposed_seconds: float = 0.0


class SequenceAttention:
    """Causal attention of each sequence of `plan` to itself, forward and backward.

    rank: in the plan, which is this process's rank in `group`. group: of plan.ranks processes; they call attention the
    same number of times in the same order, and use the group for nothing else meanwhile. cluster: which ranks share a
    node; without it all do. To make one is cheap: the program of a plan is kept from one micro-batch to the next.

    Raises ValueError for a group of another size than the plan, dropout, and a sliding window.
    """

    def __init__(
        self,
        plan: SequencePlan,
        *,
        rank: int,
        group: dist.ProcessGroup | None = None,
        cluster: Cluster | None = None,
        routing: str | int = "off",
        dropout: float = 0.0,
        window: tuple[int, int] | None = None,
    ) -> None:
        if dropout:
            raise ValueError(f"attention dropout {dropout} is not supported with balanced sequences; use 0")
        if window is not None and tuple(window) != (-1, -1):
            raise ValueError(f"a sliding window of {window} is not supported with balanced sequences; use none")
        if routing != "off":
            raise ValueError(f"routing {routing!r} is not known; use 'off'")
        self._transport = Transport(group)
        size = dist.get_world_size(group)
        if (size, self._transport.rank) != (plan.ranks, rank):
            raise ValueError(
                f"rank {rank} of a plan for {plan.ranks} ranks cannot run as rank {self._transport.rank} of a group "
                f"of {size}; plan for the group"
            )
        self.plan, self.cluster = plan, cluster
        self.statistics = Statistics()
        self._way = _way(plan, rank, cluster)

    @property
    def program(self) -> Program:
        """What this rank does."""
        return self._way.program

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float | None = None
    ) -> torch.Tensor:
        """q [tokens, heads, size], k and v [tokens, kv_heads, size] of this rank's tokens in the linear layout, in
        order -> output [tokens, heads, size]. softmax_scale: 1 / sqrt(size) by default.

        Raises ValueError for shapes or types that do not fit the plan or each other.
        """
        self._check(q, k, v)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        return _Attention.apply(q, k, v, self, scale)

    def _check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        tokens = int(self.plan.linear_tokens[self._transport.rank])
        if q.shape[0] != tokens:
            raise ValueError(f"q has {q.shape[0]} tokens; the plan's linear layout has {tokens} on this rank")
        if k.shape != v.shape or k.shape[::2] != q.shape[::2]:
            raise ValueError(
                f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} must agree in tokens and head size; "
                "attention with other sizes for values, as multi-latent attention has, is not supported"
            )
        if q.shape[1] % k.shape[1]:
            raise ValueError(f"{q.shape[1]} query heads are no multiple of {k.shape[1]} key-value heads")
        if not q.dtype == k.dtype == v.dtype:
            raise ValueError(f"q, k and v must be of one type, not {q.dtype}, {k.dtype} and {v.dtype}")

    # What autograd calls.

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, ...]:
        """Output in the linear layout, then what the backward pass needs in attention's: q, kv, output, logsumexp."""
        heads, size = q.shape[1:]
        to_attention, to_linear = self._way.to_attention, self._way.to_linear
        if to_attention is not None:
            assert to_linear is not None
            together = self._moved(torch.cat((q, k, v), 1), to_attention)
            q, k, v = together.split((heads, k.shape[1], k.shape[1]), 1)
        kv = q.new_empty(self.program.rows, 2, k.shape[1], size)
        tokens = self.program.tokens
        kv[:tokens, 0], kv[:tokens, 1] = k, v
        out, logsumexp = _Forward(self, q, kv, scale).run()
        kept = (q, kv[:tokens].clone() if self.program.rows > tokens else kv, out, logsumexp)
        return (out if to_linear is None else self._moved(out, to_linear), *kept)

    def backward(self, grad: torch.Tensor, saved: tuple[torch.Tensor, ...], scale: float) -> tuple[torch.Tensor, ...]:
        """Gradients of q, k and v in the linear layout."""
        to_attention, to_linear = self._way.to_attention, self._way.to_linear
        q, own_kv, out, logsumexp = saved
        if to_attention is not None:
            grad = self._moved(grad, to_attention)
        kv = own_kv
        if self.program.rows > self.program.tokens:
            kv = own_kv.new_empty(self.program.rows, *own_kv.shape[1:])
            kv[: self.program.tokens] = own_kv
        dq, dkv = _Backward(self, grad, q, kv, out, logsumexp, scale).run()
        dk, dv = dkv[: self.program.tokens].to(q.dtype).unbind(1)
        dq = dq.to(q.dtype)
        if to_linear is not None:
            together = self._moved(torch.cat((dq, dk, dv), 1), to_linear)
            dq, dk, dv = together.split((dq.shape[1], dk.shape[1], dk.shape[1]), 1)
        return dq, dk, dv

    def _moved(self, x: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        self.count(exchange, x, remap=True)
        return self.exposed(lambda: moved(x, exchange, self._transport))

    def start(self, stage: Stage, rows: torch.Tensor) -> Pending:
        """Start the transfers of a stage between the workspaces of the ranks."""
        exchange = self.program.exchanges[stage]
        self.count(exchange, rows)
        return self._transport.start(exchange, rows, rows, tag=self._way.tags[stage])

    def count(self, exchange: Exchange, rows: torch.Tensor, *, remap: bool = False) -> None:
        """Add what an exchange sends to the statistics."""
        width = rows[0].numel() * rows.element_size() if len(rows) else 0
        for message in exchange.sends:
            if message.peer == self._transport.rank:
                continue
            inter = self.cluster is not None and not self.cluster.same_node(message.peer, self._transport.rank)
            name = ("remap_" if remap else "") + ("inter_bytes" if inter else "intra_bytes")
            setattr(self.statistics, name, getattr(self.statistics, name) + message.tokens * width)

    def exposed(self, wait: Callable[[], Any]) -> Any:
        """Do something that waits for transfers, and count the time."""
        begin = time.perf_counter()
        result = wait()
        self.statistics.exposed_seconds += time.perf_counter() - begin
        return result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, attention: SequenceAttention, scale: float) -> torch.Tensor:
        out, *kept = attention.forward(q, k, v, scale)
        ctx.attention, ctx.scale = attention, scale
        ctx.save_for_backward(*kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*ctx.attention.backward(grad.contiguous(), ctx.saved_tensors, ctx.scale), None, None)


class _Pass:
    """Runs the steps of one direction."""

    def __init__(self, attention: SequenceAttention, q: torch.Tensor, kv: torch.Tensor, scale: float) -> None:
        self.attention, self.q, self.kv, self.scale = attention, q, kv, scale
        self.kernel: Kernel = choose_kernel(q.device, q.dtype, q.shape[-1])
        self.dtype = accumulation_dtype(q.dtype)
        self.moving: dict[Stage, Pending] = {}

    def steps(self, steps: tuple[Step, ...]) -> None:
        for step in steps:
            if isinstance(step, Compute):
                self.compute(step)
            elif isinstance(step, Start):
                self.moving[step.stage] = self.attention.start(step.stage, self.rows_of(step.stage))
            else:
                self.attention.exposed(self.moving.pop(step.stage).wait)
        assert not self.moving, "what is started is waited for"

    def rows_of(self, stage: Stage) -> torch.Tensor:
        return self.kv

    def compute(self, step: Compute) -> None:
        raise NotImplementedError


class _Forward(_Pass):
    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        merges = any(batch.merges for step in self._computes() for batch in step.batches)
        self.out = torch.empty_like(self.q, dtype=self.dtype if merges else self.q.dtype)
        self.logsumexp = self.q.new_empty(self.q.shape[1], self.q.shape[0], dtype=self.dtype)
        self.steps(self.attention.program.forward)
        return self.out.to(self.q.dtype), self.logsumexp

    def _computes(self) -> list[Compute]:
        return [step for step in self.attention.program.forward if isinstance(step, Compute)]

    def compute(self, step: Compute) -> None:
        for batch in step.batches:
            rows, keys = slice(*batch.queries), self.kv[slice(*batch.keys)]
            out, logsumexp = self.kernel.forward(self.q[rows], keys[:, 0], keys[:, 1], batch.pieces, self.scale)
            if batch.merges:
                out, logsumexp = merge(self.out[rows], self.logsumexp[:, rows], out, logsumexp)
            self.out[rows], self.logsumexp[:, rows] = out, logsumexp


class _Backward(_Pass):
    def __init__(
        self,
        attention: SequenceAttention,
        grad: torch.Tensor,
        q: torch.Tensor,
        kv: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        scale: float,
    ) -> None:
        super().__init__(attention, q, kv, scale)
        self.grad, self.out, self.logsumexp = grad, out, logsumexp

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.dq = torch.zeros_like(self.q, dtype=self.dtype)
        self.dkv = torch.zeros_like(self.kv, dtype=self.dtype)
        self.steps(self.attention.program.backward)
        return self.dq, self.dkv

    def rows_of(self, stage: Stage) -> torch.Tensor:
        return self.dkv if stage.kind in ("return", "ring return") else self.kv

    def compute(self, step: Compute) -> None:
        if step.clear is not None:
            self.dkv[slice(*step.clear)] = 0
        for batch in step.batches:
            rows, keys = slice(*batch.queries), self.kv[slice(*batch.keys)]
            dq, dk, dv = self.kernel.backward(
                self.grad[rows],
                *(self.q[rows], keys[:, 0], keys[:, 1], self.out[rows], self.logsumexp[:, rows]),
                *(batch.pieces, self.scale),
            )
            self.dq[rows] += dq
            total = self.dkv[slice(*batch.keys)]
            total[:, 0] += dk
            total[:, 1] += dv


@dataclass(frozen=True)
class _Way:
    """All that follows from a plan for one rank. The two moves are None where attention keeps the linear layout."""

    program: Program
    to_attention: Exchange | None
    to_linear: Exchange | None
    tags: dict[Stage, int]


_ways: OrderedDict[tuple[str, int, Cluster | None], _Way] = OrderedDict()


def _way(plan: SequencePlan, rank: int, cluster: Cluster | None) -> _Way:
    key = (plan.digest, rank, cluster)
    if key not in _ways:
        program = make_program(plan, rank, cluster)
        own = plan.shards(rank, linear=True)
        to_attention = to_linear = None
        if plan.remapped or own != program.held:  # the order of tokens counts, too
            to_attention = moves(plan.linear, plan.attention, own, program.held)
            to_linear = Exchange(to_attention.receives, to_attention.sends)
        _ways[key] = _Way(program, to_attention, to_linear, _tags(program))
        if len(_ways) > _PROGRAMS:
            _ways.popitem(last=False)
    _ways.move_to_end(key)
    return _ways[key]


def _tags(program: Program) -> dict[Stage, int]:
    """The same number on all ranks for the same stage, from 1; 0 is the change of layout."""
    kinds = ("gather", "ring", "return", "ring return")
    return {stage: 1 + kinds.index(stage.kind) + 4 * (stage.inter + 2 * stage.round) for stage in program.exchanges}
