"""Load of sequences on ranks: tokens for linear layers, the area under the causal mask for attention.

A document of l tokens has l (l + 1) / 2 query-key pairs, so one long document costs as much attention as short
documents with many more tokens together (Zeppelin, arXiv 2509.21841, section 2).
"""

from collections.abc import Sequence

import numpy as np

__all__ = [
    "MOST_TOKENS",
    "TILE",
    "area_between",
    "area_of_first",
    "causal_area",
    "token_counts",
    "zigzag_area",
    "zigzag_areas",
]

TILE = 128  # queries, and keys, of a tile of flash attention
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


def zigzag_areas(lengths: Sequence[int] | np.ndarray, ranks: int, window: int | None = None) -> np.ndarray:
    """int64 [rank]: query-key pairs whose queries are on each of `ranks` context-parallel ranks.

    The packed sequence of documents of `lengths` tokens [document] is cut into 2 x ranks equal chunks. As in
    Megatron-LM, a rank holds chunks `rank` and `2 x ranks - 1 - rank`. window: as in `causal_area`.

    Raises ValueError if the tokens do not divide into equal chunks, and for more than MOST_TOKENS tokens.
    """
    tokens = token_counts(lengths)
    if ranks == 1:
        return np.array([causal_area(tokens, window)])
    total, chunks = int(tokens.sum()), 2 * ranks
    if total % chunks:
        raise ValueError(f"{total} tokens do not cut into {chunks} equal chunks; make it a multiple of {chunks}")
    begin = np.concatenate([[0], np.cumsum(tokens)])
    whole = np.concatenate([[0], np.cumsum(area_of_first(tokens, window))])  # pairs of the documents before
    cuts = np.arange(chunks + 1) * (total // chunks)
    document = np.searchsorted(begin, cuts, side="right") - 1
    inside = cuts - begin[document]
    pairs = np.diff(whole[document] + area_of_first(inside, window))
    return pairs[:ranks] + pairs[: ranks - 1 : -1]


def zigzag_area(lengths: Sequence[int] | np.ndarray, rank: int, ranks: int) -> int:
    """The area of `rank` in `zigzag_areas`. Raises ValueError as `zigzag_areas` does."""
    return int(zigzag_areas(lengths, ranks)[rank])
