"""Transformer layers over planned sequences in slow motion: the ranks' side of `benchmarks.sequences.emulated`.

The engine (`balancing.sequences.SequenceAttention`) runs as in training: all its transfers and its changes of layout
move real bytes over gloo. Two parts are replaced. Linear layers are timed waits by the rank's tokens. A kernel occupies
the device for as long as its whole tiles of query-key pairs would, 2.5 times that in the backward pass, and computes
attention whose scores are all zero, in the first number of a token alone: cheap, and known in advance. A query's output
is then the mean of the values it sees, so with values and gradients that count positions every step checks itself.

    python -m benchmarks.emulated ... -- -m benchmarks.sequences.emulated_rank JOB

JOB is a pickle of `Job`, which the launcher writes. Rank 0 prints one line of JSON for each step.
"""

import json
import pickle
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from balancing.kernels.base import Pieces
from balancing.sequences import SequenceAttention, SequencePlan, Shard
from balancing.sequences.cost import REST, hidden_seconds, linear_seconds
from balancing.sequences.engine.compiler import compile_rank
from balancing.sequences.engine.program import Compute
from balancing.sequences.sequence_plan import AttentionShape
from benchmarks.emulated.device import Device
from benchmarks.sequences.emulated_peers import AllGather, HeadsAndRing
from benchmarks.sequences.emulated_workload import METHODS, SHAPES, Case, Scale, host_seconds, tile_pairs

__all__ = ["Job", "ZeroScores"]

_TIMEOUT = timedelta(seconds=300)
_BACKWARD = 2.5  # of attention's compute over its forward


@dataclass(frozen=True)
class Job:
    """The work of the ranks.

    scale: of the emulation.
    layers: of a step.
    methods: in the order in which they take turns.
    cases: batches.
    """

    scale: Scale
    layers: int
    methods: tuple[str, ...]
    cases: tuple[Case, ...]


class ZeroScores:
    """A kernel (`balancing.kernels.base.Kernel`) for scores of zero, as slow as the modelled device.

    pair_seconds: emulated seconds of one query-key pair, forward.

    The attribute `host` is emulated seconds of the host for each call, forward and backward.
    """

    def __init__(self, device: Device, pair_seconds: float) -> None:
        self._device, self._pair_seconds = device, pair_seconds
        self.host = 0.0, 0.0

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pieces: Pieces, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._device.issue(self.host[0])
        begin = time.perf_counter()
        out, seen = torch.zeros_like(q), torch.empty(q.shape[0])
        first = v[:, 0, 0].float()
        row = key = 0
        for queries, keys in zip(pieces.queries, pieces.keys, strict=True):
            rows, block = slice(row, row + queries), first[key : key + keys]
            if pieces.causal:
                seen[rows] = torch.arange(keys - queries + 1, keys + 1)
                out[rows, 0, 0] = block.cumsum(0)[keys - queries :] / seen[rows]
            else:
                seen[rows] = keys
                out[rows, 0, 0] = block.mean()
            row, key = row + queries, key + keys
        self._occupy(begin, tile_pairs(pieces))
        return out, seen.log().expand(q.shape[1], -1)

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        pieces: Pieces,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self._device.issue(self.host[1])
        begin = time.perf_counter()
        dv = torch.zeros_like(v)
        share = grad[:, 0, 0].float() * (-logsumexp[0]).exp()
        row = key = 0
        for queries, keys in zip(pieces.queries, pieces.keys, strict=True):
            block, own = dv[key : key + keys, 0, 0], share[row : row + queries]
            if pieces.causal:
                total = own.sum()
                block[: keys - queries] = total
                block[keys - queries :] = total - own.cumsum(0) + own
            else:
                block[:] = own.sum()
            row, key = row + queries, key + keys
        self._occupy(begin, _BACKWARD * tile_pairs(pieces))
        return torch.zeros_like(q), torch.zeros_like(k), dv

    def _occupy(self, begin: float, pairs: float) -> None:
        self._device.run(pairs * self._pair_seconds - (time.perf_counter() - begin))


class _Part:
    """One plan of a step on this rank: its attention and its inputs.

    Token p of sequence s has the value (p + 1) x (1 + s % 3), and its output the gradient p + 1.
    """

    def __init__(self, plan: SequencePlan, method: str, shape: AttentionShape, scale: Scale, device: Device) -> None:
        how = METHODS[method]
        dtype, width = (torch.float32, scale.width // 2) if how.peer else (torch.bfloat16, scale.width)
        heads, kv_heads = scale.heads(shape)
        rank, cluster = dist.get_rank(), scale.cluster
        together = cluster.world_size // plan.ranks  # ranks that are one rank of the plan
        kernel = ZeroScores(device, hidden_seconds(1, cluster, shape) * scale.time / together)
        sizes = {"head_size": width, "value_size": width, "item_bytes": dtype.itemsize}
        narrow = replace(shape, heads=heads, kv_heads=kv_heads, **sizes)
        # With linear layers of the modelled time, by which the engine knows whether the host is late.
        longer = linear_seconds(1, scale.engine_cluster, narrow) / linear_seconds(1, cluster, shape)
        narrow = replace(narrow, hidden=round(shape.hidden / longer))
        plan = replace(plan, cluster=scale.engine_cluster, shape=narrow)
        self.attention: SequenceAttention | AllGather | HeadsAndRing
        rows = slice(None)
        if how.moves == "all-gather":
            self.attention = AllGather(plan, cluster, kernel)
        elif how.moves == "a2a+p2p":
            machine = replace(scale.engine_cluster, ranks_per_node=cluster.ranks_per_node // together)
            self.attention = HeadsAndRing(replace(plan, cluster=machine), together, kernel)
            rows = self.attention.rows
        else:
            program = compile_rank(plan, rank, routing="auto" if how.routed else "off")
            self.attention = SequenceAttention(plan, program=program, kernel=kernel)
            if scale.host and not how.peer:
                seconds = host_seconds(plan)
                steps = program.program.forward, program.program.backward
                calls = (sum(isinstance(step, Compute) and step.call is not None for step in of) for of in steps)
                kernel.host = tuple(of * scale.time / max(1, each) for of, each in zip(seconds, calls, strict=True))
        shards = plan.shards(rank // together, linear=True)
        position, self.last, self.factor = (of_tokens[rows] for of_tokens in _tokens(shards, plan.lengths))
        self.position = position
        value = ((position + 1) * self.factor)[:, None, None]
        self.q = torch.zeros(len(position), heads, width, dtype=dtype, requires_grad=True)
        self.k = torch.zeros(len(position), kv_heads, width, dtype=dtype, requires_grad=True)
        self.v = value.expand_as(self.k).to(dtype).requires_grad_()
        self.grad = (position + 1)[:, None, None].expand_as(self.q).to(dtype)
        self.linear = linear_seconds(len(position), cluster, shape) / shape.layers * scale.time
        self.host = 0.0 if how.peer else REST * cluster.host_seconds * scale.time  # of the other parts of a layer

    def check(self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """A query saw the values of its own sequence up to its own, and a key's gradient came from all that saw it."""
        for found, expected in (
            *((output, (self.position / 2 + 1) * self.factor) for output in outputs),
            *((gradient, self.last - self.position) for gradient in gradients),
        ):
            torch.testing.assert_close(found[:, 0, 0].float(), expected, rtol=0.03, atol=0.1)


def _tokens(shards: Sequence[Shard], lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each token: its position, the length of its sequence, and the factor of its value."""
    empty = torch.empty(0)
    position = [empty, *(torch.arange(shard.start, shard.stop).float() for shard in shards)]
    last = [empty, *(torch.full((shard.tokens,), float(lengths[shard.sequence])) for shard in shards)]
    factor = [empty, *(torch.full((shard.tokens,), 1.0 + shard.sequence % 3) for shard in shards)]
    return torch.cat(position), torch.cat(last), torch.cat(factor)


def _step(parts: Sequence[_Part], layers: int, device: Device) -> tuple[float, float]:
    """Forward and backward of all parts, one after another. Seconds, and those for which the rank that waited longest
    waited for transfers."""
    device.finish()
    results: list[tuple[_Part, list[torch.Tensor], list[torch.Tensor]]] = []
    dist.barrier()
    begin = time.perf_counter()
    device.begin()
    for part in parts:
        outputs, gradients = [], []
        for _ in range(layers):
            device.issue(part.host / 3)
            device.run(part.linear / 3)
            outputs.append(part.attention(part.q, part.k, part.v))
        for output in reversed(outputs):
            gradients.append(torch.autograd.grad(output, (part.q, part.k, part.v), part.grad)[2])
            device.issue(part.host * 2 / 3)
            device.run(part.linear * 2 / 3)
        device.finish()
        if len(parts) > 1:
            dist.barrier()
        results.append((part, [output.detach() for output in outputs], gradients))
    seconds = _span(begin, time.perf_counter())
    for part, outputs, gradients in results:
        part.check(outputs, gradients)
    waited = torch.tensor(sum(part.attention.statistics.exposed_seconds for part in parts), dtype=torch.float64)
    dist.all_reduce(waited, op=dist.ReduceOp.MAX)
    return seconds, float(waited)


def _span(begin: float, end: float) -> float:
    """From the first rank's begin to the last one's end. One clock serves all ranks of a machine."""
    span = torch.tensor([-begin, end], dtype=torch.float64)
    dist.all_reduce(span, op=dist.ReduceOp.MAX)
    return float(span.sum())


def _say(**what: Any) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(what), flush=True)


def _warm_up(scale: Scale, device: Device) -> None:
    """A short step of one sequence on all ranks, so that none of the methods is the first to connect and to compute."""
    ranks = dist.get_world_size()
    shards = tuple(Shard(0, 8 * rank, 8 * rank + 8, rank) for rank in range(ranks))
    for exchange in ("ring", "gather"):
        plan = SequencePlan((8 * ranks,), ranks, exchange, shards, shards, (exchange,))
        _step([_Part(plan, "chunks", SHAPES["MHA"], scale, device)], 1, device)


def _run_case(number: int, job: Job, device: Device) -> None:
    case = job.cases[number]
    for name in job.methods:
        if name in case.parts:
            parts = [_Part(plan, name, SHAPES[case.model], job.scale, device) for plan in case.parts[name]]
            seconds, exposed = _step(parts, job.layers, device)
            _say(case=number, method=name, seconds=seconds, exposed=exposed)


def main() -> None:
    dist.init_process_group("gloo", timeout=_TIMEOUT)

    job: Job = pickle.loads(Path(sys.argv[1]).read_bytes())
    torch.set_num_threads(1)
    device = Device(shortest=0.001)
    _warm_up(job.scale, device)
    for number in range(len(job.cases)):
        _run_case(number, job, device)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
