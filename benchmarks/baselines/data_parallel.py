"""How RL and fine-tuning loops distribute whole sequences over data-parallel ranks and micro-batches.

Written after their published code and documents, without copying code.

- drawn: sequences in their order, the same number per rank. A rank packs them in this order up to the token limit.
- verl: `balance_batch` distributes sequences over ranks by Karmarkar and Karp's differencing method, the same number
  per rank, by the work 24,576 L + L^2 (a 7B model). Each rank distributes its sequences over micro-batches by the same
  method, in any number per micro-batch. There are so many micro-batches that tokens would fit on average; all ranks
  have as many as the rank that needs most. Small ones come first and last. Only work counts, so a micro-batch may have
  more tokens than the limit.
- slime: sequences of all ranks are first packed into micro-batches, each into the first one with room. The fullest ones
  are split until their number is a multiple of the ranks. Then whole micro-batches are distributed over ranks by the
  differencing method and the same work, the same number per rank (`--balance-data`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from balancing.sequences import SequencePlan
from balancing.sequences.planners.minimal_reshard import Lengths, zigzag
from balancing.sequences.sequence_plan import same_exchange
from benchmarks.baselines.micro_batches import differencing_deal

__all__ = ["DEALS", "Dealt", "as_drawn", "deal", "work"]


def as_drawn(lengths: Lengths) -> SequencePlan:
    """Each rank computes its own sequences. lengths: tokens of the sequences of each rank."""
    flat = tuple(length for of_rank in lengths for length in of_rank)
    given = tuple(zigzag(lengths, 1))
    return SequencePlan(flat, len(lengths), "given", given, given, same_exchange(given, flat, "gather"))


class Dealt(NamedTuple):
    """rank, micro_batch: int64 [sequence]. micro_batches: of each rank."""

    rank: np.ndarray
    micro_batch: np.ndarray
    micro_batches: int


def work(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """int64 [sequence], in the unit of verl: a token's linear layers, and pairs of tokens."""
    tokens = np.asarray(lengths, dtype=np.int64)
    return 24576 * tokens + tokens**2


def _drawn(lengths: np.ndarray, ranks: int, limit: int) -> Dealt:
    rank = np.arange(len(lengths)) * ranks // len(lengths)
    micro_batch = np.zeros(len(lengths), dtype=np.int64)
    for each in range(ranks):
        filled = at = 0
        for sequence in np.flatnonzero(rank == each):
            if filled and filled + lengths[sequence] > limit:
                at, filled = at + 1, 0
            micro_batch[sequence] = at
            filled += int(lengths[sequence])
    return Dealt(rank, micro_batch, int(micro_batch.max()) + 1)


def _verl(lengths: np.ndarray, ranks: int, limit: int) -> Dealt:
    weights = work(lengths)
    rank = differencing_deal(weights.tolist(), ranks, equal=True)
    number = int(max(-(-np.bincount(rank, lengths, ranks).astype(np.int64) // limit)))
    micro_batch = np.zeros(len(lengths), dtype=np.int64)
    for each in range(ranks):
        own = np.flatnonzero(rank == each)
        dealt = differencing_deal(weights[own].tolist(), number)
        heavy_first = np.argsort(-np.bincount(dealt, weights[own], number), kind="stable")
        order = [*heavy_first[::2][::-1], *heavy_first[1::2]]
        micro_batch[own] = np.argsort(order)[dealt]
    return Dealt(rank, micro_batch, number)


def _slime(lengths: np.ndarray, ranks: int, limit: int) -> Dealt:
    bins: list[list[int]] = []
    for sequence, length in enumerate(lengths.tolist()):
        fits = (each for each in bins if int(lengths[each].sum()) + length <= limit)
        chosen = next(fits, None)
        if chosen is None:
            bins.append([sequence])
        else:
            chosen.append(sequence)
    while len(bins) % ranks:
        fullest = max((each for each in bins if len(each) > 1), key=lambda each: int(lengths[each].sum()))
        bins.append(fullest[1::2])
        fullest[:] = fullest[::2]
    rank_of_bin = differencing_deal([int(work(lengths[each]).sum()) for each in bins], ranks, equal=True)
    rank, micro_batch = (np.zeros(len(lengths), dtype=np.int64) for _ in range(2))
    for each in range(ranks):
        for at, number in enumerate(np.flatnonzero(rank_of_bin == each)):
            rank[bins[number]], micro_batch[bins[number]] = each, at
    return Dealt(rank, micro_batch, len(bins) // ranks)


DEALS = {"drawn": _drawn, "verl": _verl, "slime": _slime}


def deal(lengths: Sequence[int] | np.ndarray, ranks: int, limit: int, method: str) -> Dealt:
    """The rank and the micro-batch of each sequence of a step.

    lengths: tokens of each sequence; ranks divide their number.
    limit: tokens of a micro-batch on a rank, at least those of the longest sequence.
    method: "drawn", "verl" or "slime".
    """
    return DEALS[method](np.asarray(lengths, dtype=np.int64), ranks, limit)
