"""Attention of peers that move keys and values by collectives (`benchmarks.sequences.peers`), on the emulated cluster.

Both are called like `balancing.sequences.SequenceAttention` and measure the time that a rank waits for transfers.

- `AllGather` gathers in two levels: first over the ranks with the same local rank in their nodes, so that a key enters
  a node once and all network cards carry the same amount; then over the ranks of a node. Gradients go back the same
  way: they are added up in the node, and the sum leaves it once. Links inside a node are not emulated: only the numbers
  that the kernel reads are sent there, since all others would cost CPU time that a GPU does not spend.
- `HeadsAndRing` exchanges tokens for heads inside a node and runs the engine's ring between nodes.
"""

import functools
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from balancing.cluster import Cluster
from balancing.kernels.base import Kernel, Pieces
from balancing.messages import start_message
from balancing.sequences import SequenceAttention, SequencePlan, Shard
from balancing.sequences.engine.compiler import compile_rank

__all__ = ["AllGather", "HeadsAndRing", "Waits"]


class Waits:
    """Seconds for which the rank has waited for collectives."""

    def __init__(self) -> None:
        self.exposed_seconds = 0.0

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.exposed_seconds += time.perf_counter() - self._begin


@functools.cache
def _groups(together: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The process groups of this rank: `together` neighbouring ranks, and those with the same place in each such
    group. All ranks must ask for them in the same order."""
    own, ranks = dist.get_rank(), dist.get_world_size()
    neighbours = [list(range(first, first + together)) for first in range(0, ranks, together)]
    across = [list(range(first, ranks, together)) for first in range(together)]
    made = [[(members, dist.new_group(members)) for members in kind] for kind in (neighbours, across)]
    near, far = (next(group for members, group in kind if own in members) for kind in made)
    return near, far


class AllGather:
    """Attention to keys and values that all ranks have gathered.

    plan: every sequence over all ranks; linear layers have the same layout.
    cluster: its nodes.
    kernel: reads the first number of a value alone.
    """

    def __init__(self, plan: SequencePlan, cluster: Cluster, kernel: Kernel) -> None:
        self.statistics, self.kernel = Waits(), kernel
        self._near, self._far = _groups(cluster.ranks_per_node)
        rank, self._most = dist.get_rank(), int(plan.tokens.max())
        self._tokens = int(plan.tokens[rank])
        row = [np.empty(length, dtype=np.int64) for length in plan.lengths]  # of each token, among what is gathered
        for holder in range(plan.ranks):
            node, place = divmod(holder, cluster.ranks_per_node)
            first = (place * cluster.nodes + node) * self._most
            for shard in plan.shards(holder):
                row[shard.sequence][shard.start : shard.stop] = np.arange(first, first + shard.tokens)
                first += shard.tokens
        own: tuple[Shard, ...] = plan.shards(rank)
        self.pieces = Pieces(tuple(s.tokens for s in own), tuple(s.stop for s in own), causal=True)
        seen = [row[shard.sequence][: shard.stop] for shard in own]
        self.seen = torch.from_numpy(np.concatenate(seen) if seen else np.empty(0, dtype=np.int64))

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return _Gathered.apply(q, k, v, self)

    def gather(self, kv: torch.Tensor) -> torch.Tensor:
        """First number of the value of each row of all ranks, by place in the node, then by node.

        kv: [tokens, ...], of this rank.
        """
        with self.statistics:
            rows = kv.new_zeros(self._most, *kv.shape[1:])
            rows[: len(kv)] = kv
            of_place = torch.cat(_exchange([rows] * self._far.size(), self._far))
            first = of_place[:, 1, 0, 0].contiguous()
            return torch.cat(_exchange([first] * self._near.size(), self._near))

    def scatter(self, gradients: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of the gradients of this rank's rows.

        gradients: of all rows, as `gather` has them. like: keys and values of this rank.
        """
        with self.statistics:
            of_place = torch.stack(_exchange(gradients.chunk(self._near.size()), self._near)).sum(0)
            whole = like.new_zeros(len(of_place), *like.shape[1:])
            whole[:, 1, 0, 0] = of_place
            return torch.stack(_exchange(whole.chunk(self._far.size()), self._far)).sum(0)[: self._tokens]


def _exchange(parts: Sequence[torch.Tensor], process_group: dist.ProcessGroup) -> list[torch.Tensor]:
    """What all ranks of the group send to this one, in their order; parts[i] goes to the i-th rank."""
    own, members = process_group.rank(), dist.get_process_group_ranks(process_group)
    came = [part if peer == own else torch.empty_like(part) for peer, part in enumerate(parts)]
    others = [peer for peer in range(len(members)) if peer != own]
    messages = [dist.P2POp(dist.irecv, came[peer], members[peer], process_group) for peer in others]
    messages += [dist.P2POp(dist.isend, parts[peer], members[peer], process_group) for peer in others]
    for work in [start_message(message) for message in messages]:
        work.wait()
    return came


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AllGather) -> torch.Tensor:
        ctx.kv, ctx.call = torch.stack((k, v), 1), call
        first = call.gather(ctx.kv)[call.seen, None, None]
        out, logsumexp = call.kernel.forward(q, first, first, call.pieces, 1.0)
        ctx.save_for_backward(q, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        call: AllGather = ctx.call
        q, out, logsumexp = ctx.saved_tensors
        gathered = call.gather(ctx.kv)
        first = gathered[call.seen, None, None]
        dq, _, dv = call.kernel.backward(grad, q, first, first, out, logsumexp, call.pieces, 1.0)
        gradients = torch.zeros_like(gathered).index_add_(0, call.seen, dv[:, 0, 0])
        dk, dv = call.scatter(gradients, ctx.kv).unbind(1)
        return dq, dk, dv, None


class HeadsAndRing:
    """Attention of neighbouring ranks that share their tokens and divide their heads, on a ring of such groups.

    plan: of the ring; its ranks are the groups, its shape is of all heads of a rank.
    together: ranks of a group.
    kernel: of a rank's share of the heads.
    """

    def __init__(self, plan: SequencePlan, together: int, kernel: Kernel) -> None:
        self._together = together
        self._near, far = _groups(together)
        group, place = divmod(dist.get_rank(), together)
        tokens = int(plan.tokens[group])
        self.ends = [tokens * part // together for part in range(together + 1)]
        self.rows = slice(*self.ends[place : place + 2])  # this rank's own, of those of its group
        self._sizes = [stop - start for start, stop in pairwise(self.ends)]
        program = compile_rank(plan, group, routing="off")
        self._ring = SequenceAttention(plan, program=program, process_group=far, kernel=kernel)
        self.statistics = _Both(Waits(), self._ring)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        widths = [part[0].numel() // self._together for part in (q, k, v)]
        packed = torch.cat([part.reshape(len(part), self._together, -1) for part in (q, k, v)], 2)
        size = min(q.shape[2], *widths[1:])  # a head of k may itself be divided
        parts = _Exchange.apply(packed, self, True).split(widths, 1)
        out = self._ring(*(part.reshape(len(part), -1, size) for part in parts))
        return _Exchange.apply(out.flatten(1), self, False).reshape(q.shape)

    def to_heads(self, rows: torch.Tensor) -> torch.Tensor:
        """[tokens of the group, numbers], from [own tokens, part, numbers]."""
        return self._all_to_all(rows.transpose(0, 1).flatten(0, 1), [rows.shape[0]] * self._together, self._sizes)

    def to_tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse of `to_heads`."""
        own = self.rows.stop - self.rows.start
        came = self._all_to_all(rows, self._sizes, [own] * self._together)
        return came.unflatten(0, (self._together, own)).transpose(0, 1)

    def _all_to_all(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        came = rows.new_empty(sum(received), rows.shape[1])
        with self.statistics.waits:
            dist.all_to_all_single(came, rows.contiguous(), list(received), list(sent), group=self._near)
        return came


class _Both:
    """Waits of the ring and of the exchange of heads."""

    def __init__(self, waits: Waits, ring: SequenceAttention) -> None:
        self.waits, self._ring = waits, ring

    @property
    def exposed_seconds(self) -> float:
        return self.waits.exposed_seconds + self._ring.statistics.exposed_seconds


class _Exchange(torch.autograd.Function):
    """Tokens for heads, or back; gradients take the way back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, call: HeadsAndRing, to_heads: bool) -> torch.Tensor:
        ctx.call, ctx.to_heads = call, to_heads
        return call.to_heads(rows) if to_heads else call.to_tokens(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        call: HeadsAndRing = ctx.call
        return (call.to_tokens(grad) if ctx.to_heads else call.to_heads(grad)), None, None
