"""Exact attention over a batch of sequences whose tokens lie on many ranks, as a plan says.

q, k and v come in the layout of the linear layers and the output goes back in it; where attention has another layout
the moves are part of the same call, q, k and v in one message a peer. Between them runs the rank's program (`tasks`):
keys and values travel while the rank computes, partial results are merged in float32 (float64 stays float64) in a fixed
order, so a run repeats bit for bit, and no pair of tokens is computed that the mask hides, apart from tiles
(Zeppelin, arXiv 2509.21841, section 4).

Attention dropout would need masks that do not depend on the plan, a sliding window would make other plans the better
ones: both are refused.
"""

from typing import Any

import torch
import torch.distributed as dist

from balancing.cluster import Cluster
from balancing.sequences.engine.kernels import Kernel, accumulation_dtype, choose_kernel, merge
from balancing.sequences.engine.program import Compute, Stage, Start, Step
from balancing.sequences.engine.rank_program import Run, Statistics, Widths, find_way
from balancing.sequences.engine.routing import Routing, check_routing
from balancing.sequences.engine.transport import Pending, Transport
from balancing.sequences.sequence_plan import SequencePlan

__all__ = ["SequenceAttention"]


class SequenceAttention:
    """Causal attention of each sequence of `plan` to itself, forward and backward.

    rank: in the plan, which is this process's rank in `group`. group: of plan.ranks processes; they call attention the
    same number of times in the same order, and use the group for nothing else meanwhile. cluster: which ranks share a
    node; without it all do. routing: "off", "auto", or the number of proxies that share a transfer between nodes.
    kernel: what computes, by default the fastest there is. statistics: what has been moved.

    To make one is cheap: what follows from a plan is worked out at the first call and kept for the other layers.

    Raises ValueError for a group of another size than the plan, routing without a cluster of the plan's ranks, dropout,
    and a sliding window.
    """

    def __init__(
        self,
        plan: SequencePlan,
        *,
        rank: int,
        group: dist.ProcessGroup | None = None,
        cluster: Cluster | None = None,
        routing: Routing = "off",
        kernel: Kernel | None = None,
        dropout: float = 0.0,
        window: tuple[int, int] | None = None,
    ) -> None:
        if dropout:
            raise ValueError(f"attention dropout {dropout} is not supported with balanced sequences; use 0")
        if window is not None and tuple(window) != (-1, -1):
            raise ValueError(f"a sliding window of {window} is not supported with balanced sequences; use none")
        check_routing(routing)
        if routing != "off" and (cluster is None or cluster.world_size != plan.ranks):
            raise ValueError(f"routing {routing!r} needs the cluster of the plan's {plan.ranks} ranks, not {cluster}")
        self.transport = Transport(group)
        size = dist.get_world_size(group)
        if (size, self.transport.rank) != (plan.ranks, rank):
            raise ValueError(
                f"rank {rank} of a plan for {plan.ranks} ranks cannot run as rank {self.transport.rank} of a group "
                f"of {size}; plan for the group"
            )
        self.plan, self.rank, self.cluster, self.routing = plan, rank, cluster, routing
        self.statistics = Statistics()
        self._kernel = kernel

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float | None = None
    ) -> torch.Tensor:
        """q [tokens, heads, size], k and v [tokens, kv_heads, size] of this rank's tokens in the linear layout, in
        order -> output [tokens, heads, size]. softmax_scale: 1 / sqrt(size) by default.

        Raises ValueError for shapes or types that do not fit the plan or each other.
        """
        self._check(q, k, v)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        widths = Widths.of(q, k) if self.routing != "off" else None
        way = find_way(self.plan, self.rank, self.cluster, self.routing, widths)
        kernel = self._kernel or choose_kernel(q.device, q.dtype, q.shape[-1])
        return _Attention.apply(q, k, v, Run(way, self.transport, self.statistics, kernel, scale))

    def _check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        tokens = int(self.plan.linear_tokens[self.transport.rank])
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


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: Run) -> torch.Tensor:
        ctx.run = run
        to_attention, to_linear = run.way.to_attention, run.way.to_linear
        if to_attention is not None:
            q, k, v = run.moved(to_attention, q, k, v)
        program = run.way.program
        kv = q.new_empty(program.rows, 2, *k.shape[1:])
        own = kv[: program.tokens]
        own[:, 0], own[:, 1] = k, v
        out, logsumexp = _Forward(run, q, kv).result()
        ctx.save_for_backward(q, own.clone() if program.rows > program.tokens else kv, out, logsumexp)
        return out if to_linear is None else run.moved(to_linear, out)[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        run = ctx.run
        to_attention, to_linear = run.way.to_attention, run.way.to_linear
        program = run.way.program
        q, own, out, logsumexp = ctx.saved_tensors
        grad = grad.contiguous() if to_attention is None else run.moved(to_attention, grad)[0]
        kv = own
        if program.rows > program.tokens:
            kv = own.new_empty(program.rows, *own.shape[1:])
            kv[: program.tokens] = own
        dq, dkv = _Backward(run, grad, q, kv, out, logsumexp).result()
        gradients = (dq.to(q.dtype), *dkv[: program.tokens].to(q.dtype).unbind(1))
        return (*(gradients if to_linear is None else run.moved(to_linear, *gradients)), None)


class _Pass:
    """Runs the steps of one direction."""

    def __init__(self, run: Run, q: torch.Tensor, kv: torch.Tensor) -> None:
        self.run, self.q, self.kv = run, q, kv
        self.dtype = accumulation_dtype(q.dtype)
        self.moving: dict[Stage, Pending] = {}

    def steps(self, steps: tuple[Step, ...]) -> None:
        for step in steps:
            if isinstance(step, Compute):
                self.compute(step)
            elif isinstance(step, Start):
                self.moving[step.stage] = self.run.start(step.stage, self.rows_of(step.stage), self.q.dtype)
            else:
                self.run.statistics.wait(self.moving.pop(step.stage))
        assert not self.moving, "what is started is waited for"

    def rows_of(self, stage: Stage) -> torch.Tensor:
        return self.kv

    def compute(self, step: Compute) -> None:
        raise NotImplementedError


class _Forward(_Pass):
    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        merges = any(batch.merges for step in self._computes() for batch in step.batches)
        self.out = torch.empty_like(self.q, dtype=self.dtype if merges else self.q.dtype)
        self.logsumexp = self.q.new_empty(self.q.shape[1], self.q.shape[0], dtype=self.dtype)
        self.steps(self.run.way.program.forward)
        return self.out.to(self.q.dtype), self.logsumexp

    def _computes(self) -> list[Compute]:
        return [step for step in self.run.way.program.forward if isinstance(step, Compute)]

    def compute(self, step: Compute) -> None:
        for batch in step.batches:
            rows, keys = slice(*batch.queries), self.kv[slice(*batch.keys)]
            out, logsumexp = self.run.kernel.forward(self.q[rows], keys[:, 0], keys[:, 1], batch.pieces, self.run.scale)
            if batch.merges:
                out, logsumexp = merge(self.out[rows], self.logsumexp[:, rows], out, logsumexp)
            self.out[rows], self.logsumexp[:, rows] = out, logsumexp


class _Backward(_Pass):
    def __init__(
        self,
        run: Run,
        grad: torch.Tensor,
        q: torch.Tensor,
        kv: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
    ) -> None:
        super().__init__(run, q, kv)
        self.grad, self.out, self.logsumexp = grad, out, logsumexp

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.dq = torch.zeros_like(self.q, dtype=self.dtype)
        self.dkv = torch.zeros_like(self.kv, dtype=self.dtype)
        self.steps(self.run.way.program.backward)
        return self.dq, self.dkv

    def rows_of(self, stage: Stage) -> torch.Tensor:
        return self.dkv if stage.kind in ("return", "ring return") else self.kv

    def compute(self, step: Compute) -> None:
        if step.clear is not None:
            self.dkv[slice(*step.clear)] = 0
        for batch in step.batches:
            rows, keys = slice(*batch.queries), self.kv[slice(*batch.keys)]
            dq, dk, dv = self.run.kernel.backward(
                self.grad[rows],
                *(self.q[rows], keys[:, 0], keys[:, 1], self.out[rows], self.logsumexp[:, rows]),
                *(batch.pieces, self.run.scale),
            )
            self.dq[rows] += dq
            total = self.dkv[slice(*batch.keys)]
            total[:, 0] += dk
            total[:, 1] += dv
