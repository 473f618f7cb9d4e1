"""What balancers know of a run beside `megatron.core`'s configs and process groups."""

from dataclasses import dataclass

__all__ = ["Job"]


@dataclass(frozen=True)
class Job:
    """A run, as whoever starts it describes it.

    seq_length: tokens of a sample.
    micro_batch_size: samples of a micro-batch.
    timeout_minutes: of collectives.
    """

    seq_length: int
    micro_batch_size: int
    timeout_minutes: float
