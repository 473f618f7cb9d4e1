"""A workload that is uneven in three ways, and the same work spread evenly.

Eight layers on two stages, of which the first two take more time in their linear parts; every micro-batch holds
documents of very different length; and routers prefer some experts, others in each layer. Each can be forced even at
the same total of work, so that the limit of each balancer alone and of all together is a run like the others.
"""

import os
from dataclasses import dataclass

import numpy as np

from balancing.sequences.engine.kernels import Pieces
from benchmarks.emulated.device import Device
from benchmarks.settings import settings

__all__ = ["FLAGS", "RANKS", "VARIANTS", "Pace", "Variant", "lengths_of", "pairs_of", "routed"]

LAYERS, STAGES, CONTEXT, EXPERT_RANKS, RANKS = 8, 2, 4, 8, 16
TOKENS, EXPERTS, TOP_K = 4096, 16, 2  # of a micro-batch over context-parallel ranks; of a layer; of a token
_LENGTHS = (1920, 896, 512, 384, 128, 128, 128)
_EVEN_LENGTHS = (1024,) * 4
_HEAVY = 2  # layers in front, whose linear parts take so long that two of them cost as much as the six others
_SKEW = 0.8  # exponent of Zipf's law over experts

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
        """Balancers of pretrain_gpt.py."""
        flags = settings("sequences", planner="chunks").split()
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


def lengths_of(even: bool) -> tuple[int, ...]:
    """Tokens of each document of a micro-batch."""
    return _EVEN_LENGTHS if even else _LENGTHS


def pairs_of(pieces: Pieces) -> float:
    """Query-key pairs of attention. A token stands for many, so tiles are too small to count."""
    pairs = 0.0
    for queries, keys in zip(pieces.queries, pieces.keys, strict=True):
        pairs += queries * keys - (queries * queries / 2 if pieces.causal else 0)
    return pairs


@dataclass(frozen=True)
class Pace:
    """How long computation takes.

    seconds: forward, of a rank's mean share of attention, of experts, and of linear parts of a light layer, each, in
        one layer and micro-batch.
    even: whether layers and documents are even, which changes the seconds of a layer and of a pair, not their totals.
    hybrid: whether Megatron-LM's scheduler spreads the documents.
    """

    seconds: float
    even: bool
    hybrid: bool = False

    @property
    def pair(self) -> float:
        """Seconds of a query-key pair."""
        return self.seconds * CONTEXT / sum(length**2 / 2 for length in lengths_of(self.even))

    @property
    def token(self) -> float:
        """Seconds of an expert for a token."""
        return self.seconds * CONTEXT / (TOKENS * TOP_K)

    def linear(self, layer: int) -> float:
        """Seconds of the linear parts of a layer (from 0)."""
        heavy = 3 * (LAYERS - _HEAVY) / _HEAVY - 2  # of a light layer's three equal parts, two are the same in all
        of_layers = [heavy if number < _HEAVY else 1.0 for number in range(LAYERS)]
        return self.seconds * (sum(of_layers) / LAYERS if self.even else of_layers[layer])


class Work(Device):
    """A device on which the host's own work counts as part of what it stands for.

    So does the time in which this thread could have run and had no core: a node of the emulated cluster has a core a
    rank, this machine has not.
    """

    def __init__(self) -> None:
        super().__init__(shortest=0.001)
        self._scheduled = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._host = 0.0

    def run(self, seconds: float) -> None:
        super().run(seconds - (self._host_seconds() - self._host))
        self._host = self._host_seconds()

    def _host_seconds(self) -> float:
        """Seconds that this thread ran or waited for a core."""
        ran, waited = os.pread(self._scheduled, 100, 0).split()[:2]
        return (int(ran) + int(waited)) / 1e9


def routed(rank: int, layer: int, tokens: int, even: bool) -> np.ndarray:
    """int64 [expert], the assignments of a rank's tokens in a layer. rank: of the expert-parallel group."""
    if even:
        return np.full(EXPERTS, tokens * TOP_K // EXPERTS)
    random = np.random.default_rng(layer)
    share = (1 + np.arange(EXPERTS)) ** -_SKEW
    share = random.permutation(share / share.sum()) * np.random.default_rng((layer, rank)).uniform(0.9, 1.1, EXPERTS)
    counts = np.minimum((share / share.sum() * tokens * TOP_K).astype(np.int64), tokens)
    while missing := tokens * TOP_K - int(counts.sum()):
        counts[np.argsort(-np.where(counts < tokens, share, -1))[:missing]] += 1
    return counts
