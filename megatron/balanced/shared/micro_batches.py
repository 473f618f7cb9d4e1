"""The number of micro-batches of the schedule in progress.

Megatron-LM's trainer has it in a global, which its own loop sets. Other loops hand it to the schedule, with another
number from step to step.
"""

import contextlib
from collections.abc import Iterator

from megatron.core import num_microbatches_calculator

__all__ = ["get_num_microbatches", "schedule_of"]

_handed: list[int] = []  # to the schedules in progress, of which a callback may run another one


def get_num_microbatches() -> int:
    """The number that the schedule in progress was handed, else that of Megatron-LM's trainer."""
    return _handed[-1] if _handed else num_microbatches_calculator.get_num_microbatches()


@contextlib.contextmanager
def schedule_of(micro_batches: int) -> Iterator[None]:
    """A context in which a schedule of so many micro-batches runs."""
    _handed.append(micro_batches)
    try:
        yield
    finally:
        _handed.pop()
