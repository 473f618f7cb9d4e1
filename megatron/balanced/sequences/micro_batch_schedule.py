"""Which samples make up a step, and which of its documents run in which micro-batch (`--sequence-micro-batches`).

Megatron-LM's sampler gives consecutive samples to consecutive data-parallel ranks and then to consecutive
micro-batches, so a rank knows all samples of a step from its own of one micro-batch. Documents are distributed over the
micro-batches of the step by their lengths only, so all ranks and all workers of data loaders get the same result. A
token keeps its origin, the micro-batch and data-parallel rank for which Megatron-LM drew it. So its weight in the loss
stays the same.

Megatron-LM's micro-batches stay whole if micro-batches must have one size, or if a router loss is of a micro-batch or
sample of Megatron-LM. Then only their order changes, and so which ones of different data-parallel ranks are combined.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from balancing.cluster import Cluster
from balancing.pipeline import Schedule, simulate_schedule
from balancing.sequences import AttentionShape, deal_whole, plan_micro_batches
from balancing.sequences.micro_batches import document_seconds
from balancing.sequences.planners.groups import deal_areas
from balancing.sequences.planners.micro_batch_packing import whole_costs
from megatron.balanced.sequences.domain import Domain, Sample

__all__ = ["DrawnSteps", "Step", "StepSeconds", "Steps", "WholeSteps"]

_FORWARD = 0.32  # fraction of the seconds of both passes: a third in linear layers, less in attention


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step on a pipeline of equal stages. stages, chunks, schedule: as in `balancing.pipeline`."""

    stages: int
    chunks: int
    schedule: Schedule

    def __call__(self, costs: np.ndarray) -> float:
        """costs: float64 [micro-batch], seconds of forward and backward in all layers."""
        passes = (part * costs / (self.stages * self.chunks) for part in (_FORWARD, 1 - _FORWARD))
        forward, backward = (np.broadcast_to(seconds, (self.stages, self.chunks, len(costs))) for seconds in passes)
        return simulate_schedule(forward, backward, len(costs), schedule=self.schedule).step_time


@dataclass(frozen=True)
class Step:
    """A step, while one of its micro-batches is made.

    first: the step's first sample in the dataset.
    micro_batch: number of the micro-batch in the step.
    samples: of all micro-batches of the step, in order. Their origins are numbered on from one micro-batch to the next.
    """

    first: int
    micro_batch: int
    samples: list[Sample]


@dataclass(frozen=True)
class DrawnSteps:
    """Which steps leave their tokens where Megatron-LM draws them.

    samples: number of samples of a step, on all data-parallel ranks.
    first: number of the sample with which the first step of this run begins.
    iteration: number of this step.
    stays: iteration -> whether that step does.
    """

    samples: int
    first: int
    iteration: int
    stays: Callable[[int], bool]

    def __call__(self, index: int) -> bool:
        """Whether the step with sample `index` does."""
        return self.stays(self.iteration + (index - self.first) // self.samples)


@dataclass(frozen=True)
class _OfOneSize:
    """The steps of a run, which have one size.

    micro_batches: number of micro-batches of a step.
    samples: of a step, on all data-parallel ranks.
    first: sample with which the first step of this run begins.
    cluster: the ranks that share micro-batches.
    shape: shape of the model's attention.
    seconds: seconds of a step, from costs of its micro-batches.
    """

    micro_batches: int
    samples: int
    first: int
    cluster: Cluster
    shape: AttentionShape
    seconds: StepSeconds

    def place(self, indices: Sequence[int]) -> tuple[int, int]:
        """Where this rank has the samples `indices`: the first sample of the step, and the micro-batch."""
        step, place = divmod(indices[0] - self.first, self.samples)
        return self.first + step * self.samples, place // (self.samples // self.micro_batches)


@dataclass(frozen=True)
class Steps(_OfOneSize):
    """Steps whose documents are distributed over their micro-batches.

    token_capacity: most tokens of a micro-batch on a rank.
    """

    token_capacity: int

    def deal(self, lengths: Sequence[int], drawn: np.ndarray) -> np.ndarray:
        """int64 [document], the micro-batch in which each runs.

        lengths: tokens of each document.
        drawn: int64 [document], the micro-batch that Megatron-LM has it in.
        """
        plan = plan_micro_batches(
            lengths,
            drawn=drawn,
            micro_batches=self.micro_batches,
            cluster=self.cluster,
            shape=self.shape,
            token_capacity=self.token_capacity,
            step=self.seconds,
        )
        if plan.tokens.min() < self.cluster.world_size:  # a rank would be without a token
            return drawn
        return np.array(plan.micro_batch, dtype=np.int64)

    def of(self, indices: Sequence[int], domain: Domain, areas: Callable[[np.ndarray], np.ndarray | None]) -> Step:
        """The step in which this rank has the samples `indices` in one of the micro-batches.

        areas: as in `Domain.samples`.
        """
        first, micro_batch = self.place(indices)
        size = self.samples // self.micro_batches
        samples = []
        for number in range(self.micro_batches):
            moved = [index + (number - micro_batch) * size for index in indices]
            samples += [
                Sample(sample.index, number * domain.origins + sample.origin) for sample in domain.samples(moved, areas)
            ]
        return Step(first, micro_batch, samples)


@dataclass(frozen=True)
class WholeSteps(_OfOneSize):
    """Steps whose micro-batches of Megatron-LM stay whole."""

    def cost(self, lengths: np.ndarray) -> np.ndarray:
        """float64 [document], seconds of documents. lengths: int64 [document], their tokens."""
        return document_seconds(lengths, self.cluster, self.shape)

    def deal(self, seconds: np.ndarray) -> np.ndarray:
        """int64 [part], the micro-batch in which each of Megatron-LM's micro-batches runs. seconds: float64 [part]."""
        return deal_whole(seconds, self.micro_batches, self.seconds)

    def of(
        self, indices: Sequence[int], domain: Domain, costs: Callable[[np.ndarray], np.ndarray | None]
    ) -> list[list[Sample]]:
        """[micro-batch], the samples that run in it, in Megatron-LM's order, of the step in which this rank has the
        samples `indices`.

        costs: samples int64 [sample] -> total `cost` of their documents float64 [sample], or None if only their tokens
            tell. Samples then stay where they were drawn.

        Origins of samples are numbered on from one of Megatron-LM's micro-batches to the next. If the domain is split
        into groups, an origin is the index of its micro-batch among those that the group has in the step.

        Two data-parallel ranks share micro-batches, each with two samples in one of Megatron-LM's, and a step has two
        micro-batches:

                                  rank 0  rank 1
            micro-batch 0 as drawn  0 1     2 3
            micro-batch 1 as drawn  4 5     6 7

        Megatron-LM's micro-batches begin with samples 0, 2, 4 and 6. If their costs are such that the first and the
        third run first, micro-batch 0 has samples 0, 1, 4, 5 of the origins 0, 0, 2, 2, and micro-batch 1 has the
        others, of the origins 1, 1, 3, 3.
        """
        size, (_, micro_batch) = len(indices), self.place(indices)
        firsts = self._first_samples(indices, domain)
        known = costs((firsts[:, None] + np.arange(size)).reshape(-1))
        if known is None:
            here, samples = domain.samples(indices, lambda samples: None), self.samples // self.micro_batches
            return [
                [
                    Sample(at.index + (number - micro_batch) * samples, number * domain.origins + at.origin)
                    for at in here
                ]
                for number in range(self.micro_batches)
            ]
        seconds = known.reshape(-1, size).sum(1)
        if domain.groups > 1:
            kept = deal_areas(whole_costs(seconds), domain.groups) == domain.group
            firsts, seconds = firsts[kept], seconds[kept]
        deal = self.deal(seconds)
        return [
            [Sample(int(firsts[at]) + place, int(at)) for at in np.flatnonzero(deal == number) for place in range(size)]
            for number in range(self.micro_batches)
        ]

    def _first_samples(self, indices: Sequence[int], domain: Domain) -> np.ndarray:
        """int64 [part], the first sample of each of Megatron-LM's micro-batches to distribute: those of this
        data-parallel rank in the step, or of all ranks if they share micro-batches. indices, domain: as in `of`."""
        size, samples = len(indices), self.samples // self.micro_batches
        first, micro_batch = self.place(indices)
        alone = domain.origins == domain.groups == 1
        offsets = np.array([indices[0] - first - micro_batch * samples]) if alone else np.arange(0, samples, size)
        return (first + np.arange(self.micro_batches)[:, None] * samples + offsets).reshape(-1)
