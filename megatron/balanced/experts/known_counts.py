"""Token counts that every rank knows already are not gathered a second time.

Balanced experts gather each micro-batch's load before they split it; what goes to which physical expert is then
arithmetic on every rank. Megatron's alltoall dispatcher gathers just that for itself, one more collective in each MoE
layer that the host waits for. Inside `known_counts` it is handed the known result.
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
    """Have the dispatcher's next gathering of counts return `counts`, flat, those of rank after rank."""
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
