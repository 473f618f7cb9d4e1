"""How a loop makes the batches that are balanced."""

from collections.abc import Callable
from dataclasses import dataclass

from balancing.sequences import AttentionShape
from megatron.balanced.shared.job import Job

__all__ = ["Batches"]


@dataclass(frozen=True)
class Batches:
    """Facts about a loop and its model that the sequence balancer needs and the model's config does not have.

    job: the run.
    shape: of the model's attention.
    step_samples: samples of a step, of all ranks.
    trained_samples: gives the samples of earlier steps, once a checkpoint is loaded.
    group: micro-batches that an interleaved pipeline groups together; None for the number of stages.
    conversations: whether samples are conversations, which are padded.
    masks_documents: whether the documents of a sample do not attend to each other.
    whole: whether documents that were drawn for one micro-batch must run in the same micro-batch.
    one_size: whether every micro-batch must have the same number of rows on each rank.
    tells_samples: whether a router loss needs the sample of each token.
    passes_states: whether layers pass a state from each token of a document to the next.
    """

    job: Job
    shape: AttentionShape
    step_samples: int
    trained_samples: Callable[[], int]
    group: int | None
    conversations: bool
    masks_documents: bool
    whole: bool
    one_size: bool
    tells_samples: bool
    passes_states: bool
