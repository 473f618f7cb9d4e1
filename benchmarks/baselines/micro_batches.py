"""How other systems distribute documents over micro-batches, as baselines.

- sorted: by length, assigned in turn, back and forth, so that the micro-batch with the longest document gets the
  shortest of the next round.
- differencing: Karmarkar and Karp's largest differencing method for several subsets, on squares of lengths; verl
  partitions batches of sequences with it.
- hybrid: Megatron-LM's scheduler of hybrid context parallelism, with a micro-batch in the place of each of its ranks.

None of them limits the tokens of a micro-batch.
"""

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.baselines.sequences import Scheduler, hybrid_groups

__all__ = ["deal", "differencing_deal", "hybrid_deal", "sorted_deal"]


def deal(lengths: Sequence[int], micro_batches: int, method: str) -> np.ndarray:
    """int64 [document], the micro-batch of each. method: "sorted", "differencing" or "hybrid"."""
    if method == "differencing":
        return differencing_deal([length**2 for length in lengths], micro_batches)
    return {"sorted": sorted_deal, "hybrid": hybrid_deal}[method](lengths, micro_batches)


def sorted_deal(lengths: Sequence[int], micro_batches: int) -> np.ndarray:
    """int64 [document], the micro-batch of each."""
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    place = np.arange(len(lengths)) % (2 * micro_batches)
    number = np.empty(len(lengths), dtype=np.int64)
    number[order] = np.minimum(place, 2 * micro_batches - 1 - place)
    return number


def differencing_deal(weights: Sequence[int], micro_batches: int, *, equal: bool = False) -> np.ndarray:
    """int64 [document], the micro-batch of each. weights: what is to be even, the squares of lengths for verl's. equal:
    whether each gets equally many documents, of which there are a multiple then.

    Partial deals of all micro-batches are merged two at a time, those with the largest spread first, the heavy subsets
    of one with the light subsets of the other.
    """
    order = sorted(range(len(weights)), key=lambda document: (int(weights[document]), document))
    several = micro_batches if equal else 1  # documents that a partial deal begins with, one in each of its subsets
    assert len(order) % several == 0, "documents do not divide"
    heap: list[tuple[int, int, list[tuple[int, Any]]]] = []
    for first in range(0, len(order), several):
        own = order[first : first + several]
        subsets: list[tuple[int, Any]] = [(0, ())] * (micro_batches - several) + [
            (int(weights[document]), (document, ())) for document in own
        ]  # documents as linked pairs
        heap.append((subsets[0][0] - subsets[-1][0], own[0], subsets))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, at, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        merged = sorted(
            ((a[0] + b[0], (a[1], b[1])) for a, b in zip(one, reversed(other), strict=True)), key=lambda each: each[0]
        )
        heapq.heappush(heap, (merged[0][0] - merged[-1][0], at, merged))
    number = np.zeros(len(weights), dtype=np.int64)
    for micro_batch, (_, documents) in enumerate(heap[0][2] if heap else []):
        left = [documents]
        while left:
            each = left.pop()
            if isinstance(each, int):
                number[each] = micro_batch
            else:
                left.extend(each)
    return number


def hybrid_deal(lengths: Sequence[int], micro_batches: int, scheduler: Scheduler | None = None) -> np.ndarray:
    """int64 [document], the micro-batch of each. scheduler: as in `sequences.hybrid_groups`, which see for errors.

    A micro-batch may hold the longest document alone, so each document is on one "rank"; what a rank holds in all of
    the scheduler's groups is a micro-batch.
    """
    number = np.zeros(len(lengths), dtype=np.int64)
    for group in hybrid_groups(lengths, micro_batches, max(lengths), scheduler):
        for document, ranks in group.items():
            number[document] = ranks[0]
    return number
