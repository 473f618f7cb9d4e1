"""One layer of attention over planned documents on one rank: the engine as in training, with kernels that return at
once and messages that torch's fake process group does not send.

Documents are those of the acceptance on a GPU, 9k tokens a rank. They are planned as `--cluster` does, with rates that
were measured on one GPU: what the host costs there decides how many rounds there are. Heads have no elements, so memory
is allocated for every result and nothing is copied, and the processor's time is that of Python and of torch's dispatch.
What a launch costs CUDA's driver or Triton is not in it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from balancing.cluster import Cluster
from balancing.kernels import merging
from balancing.sequences import (
    AttentionShape,
    SequenceAttention,
    SequencePlan,
    compile_rank,
    plan_sequences,
)
from balancing.sequences.engine.compiler import RankProgram
from balancing.sequences.engine.program import Wait
from balancing.sequences.sequence_plan import LatentShape, in_window
from benchmarks.host.counting import Counted, Measured, fake_ranks, measure
from benchmarks.replaced import replace_name

__all__ = ["CASES", "Case", "Kernel", "busiest", "kernels_that_return", "measure_attention", "packed_documents"]

_PRESET = "h200-8x400g"
_MOST_RANKS = 8  # of a plan, evenly spaced, that are looked at
GROUPED = AttentionShape(4096, 32, 8, 32, 14336)
SHAPES = {
    "grouped": GROUPED,
    "multi-head": replace(GROUPED, kv_heads=32),
    "window 1024": replace(GROUPED, window=1024, windowed_layers=32),
    "latents": replace(GROUPED, kv_heads=32, head_size=192, value_size=128, latent=LatentShape(512, 64)),
}


@dataclass(frozen=True)
class Case:
    """One cell. goal: additions of 8 x 8 that a layer may take the host, forward and backward; None for no goal.

    launches, messages: goals as well.
    """

    method: str
    ranks: int
    shape: str = "grouped"
    goal: int | None = None
    launches: int | None = None
    messages: int | None = None

    @property
    def nodes(self) -> int:
        """Of eight ranks each, if there are more."""
        return max(1, self.ranks // 8)


CASES = (
    Case("chunks", 2),
    Case("chunks", 4),
    Case("chunks", 8, goal=300, launches=30, messages=6),
    Case("chunks", 16, goal=450),
    Case("chunks", 64, goal=700),
    *(Case("chunks", ranks, shape) for shape in list(SHAPES)[1:] for ranks in (8, 16)),
    *(Case(method, ranks) for method in ("gather", "zones", "ring") for ranks in (8, 16)),
)


def packed_documents(ranks: int) -> list[int]:
    """Lengths of documents: on eight ranks one of 32k tokens, two of 8k and of 4k, and eight of 1k; on others in
    proportion."""
    return [length * ranks // 8 for length in (32768, 8192, 8192, 4096, 4096, *(1024,) * 8)]


class Kernel:
    """A kernel of attention (`balancing.kernels.base.Kernel`) that computes nothing."""

    def __init__(self, counted: Counted) -> None:
        self._counted = counted

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pieces: Any, scale: float) -> Any:
        self._counted.launches += 1
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
        return out, q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)

    def backward(self, grad: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *unused: Any) -> Any:
        self._counted.launches += 1
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@contextmanager
def kernels_that_return(counted: Counted) -> Iterator[None]:
    """Merges and sums of rows are one launch each, as on a GPU, and compute nothing."""

    def launch(*unused: Any, **also_unused: Any) -> None:
        counted.launches += 1

    originals = {name: getattr(merging, name) for name in ("choose_merge", "choose_add")}
    for name in originals:
        replace_name(merging, name, lambda device: launch)
    try:
        yield
    finally:
        for name, original in originals.items():
            replace_name(merging, name, original)


def busiest(plan: SequencePlan) -> RankProgram:
    """The program with most steps, of up to eight ranks."""
    ranks = range(0, plan.ranks, max(1, plan.ranks // _MOST_RANKS))
    programs = [compile_rank(plan, rank) for rank in ranks]
    return max(programs, key=lambda one: len(one.program.forward) + len(one.program.backward))


def rounds_of(program: RankProgram) -> int:
    """Transfers that bring the rank keys and values, forward."""
    one = program.program
    return sum(isinstance(step, Wait) and bool(one.messages[step.group].receives) for step in one.forward)


def measure_attention(case: Case) -> tuple[Measured, int]:
    """A layer of a case, forward and backward, and the rounds of keys."""
    shape = SHAPES[case.shape]
    cluster = Cluster.preset(_PRESET).relabel(case.nodes, case.ranks // case.nodes)
    plan = plan_sequences(packed_documents(case.ranks), cluster, shape=shape, method=case.method)
    if shape.window is not None:
        plan = in_window(plan, shape.window)
    program = busiest(plan)
    counted = Counted()
    with fake_ranks(program.rank, plan.ranks), kernels_that_return(counted):
        engine = SequenceAttention(plan, program=program, kernel=Kernel(counted))
        layer = _layer(engine, int(plan.linear_tokens[program.rank]), latent=shape.latent is not None)
        return measure(layer, counted), rounds_of(program)


def _layer(engine: SequenceAttention, tokens: int, *, latent: bool) -> Any:
    """Forward and backward of a layer, without elements."""
    size = (tokens, 1, 0)
    leaves = [torch.empty(size, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    more = {}
    if latent:
        more = {
            "latent": torch.empty(tokens, 0, dtype=torch.bfloat16, requires_grad=True),
            "projection": torch.empty(0, 0, dtype=torch.bfloat16, requires_grad=True),
        }
    inputs, grad = [*leaves, *more.values()], torch.empty(size, dtype=torch.bfloat16)

    def layer() -> None:
        torch.autograd.grad(engine(*leaves, softmax_scale=1.0, **more), inputs, grad)

    return layer
