"""The micro-batch of each document of a step, and the cost of each micro-batch.

A pipeline stage runs its micro-batches one after another, and all stages wait for the slowest. Sequences packed to one
number of tokens have equal work in linear layers and very unequal work in attention, so documents are dealt anew over
the micro-batches of a step. WLB-LLM (OSDI 2025) packs so too, but moves documents to later steps.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from balancing.cluster import Cluster
from balancing.sequences.cost import TILE, attention_seconds, linear_seconds
from balancing.sequences.sequence_plan import AttentionShape

__all__ = ["MicroBatchPlan", "document_seconds", "least_imbalance"]


@dataclass(frozen=True)
class MicroBatchPlan:
    """The micro-batch of each document of a step.

    lengths: tokens of each document.
    seconds: of each document in all layers, forward and backward, if its work were even over the ranks.
    micro_batch: of each document, from 0.
    micro_batches: of the step.
    method: the planner that made the plan.
    capacity: most tokens of a micro-batch, over all ranks; None for no limit.

    Raises ValueError unless each document is in exactly one micro-batch of the step, each micro-batch has a document,
    and none has more tokens than the capacity.
    """

    lengths: tuple[int, ...]
    seconds: tuple[float, ...]
    micro_batch: tuple[int, ...]
    micro_batches: int
    method: str
    capacity: int | None = None

    def __post_init__(self) -> None:
        if not len(self.lengths) == len(self.seconds) == len(self.micro_batch):
            raise ValueError(
                f"{len(self.micro_batch)} micro-batches and {len(self.seconds)} costs of {len(self.lengths)} documents"
            )
        number = np.array(self.micro_batch, dtype=np.int64)
        if (wrong := np.flatnonzero((number < 0) | (number >= self.micro_batches))).size:
            raise ValueError(f"document {wrong[0]} is in micro-batch {number[wrong[0]]} of {self.micro_batches}")
        if (empty := np.flatnonzero(np.bincount(number, minlength=self.micro_batches) == 0)).size:
            raise ValueError(f"micro-batch {empty[0]} of {self.micro_batches} has no document")
        if self.capacity is not None and int(self.tokens.max()) > self.capacity:
            fullest = int(self.tokens.argmax())
            raise ValueError(
                f"micro-batch {fullest} has {self.tokens[fullest]} tokens, over its capacity of {self.capacity}"
            )

    def documents(self, micro_batch: int) -> tuple[int, ...]:
        """The documents of one micro-batch, in the order of the step."""
        return self._by_micro_batch[micro_batch]

    @cached_property
    def tokens(self) -> np.ndarray:
        """int64 [micro-batch]."""
        total = np.zeros(self.micro_batches, dtype=np.int64)
        np.add.at(total, list(self.micro_batch), self.lengths)
        return total

    @cached_property
    def cost(self) -> np.ndarray:
        """float64 [micro-batch], seconds of its documents together."""
        return np.bincount(self.micro_batch, self.seconds, self.micro_batches)

    @property
    def imbalance(self) -> float:
        """The most expensive micro-batch over the mean."""
        return float(self.cost.max() / self.cost.mean())

    @cached_property
    def digest(self) -> str:
        """Hash of the plan, by which ranks can check that they follow the same one."""
        return hashlib.sha256(repr((self.lengths, self.micro_batch, self.micro_batches)).encode()).hexdigest()

    @cached_property
    def _by_micro_batch(self) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in range(self.micro_batches)]
        for document, number in enumerate(self.micro_batch):
            found[number].append(document)
        return tuple(map(tuple, found))


def document_seconds(lengths: Sequence[int] | np.ndarray, cluster: Cluster, shape: AttentionShape) -> np.ndarray:
    """float64 [document], seconds of forward and backward in all layers, the work even over the cluster's ranks.

    lengths: tokens of each document. Attention costs tiles, as in `cost`; layers with a sliding window cost theirs.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    rows = -(-tokens // TILE)
    tiles = rows * (rows + 1) // 2
    pairs = tiles * float(TILE**2)
    if shape.window is not None:
        beyond = np.maximum(rows - -(-shape.window // TILE), 0)  # rows of tiles that do not see the first ones
        hidden = beyond * (beyond - 1) // 2 * float(TILE**2)
        pairs = pairs - hidden * (shape.windowed_layers / shape.layers)
    of_pair, of_token = attention_seconds(1.0, cluster, shape), linear_seconds(1.0, cluster, shape)
    return np.asarray((pairs * of_pair + tokens * of_token) / cluster.world_size)


def least_imbalance(seconds: Sequence[float] | np.ndarray, micro_batches: int) -> float:
    """A lower bound of the imbalance of every deal of whole documents: 1 where they do not forbid an even one.

    seconds: of each document. The most expensive one is in some micro-batch, and some micro-batch of n has k + 1 of the
    k n + 1 most expensive ones. Memory may forbid more.
    """
    ordered = np.sort(np.asarray(seconds, dtype=np.float64))[::-1]
    before = np.concatenate([[0.0], np.cumsum(ordered)])
    mean, most = before[-1] / micro_batches, 0.0
    for first in range(0, len(ordered), micro_batches):  # the k + 1 cheapest of the `first + 1` most expensive ones
        together = first // micro_batches + 1
        most = max(most, before[first + 1] - before[first + 1 - together])
    return max(1.0, float(most / mean))
