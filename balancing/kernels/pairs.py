"""What attention computes, counted: tokens of documents, and query-key pairs under the causal mask."""

from collections.abc import Sequence

import numpy as np

__all__ = ["MOST_TOKENS", "area_between", "area_of_first", "causal_area", "pair_flops", "token_counts"]

MOST_TOKENS = 2**31 - 1  # of a batch: kernels have row numbers in int32, and areas of more tokens exceed int64


def token_counts(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """int64 [document], `lengths`. Raises ValueError for more than MOST_TOKENS tokens."""
    total = int(lengths.sum(dtype=np.float64)) if isinstance(lengths, np.ndarray) else sum(lengths)
    if total > MOST_TOKENS:
        raise ValueError(
            f"a batch of {total} tokens is more than the {MOST_TOKENS} that one plan may have; use smaller batches"
        )
    return np.asarray(lengths, dtype=np.int64)


def causal_area(lengths: Sequence[int] | np.ndarray, window: int | None = None) -> int:
    """Query-key pairs of documents of `lengths` tokens [document], under a causal mask within each document.

    window: tokens before itself that a token sees; None for all.

    Raises ValueError for more than MOST_TOKENS tokens.
    """
    return int(area_of_first(token_counts(lengths), window).sum())


def area_between(start: int, stop: int) -> int:
    """Query-key pairs of tokens [start, stop) of a document, each of which sees the document up to itself."""
    return (stop * (stop + 1) - start * (start + 1)) // 2


def area_of_first(tokens: np.ndarray, window: int | None = None) -> np.ndarray:
    """int64, query-key pairs of the first `tokens` tokens of a document, at most MOST_TOKENS. window: as in
    `causal_area`."""
    if window is None:
        return np.asarray(tokens * (tokens + 1) // 2)
    few = np.minimum(tokens, window + 1)
    return np.asarray(few * (few + 1) // 2 + (tokens - few) * (window + 1))


def pair_flops(heads: int, head_size: int, value_size: int | None = None) -> float:
    """FLOPs of one query-key pair in one layer, forward, for scores and values. value_size: head_size by default."""
    return 2.0 * heads * (head_size + (head_size if value_size is None else value_size))
