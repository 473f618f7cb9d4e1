"""Which ranks share micro-batches (`--sequence-domain`), which samples these have, and the weight of each token.

With the domain "context", the context-parallel ranks of each data-parallel rank share its micro-batches. With "data",
all data-parallel ranks share theirs: the m-th micro-batch of the domain consists of the m-th micro-batches of all
ranks.
If there are very many ranks, they are split into groups of neighbours that share micro-batches. Each group gets as many
of the m-th micro-batches as it has data-parallel ranks, chosen so that groups have equal work
(`balancing.sequences.planners.groups`).

Megatron-LM's samplers are unchanged. They give consecutive samples to consecutive data-parallel ranks, so each
rank knows the samples of the others from its own.

The origin of a token is the micro-batch of Megatron-LM for which it was drawn, numbered by its data-parallel rank.
Without --calculate-per-token-loss, Megatron-LM averages the loss over the tokens of each micro-batch, and then over
micro-batches and data-parallel ranks. So the weight of a token is 1 / (tokens of its origin), wherever a plan puts it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import mpu

from balancing.sequences.planners.groups import deal_areas, number_of_groups

__all__ = ["Domain", "LossTokens", "Sample"]


@dataclass(frozen=True)
class Domain:
    """The ranks that share micro-batches, as one of them sees it.

    rank: index of this rank among them.
    ranks: their number.
    origin: index of this data-parallel rank among them, from 0. In a domain of one group, it is also the origin of the
        samples that Megatron-LM's sampler gives to this rank.
    origins: number of Megatron-LM's micro-batches in one shared micro-batch.
    group, groups: index of this rank's group, and the number of groups. All groups have the same size.
    """

    rank: int
    ranks: int
    origin: int = 0
    origins: int = 1
    group: int = 0
    groups: int = 1

    @classmethod
    def context_parallel(cls) -> "Domain":
        return cls(mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size())

    @classmethod
    def data_parallel(cls) -> "Domain":
        rank = mpu.get_data_parallel_rank(with_context_parallel=True)
        ranks = mpu.get_data_parallel_world_size(with_context_parallel=True)
        origin, origins = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        groups = number_of_groups(origins)
        ranks, origins = ranks // groups, origins // groups
        return cls(rank % ranks, ranks, origin % origins, origins, rank // ranks, groups)

    def samples(self, indices: Sequence[int], areas: Callable[[np.ndarray], np.ndarray | None]) -> list["Sample"]:
        """The samples that these ranks share, in Megatron-LM's order.

        indices: those of Megatron-LM's sampler for this rank.
        areas: samples int64 [sample] -> their query-key pairs int64 [sample], or None if only their tokens tell.
        """
        if self.origins == self.groups == 1:
            return [Sample(index, 0) for index in indices]
        size = len(indices)
        first = indices[0] - (self.group * self.origins + self.origin) * size
        assert list(indices) == list(range(indices[0], indices[0] + size)), "samples of a rank must be consecutive"
        assert first >= 0, "samples of data-parallel ranks must be consecutive"
        members: Sequence[int] = range(self.group * self.origins, (self.group + 1) * self.origins)
        if self.groups > 1:
            number = self.groups * self.origins
            area = areas(np.arange(first, first + number * size))
            if area is not None:
                members = np.flatnonzero(
                    deal_areas(area.reshape(number, size).sum(1), self.groups) == self.group
                ).tolist()
        return [
            Sample(first + member * size + place, origin)
            for origin, member in enumerate(members)
            for place in range(size)
        ]


@dataclass(frozen=True)
class Sample:
    """A sample of a micro-batch. index: in the dataset. origin: of its tokens, among those that the ranks share."""

    index: int
    origin: int


@dataclass(frozen=True)
class LossTokens:
    """The tokens with a loss of one micro-batch, by origin.

    origin: int [row], of each row's token; any in padding.
    origins: their number.
    process_group: the ranks that share the micro-batch.
    counted: [shift, origin], tokens with a loss on all ranks, by the shift of rows in their documents. None if they
        have not been counted before.
    """

    origin: torch.Tensor
    origins: int
    process_group: dist.ProcessGroup
    counted: torch.Tensor | None = None

    def count(self, masks: torch.Tensor) -> torch.Tensor:
        """[shift, origin], tokens with a loss on all ranks. All of them call this together.

        masks: [shift, row], 1 where a token counts, 0 elsewhere.
        """
        if self.counted is not None:
            return self.counted
        tokens = masks.new_zeros(len(masks), self.origins).index_add_(1, self.origin, masks)
        dist.all_reduce(tokens, group=self.process_group)
        return tokens

    def weights(self, mask: torch.Tensor) -> torch.Tensor:
        """[row], weight of each row of this rank in the loss of the next token: 1 / (tokens with a loss of its origin),
        or 0 without a loss. All ranks that share the micro-batch call this together. mask: [row]."""
        return self.by_origin(mask[None], self.count(mask[None])[:1])[0]

    def by_origin(self, masks: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """`masks` [shift, row] divided by `tokens` [shift, origin] of each row's origin."""
        return masks / tokens.to(masks.dtype).clamp(min=1)[:, self.origin]
