"""Reuse of token counts that were gathered already, in Megatron's dispatcher.

Balanced experts gather the load of each micro-batch before they split it; from the split, every rank knows how many
tokens go to which physical expert. Megatron's alltoall dispatcher would gather the same counts again, with one more
collective in each MoE layer that the host waits for. Inside `known_counts` it gets the known counts instead.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["known_counts", "with_known_counts"]

_known: list[torch.Tensor] = []


@contextmanager
def known_counts(counts: torch.Tensor) -> Iterator[None]:
    """Make the dispatcher's next gather of counts return `counts`: int64, flat, rank by rank."""
    _known.append(counts)
    try:
        yield
    finally:
        _known.clear()


def with_known_counts(gather: Callable) -> Callable:
    """Replaces `gather_from_sequence_parallel_region` in Megatron's dispatchers."""

    @functools.wraps(gather)
    def gather_from_sequence_parallel_region(input_: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return _known.pop() if _known else gather(input_, *args, **kwargs)

    return gather_from_sequence_parallel_region
