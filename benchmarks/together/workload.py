"""A workload that is uneven in three ways, and the same work spread evenly.

A model with the proportions of Mixtral 8x7B (8 experts, two for each token, 16 of its layers on two stages) continues
its training on long documents, with its first layers frozen:

- Layers: frozen layers have no backward pass, so the first stage is light.
- Sequences: a micro-batch has 131,072 tokens of ProLong's mix of long and short documents
  (`balancing_tools.whatif.lengths`).
- Experts: routing as recorded while a small model trained (`benchmarks/traces/README.md`), another iteration in each
  step after one that warms up.

A token of this workload stands for 32. Each unevenness can be forced even at the same total of work, so that the limit
is a run like the others.
"""

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from balancing.kernels.base import Pieces
from balancing_tools.whatif.lengths import draw_batch
from benchmarks.emulated.device import Device
from benchmarks.settings import settings

__all__ = ["FLAGS", "FROZEN", "LAYERS", "RANKS", "VARIANTS", "Pace", "Variant", "lengths_of", "pairs_of", "routed"]

LAYERS, STAGES, CONTEXT, EXPERT_RANKS, RANKS = 16, 2, 4, 4, 8
FROZEN = 6  # of the first layers: with 10 and 6 layers stages are even
TOKENS, EXPERTS, TOP_K = 4096, 8, 2  # of a micro-batch over context-parallel ranks; of a layer; of a token
# Parts of a layer's forward pass by Mixtral's shapes, per token in MFLOP: attention over documents as long as a token
# of ProLong's mix sees them, 39,000 tokens in the mean; two experts; projections.
_ATTENTION, _EXPERTS, _LINEAR = 0.29, 0.64, 0.07
# Of a layer that trains, over its forward pass: backward takes 2.5 times as long for attention, else twice.
_PASSES = 1 + 2.5 * _ATTENTION + 2 * (_EXPERTS + _LINEAR)
_STANDS_FOR = 32  # tokens
_EVEN_LENGTHS = (1024,) * 4
_TRACE = Path(__file__).parents[1] / "traces" / "routing.npz"

FLAGS = (
    f"--device cpu --num-layers {LAYERS} --hidden-size 32 --ffn-hidden-size 32 --num-attention-heads 1 "
    f"--seq-length {TOKENS} --max-position-embeddings {TOKENS} --position-embedding-type rope --normalization RMSNorm "
    "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    f"--num-experts {EXPERTS} --moe-router-topk {TOP_K} --moe-ffn-hidden-size 32 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type none --micro-batch-size 1 --lr 1e-4 --clip-grad 0 --num-workers 0 "
    "--eval-interval 100000 --eval-iters 0 --log-interval 1 --distributed-timeout-minutes 5 --train-iters 1000 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --dataloader-inter-document-masking "
    f"--pipeline-model-parallel-size {STAGES} --context-parallel-size {CONTEXT} "
    f"--expert-model-parallel-size {EXPERT_RANKS} --balance-sequences"
).split()


@dataclass(frozen=True)
class Variant:
    """One run: which balancers are on, and whether the work is even already.

    name: as shown.
    layers, sequences, experts: whether the balancer is on.
    even: whether layers, documents and routing are even.
    """

    name: str
    layers: bool = False
    sequences: bool = False
    experts: bool = False
    even: bool = False

    @property
    def hybrid(self) -> bool:
        """Whether documents are spread by Megatron-LM's scheduler of packed documents: without balanced sequences."""
        return not (self.sequences or self.even)

    @property
    def flags(self) -> list[str]:
        """Balancers of pretrain_gpt.py, and what is frozen."""
        flags = settings("sequences", planner="chunks").split()
        flags += [] if self.even else ["--freeze-layers", str(FROZEN)]
        flags += ["--balance-layers", "--layer-balance-interval", "1"] if self.layers else []
        return flags + (["--balance-experts"] if self.experts else [])


VARIANTS = {
    each.name: each
    for each in (
        Variant("none"),
        Variant("layers", layers=True),
        Variant("sequences", sequences=True),
        Variant("experts", experts=True),
        Variant("layers + sequences", layers=True, sequences=True),
        Variant("layers + experts", layers=True, experts=True),
        Variant("sequences + experts", sequences=True, experts=True),
        Variant("all", layers=True, sequences=True, experts=True),
        Variant("limit", even=True),
    )
}


@cache
def lengths_of(even: bool) -> tuple[int, ...]:
    """Tokens of each document of a micro-batch."""
    if even:
        return _EVEN_LENGTHS
    drawn = draw_batch("mix", TOKENS * _STANDS_FOR, np.random.default_rng(4))
    lengths = [max(1, round(length / _STANDS_FOR)) for length in drawn]
    second = int(
        np.argsort(lengths)[-2]
    )  # the longest one stays half of the tokens, for which two of four ranks suffice
    lengths[second] += TOKENS - sum(lengths)
    return tuple(lengths)


def pairs_of(pieces: Pieces) -> float:
    """Query-key pairs of attention. A token stands for many, so tiles are too small to count."""
    pairs = 0.0
    for queries, keys in zip(pieces.queries, pieces.keys, strict=True):
        pairs += queries * keys - (queries * queries / 2 if pieces.causal else 0)
    return pairs


@dataclass(frozen=True)
class Pace:
    """How long computation takes.

    seconds: of a rank's mean share of one layer and micro-batch, forward.
    even: whether layers and documents are even, which changes the seconds of a layer and of a pair, not their totals.
    hybrid: whether Megatron-LM's scheduler spreads the documents.
    """

    seconds: float
    even: bool
    hybrid: bool = False

    @property
    def layer(self) -> float:
        """Seconds of a layer's forward pass. Where work is even no layer is frozen, and each is as much shorter."""
        passes = FROZEN + (LAYERS - FROZEN) * _PASSES
        return self.seconds * (passes / (LAYERS * _PASSES) if self.even else 1)

    @property
    def pair(self) -> float:
        """Seconds of a query-key pair."""
        return self.layer * _ATTENTION * CONTEXT / sum(length**2 / 2 for length in lengths_of(self.even))

    @property
    def token(self) -> float:
        """Seconds of an expert for a token."""
        return self.layer * _EXPERTS * CONTEXT / (TOKENS * TOP_K)

    @property
    def linear(self) -> float:
        """Seconds of the linear parts of a layer."""
        return self.layer * _LINEAR

    def step(self, micro_batches: int) -> float:
        """Seconds of a step of even work: passes of all stages, of which the first and last micro-batch are not
        overlapped."""
        return _PASSES * Pace(self.seconds, even=True).layer * LAYERS / STAGES * (micro_batches + STAGES - 1)


class Work(Device):
    """A device on which the host's own work counts as part of what it stands for.

    So does the time in which this thread could have run and had no core: a node of the emulated cluster has a core a
    rank, this machine has not.
    """

    def __init__(self) -> None:
        super().__init__(shortest=0.001)
        self.scale = 1.0
        self._scheduled = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._host = 0.0

    def begin(self, scale: float) -> None:
        """Begin a step, in which all takes `scale` of its seconds. What the last one was late is forgotten."""
        self.scale, self.late, self._host = scale, 0.0, self._host_seconds()

    def run(self, seconds: float) -> None:
        super().run(self.scale * seconds - (self._host_seconds() - self._host))
        self._host = self._host_seconds()

    def _host_seconds(self) -> float:
        """Seconds that this thread ran or waited for a core."""
        ran, waited = os.pread(self._scheduled, 100, 0).split()[:2]
        return (int(ran) + int(waited)) / 1e9


@cache
def _recorded() -> np.ndarray:
    """float [record, source, layer, expert], tokens that sources of a recorded run sent to experts."""
    with np.load(_TRACE) as trace:
        return trace["counts"].astype(float)


def routed(rank: int, layer: int, tokens: int, even: bool, record: int = 0) -> np.ndarray:
    """int64 [expert], the assignments of a rank's tokens in a layer. rank: of the expert-parallel group. record: the
    recorded iteration."""
    if even:
        return np.full(EXPERTS, tokens * TOP_K // EXPERTS)
    recorded = _recorded()
    share = recorded[record % len(recorded), rank % recorded.shape[1], layer % recorded.shape[2]]
    share = share / share.sum()
    counts = np.minimum((share * tokens * TOP_K).astype(np.int64), tokens)
    while missing := tokens * TOP_K - int(counts.sum()):
        counts[np.argsort(-np.where(counts < tokens, share, -1))[:missing]] += 1
    return counts
