"""The number of micro-batches of the schedule in progress.

Megatron-LM's own loop keeps it in a global. Other loops pass it to the schedule, and it may differ from step to step.
"""

import contextlib
from collections.abc import Iterator

from megatron.core import num_microbatches_calculator

__all__ = ["get_num_microbatches", "schedule_of"]

_handed: list[int] = []  # to the schedules in progress; a callback may run one inside another


def get_num_microbatches() -> int:
    """The number passed to the schedule in progress, or Megatron-LM's global number if none was passed."""
    return _handed[-1] if _handed else num_microbatches_calculator.get_num_microbatches()


@contextlib.contextmanager
def schedule_of(micro_batches: int) -> Iterator[None]:
    """A context in which `get_num_microbatches` returns `micro_batches`."""
    _handed.append(micro_batches)
    try:
        yield
    finally:
        _handed.pop()
