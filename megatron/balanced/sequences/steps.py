"""Which samples make up a step, and which of its documents run in which micro-batch (`--sequence-micro-batches`).

Megatron-LM's sampler gives consecutive samples to consecutive data-parallel ranks and then to consecutive
micro-batches, so a rank knows all samples of a step from its own of one micro-batch. Documents are dealt anew over the
micro-batches of the step, by their lengths alone, so all ranks and all workers of data loaders make the same deal. A
token keeps its origin, the micro-batch and data-parallel rank that Megatron-LM would have it in, and with it what it
counts in the loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from balancing.cluster import Cluster
from balancing.sequences import AttentionShape, plan_micro_batches
from megatron.balanced.sequences.domain import Domain, Sample

__all__ = ["Step", "Steps", "deal_documents"]


@dataclass(frozen=True)
class Step:
    """A step, as the micro-batch number `micro_batch` of it is made. samples: of all its micro-batches, in order; the
    origin of each is that in its micro-batch plus the origins of those before. first: sample of the dataset."""

    first: int
    micro_batch: int
    samples: list[Sample]


@dataclass(frozen=True)
class Steps:
    """The steps of a run, which have one size.

    micro_batches: of a step.
    samples: of a step, on all data-parallel ranks.
    first: sample with which the first step of this run begins.
    deal: lengths and drawn micro-batches of documents -> int64 [document], the micro-batch in which each runs.
    """

    micro_batches: int
    samples: int
    first: int
    deal: Callable[[Sequence[int], np.ndarray], np.ndarray]

    def of(self, own: Sequence[int], domain: Domain, areas: Callable[[np.ndarray], np.ndarray | None]) -> Step:
        """The step in which this rank has the samples `own` in one of the micro-batches.

        areas: as in `Domain.samples`.
        """
        step, place = divmod(own[0] - self.first, self.samples)
        each = self.samples // self.micro_batches
        micro_batch = place // each
        samples = []
        for number in range(self.micro_batches):
            moved = [index + (number - micro_batch) * each for index in own]
            samples += [
                Sample(sample.index, number * domain.origins + sample.origin) for sample in domain.samples(moved, areas)
            ]
        return Step(self.first + step * self.samples, micro_batch, samples)


def deal_documents(
    lengths: Sequence[int],
    drawn: np.ndarray,
    *,
    micro_batches: int,
    cluster: Cluster,
    shape: AttentionShape,
    token_capacity: int,
) -> np.ndarray:
    """int64 [document], the micro-batch in which each runs.

    lengths: tokens of each document.
    drawn: int64 [document], the micro-batch that Megatron-LM has it in.
    micro_batches: of the step.
    cluster, shape, token_capacity: as in `plan_micro_batches`.
    """
    plan = plan_micro_batches(lengths, micro_batches, cluster, shape=shape, token_capacity=token_capacity, drawn=drawn)
    if plan.tokens.min() < cluster.world_size:  # a rank would be without a token
        return drawn
    return np.array(plan.micro_batch, dtype=np.int64)
