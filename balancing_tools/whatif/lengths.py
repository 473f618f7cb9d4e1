"""Batches of documents with the lengths of published training sets.

Lengths are drawn from tables of published percentiles or bins. Between two points of a table the logarithm of the
length is uniform. A batch is filled as Megatron-LM's GPT dataset fills a sequence: document after document, the last
one cut where the batch ends.
"""

import math
from collections.abc import Sequence

import numpy as np

__all__ = ["DISTRIBUTIONS", "draw_batch", "draw_lengths"]

# (percentile, tokens). prolong and pretrain: two sets of DistCA (arXiv 2510.18121), of 77,932 and 99,519 documents.
# packed: the training set of MagiAttention's benchmarks (13.5 million documents). wikipedia: FlexSP's sample
# (arXiv 2412.01523); its shortest and longest lengths are not published. web: a production set as ByteScale
# (arXiv 2502.21231) describes it: 80 % of documents up to 4k tokens, 1 % from 128k tokens with 44 % of all tokens,
# 0.05 % from 2M.
_PERCENTILES: dict[str, tuple[tuple[float, float], ...]] = {
    "prolong": (
        (0, 575), (1, 678), (5, 801), (10, 919), (25, 1237), (50, 1914), (75, 3467), (90, 6051), (95, 8379),
        (99, 16273), (99.5, 21393), (99.9, 47500), (100, 340149),
    ),
    "pretrain": (
        (0, 16), (1, 63), (5, 324), (10, 646), (25, 1606), (50, 3227), (75, 4832), (90, 5784), (95, 6110), (99, 26070),
        (99.5, 69118), (99.9, 119836), (100, 124913),
    ),
    "packed": (
        (0, 1), (0.22, 10), (3.13, 50), (8.33, 100), (18.56, 200), (46.75, 500), (71.39, 1024), (87.04, 2048),
        (94.38, 4096), (97.43, 8192), (98.72, 16384), (99.57, 32768), (99.71, 65536), (99.88, 131072), (100, 196608),
    ),
    "wikipedia": ((0, 16), (50, 347), (90, 2112), (99, 10921), (99.9, 37367), (100, 131072)),
    "web": ((0, 128), (80, 4096), (99, 131072), (99.95, 2097152), (100, 4194304)),
}  # fmt: skip
# mix: ProLong's training mix, 60 % of tokens in books and repositories of exactly 64k tokens, the rest short.
_MIX_LONG, _MIX_LONG_TOKENS = 65536, 0.6
# lognormal: the lengths of Megatron-LM's own benchmarks of hybrid context parallelism, a log-normal of this mean.
_LOGNORMAL_MEAN, _LOGNORMAL_SIGMA, _LOGNORMAL_BOUNDS = 1024, 1.5, (128, 8192)

DISTRIBUTIONS = (*_PERCENTILES, "mix", "lognormal")


def draw_lengths(distribution: str, documents: int, generator: np.random.Generator) -> np.ndarray:
    """int64 [document]: tokens of `documents` documents. Raises ValueError for an unknown distribution."""
    if distribution == "mix":
        short = draw_lengths("wikipedia", documents, generator)
        mean = float(np.mean(draw_lengths("wikipedia", 20000, np.random.default_rng(0))))
        odds = _MIX_LONG_TOKENS / _MIX_LONG * mean / (1 - _MIX_LONG_TOKENS)
        return np.where(generator.random(documents) < odds / (1 + odds), _MIX_LONG, short)
    if distribution == "lognormal":
        center = math.log(_LOGNORMAL_MEAN) - _LOGNORMAL_SIGMA**2 / 2
        drawn = np.exp(generator.normal(center, _LOGNORMAL_SIGMA, documents))
        return np.clip(drawn, *_LOGNORMAL_BOUNDS).astype(np.int64)
    if distribution not in _PERCENTILES:
        raise ValueError(f"unknown distribution {distribution!r}; known: {', '.join(DISTRIBUTIONS)}")
    percent, tokens = np.array(_PERCENTILES[distribution]).T
    drawn = np.exp(np.interp(generator.random(documents) * 100, percent, np.log(tokens)))
    return np.maximum(np.rint(drawn), 1).astype(np.int64)


def draw_batch(
    source: str | Sequence[int] | np.ndarray, tokens: int, generator: np.random.Generator
) -> tuple[int, ...]:
    """Lengths of the documents of one batch of exactly `tokens` tokens.

    source: the name of a distribution, or recorded lengths to draw from.

    Raises ValueError for an unknown name, for no lengths or lengths below 1, and for tokens below 1.
    """
    if tokens < 1:
        raise ValueError(f"tokens={tokens} must be at least 1")
    recorded = np.empty(0, dtype=np.int64) if isinstance(source, str) else np.asarray(source, dtype=np.int64)
    if not isinstance(source, str) and (recorded.size == 0 or recorded.min() < 1):
        raise ValueError("recorded lengths must be one or more, each at least 1")
    lengths: list[int] = []
    missing = tokens
    while missing > 0:
        drawn = draw_lengths(source, 256, generator) if isinstance(source, str) else generator.choice(recorded, 256)
        ends = np.cumsum(drawn)
        whole = int(np.searchsorted(ends, missing))  # index of the document in which the batch ends; 256 if none
        lengths += drawn[:whole].tolist()
        missing -= int(ends[whole - 1]) if whole else 0
        if whole < len(drawn):
            lengths.append(missing)
            missing = 0
    return tuple(lengths)
