"""Sizes of pipeline messages for micro-batches of several samples that are packed into one sequence.

Megatron-LM flattens such a micro-batch to [1, samples x tokens] before the first layer, but its schedules still expect
messages of [tokens, samples, hidden] between stages. Here they get the size of the flattened batch.
"""

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["with_flat_batches"]


def with_flat_batches(original: Callable) -> Callable:
    """Megatron's `get_forward_backward_func`, whose schedules take each micro-batch as one sequence."""

    @functools.wraps(original)
    def get_forward_backward_func(
        pp_size: int | None = None, vp_size: int | None = None, schedule_pg_collection: Any = None
    ) -> Callable:
        schedule = original(pp_size, vp_size, schedule_pg_collection)

        @functools.wraps(schedule)
        def flat(*, seq_length: int, micro_batch_size: int, **rest: Any) -> Any:
            if rest.get("decoder_seq_length") is not None:
                rest["decoder_seq_length"] *= micro_batch_size
            return schedule(seq_length=seq_length * micro_batch_size, micro_batch_size=1, **rest)

        return flat

    return get_forward_backward_func
