"""Facts about a run that `megatron.core`'s configs and process groups do not have."""

from dataclasses import dataclass

__all__ = ["Job"]


@dataclass(frozen=True)
class Job:
    """Sizes and timeout of a run.

    seq_length: tokens of a sample; 0 if not known.
    micro_batch_size: samples of a micro-batch.
    timeout_minutes: timeout of collectives.
    recaptures: whether the loop captures CUDA graphs again after a plan has changed.
    """

    seq_length: int = 0
    micro_batch_size: int = 1
    timeout_minutes: float = 10.0
    recaptures: bool = False
