"""Which ranks share micro-batches (`--sequence-domain`), which samples these are, and what each token counts.

With the domain "context", the context-parallel ranks of each data-parallel rank share its micro-batches. With "data",
all data-parallel ranks share theirs: the m-th micro-batch of the domain is made of the m-th micro-batches of all of
them. Of very many ranks, groups of neighbours share micro-batches, and each group gets as many of the m-th
micro-batches as it has data-parallel ranks, so that groups have equal work (`balancing.sequences.planners.groups`).

Megatron-LM's samplers are unchanged. They give consecutive samples to consecutive data-parallel ranks, so each
rank knows the samples of the others from its own.

The origin of a token is the micro-batch of Megatron-LM that it belongs to, by the data-parallel rank that would have
it. Without --calculate-per-token-loss, Megatron-LM averages the loss over the tokens of each micro-batch, and then over
micro-batches and data-parallel ranks, so a token counts 1 / tokens of its origin, wherever a plan puts it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import mpu

from balancing.sequences.planners.groups import deal_areas, number_of_groups

__all__ = ["Domain", "Sample", "count_tokens", "token_weights", "weights_of_counts"]


@dataclass(frozen=True)
class Domain:
    """The ranks that share micro-batches, as one of them sees it.

    rank: of this rank among them.
    ranks: their number.
    origin: place of this data-parallel rank among them, from 0. In a domain of one group, that of the samples that
        Megatron-LM's sampler gives to this rank.
    origins: number of Megatron-LM's micro-batches in one of theirs.
    group, groups: of this rank, and how many groups of as many ranks there are.
    """

    rank: int
    ranks: int
    origin: int = 0
    origins: int = 1
    group: int = 0
    groups: int = 1

    @classmethod
    def of_context(cls) -> "Domain":
        return cls(mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size())

    @classmethod
    def of_data(cls) -> "Domain":
        rank = mpu.get_data_parallel_rank(with_context_parallel=True)
        ranks = mpu.get_data_parallel_world_size(with_context_parallel=True)
        origin, origins = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        groups = number_of_groups(origins)
        ranks, origins = ranks // groups, origins // groups
        return cls(rank % ranks, ranks, origin % origins, origins, rank // ranks, groups)

    def samples(self, indices: Sequence[int], areas: Callable[[np.ndarray], np.ndarray | None]) -> list["Sample"]:
        """The samples that these ranks share, in Megatron-LM's order.

        indices: those of Megatron-LM's sampler for this rank.
        areas: int64 [sample], query-key pairs of samples int64 [sample]; None where only their tokens tell.
        """
        if self.origins == self.groups == 1:
            return [Sample(index, 0) for index in indices]
        size = len(indices)
        first = indices[0] - (self.group * self.origins + self.origin) * size
        assert list(indices) == list(range(indices[0], indices[0] + size)), "samples of a rank follow each other"
        assert first >= 0, "samples of data-parallel ranks follow each other"
        members: Sequence[int] = range(self.group * self.origins, (self.group + 1) * self.origins)
        if self.groups > 1:
            number = self.groups * self.origins
            area = areas(np.arange(first, first + number * size))
            if area is not None:
                members = np.flatnonzero(
                    deal_areas(area.reshape(number, size).sum(1), self.groups) == self.group
                ).tolist()
        return [Sample(first + at * size + place, origin) for origin, at in enumerate(members) for place in range(size)]


@dataclass(frozen=True)
class Sample:
    """A sample of a micro-batch. index: in the dataset. origin: of its tokens, among those that the ranks share."""

    index: int
    origin: int


def token_weights(
    loss_mask: torch.Tensor, origin: torch.Tensor, origins: int, process_group: dist.ProcessGroup
) -> torch.Tensor:
    """What each row of this rank counts in the loss of a step of one micro-batch on one data-parallel rank, [row].

    loss_mask: [row], 1 where a token counts, 0 elsewhere.
    origin: int [row], of each row's token; any in padding.
    origins: their number.
    process_group: the ranks that share the micro-batch. All of them call this together.
    """
    return weights_of_counts(loss_mask, origin, count_tokens(loss_mask, origin, origins, process_group))


def count_tokens(
    loss_mask: torch.Tensor, origin: torch.Tensor, origins: int, process_group: dist.ProcessGroup
) -> torch.Tensor:
    """Tokens with a loss of each origin, [..., origin], on all ranks. loss_mask: [..., row]; see `token_weights`."""
    tokens = loss_mask.new_zeros(*loss_mask.shape[:-1], origins).index_add_(-1, origin, loss_mask)
    dist.all_reduce(tokens, group=process_group)
    return tokens


def weights_of_counts(loss_mask: torch.Tensor, origin: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """As `token_weights`, where `tokens` [..., origin] have been counted before. loss_mask: [..., row]."""
    return loss_mask / tokens.to(loss_mask.dtype).clamp(min=1)[..., origin]
