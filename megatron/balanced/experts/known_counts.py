"""Counts of tokens, gathered once for Megatron's dispatcher and for balanced experts.

Balanced experts gather the load of a micro-batch before they split it. From the split, every rank knows how many tokens
go to which physical expert. Megatron's alltoall dispatcher would gather the same counts again, with one more collective
in each MoE layer that the host waits for. Inside `known_counts` it gets the known counts instead. If there is nothing
to split, the dispatcher gathers, and balanced experts use its counts.
"""

import functools
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any, Protocol

import torch
from megatron.core.transformer.moe import token_dispatcher

__all__ = ["known_counts", "takes_known_counts", "with_known_counts"]


class _Counted(Protocol):
    counts: torch.Tensor | None


# The dispatcher calls the function that we replace with nothing but a tensor and a group.
_share: ContextVar[_Counted | None] = ContextVar("counts of the layer in progress", default=None)


class known_counts:
    """A context in which the dispatcher's next gather of counts returns `share.counts`, int64, flat, rank by rank. If
    these are None, the dispatcher gathers and stores its result there."""

    def __init__(self, share: _Counted) -> None:
        self._counted = share

    def __enter__(self) -> None:
        self._before: Token[_Counted | None] = _share.set(self._counted)

    def __exit__(self, *unused: object) -> None:
        _share.reset(self._before)


def with_known_counts(gather: Callable) -> Callable:
    """Replaces `gather_from_sequence_parallel_region` in Megatron's dispatchers."""

    @functools.wraps(gather)
    def gather_from_sequence_parallel_region(input_: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        share = _share.get()
        if share is None:
            return gather(input_, *args, **kwargs)
        _share.set(None)  # one gather of the dispatcher
        if share.counts is None:
            share.counts = gather(input_, *args, **kwargs)
        return share.counts

    gather_from_sequence_parallel_region.takes_known_counts = True  # type: ignore[attr-defined]
    return gather_from_sequence_parallel_region


def takes_known_counts() -> bool:
    """Whether Megatron's dispatchers take known counts. Only the trainer patches them."""
    return hasattr(token_dispatcher.gather_from_sequence_parallel_region, "takes_known_counts")
