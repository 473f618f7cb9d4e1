"""What sequences cost a rank: linear layers pay for tokens, attention for the area under the causal mask.

A document of l tokens has l (l + 1) / 2 query-key pairs, so one long document costs as much attention as many short
ones that have many more tokens together (Zeppelin, arXiv 2509.21841, section 2).
"""

from collections.abc import Sequence

import numpy as np

__all__ = ["causal_area", "zigzag_area"]


def causal_area(lengths: Sequence[int] | np.ndarray) -> int:
    """Query-key pairs of documents of `lengths` tokens [document], each attending to itself alone, causally."""
    tokens = np.asarray(lengths, dtype=np.int64)
    return int((tokens * (tokens + 1) // 2).sum())


def zigzag_area(lengths: Sequence[int] | np.ndarray, rank: int, ranks: int) -> int:
    """Query-key pairs whose queries fall on context-parallel `rank` of `ranks`.

    The packed sequence of documents of `lengths` tokens [document] is cut into 2 x ranks equal chunks; a rank holds
    chunks `rank` and `2 x ranks - 1 - rank`, as Megatron-LM cuts it. Raises ValueError when it does not cut evenly.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    if ranks == 1:
        return causal_area(tokens)
    total = int(tokens.sum())
    if total % (2 * ranks):
        raise ValueError(f"{total} tokens do not cut into {2 * ranks} equal chunks; make it a multiple of {2 * ranks}")
    starts = np.repeat(np.cumsum(tokens) - tokens, tokens)
    pairs = np.arange(1, total + 1) - starts  # keys that each query sees
    chunks = pairs.reshape(2 * ranks, -1)
    return int(chunks[rank].sum() + chunks[2 * ranks - 1 - rank].sum())
