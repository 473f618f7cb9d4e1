"""Gradual global magnitude pruning: the schedule of sparsity, and the threshold of magnitude.

Sparsity grows as a cubic (Zhu and Gupta, arXiv 1710.01878, section 3): fast while many weights are redundant, and
slowly at the end. The weights with the smallest magnitude in the whole model are pruned first, so layers keep different
fractions of their weights. A global threshold needs the magnitudes of all pipeline stages: `global_threshold` computes
it exactly from three histograms of 2,048 counts, for any number of weights.
"""

from collections.abc import Callable, Iterable

import torch

__all__ = ["cubic_sparsity", "global_threshold", "is_pruning_iteration"]

_BITS = (11, 11, 10)  # of a float32, from the highest; magnitudes sort as their bits do


def is_pruning_iteration(iteration: int, *, start: int, end: int, interval: int) -> bool:
    """Whether weights are pruned in `iteration`: at `start`, every `interval` iterations after it, and at `end`."""
    return start <= iteration <= end and (not (iteration - start) % interval or iteration == end)


def cubic_sparsity(iteration: int, *, final: float, start: int, end: int, interval: int) -> float:
    """The fraction of zero weights in `iteration`, a step function that grows at each pruning iteration.

    final: the fraction from `end` on.
    start, end: first and last pruning iteration.
    interval: iterations between prunings.
    """
    if iteration < start:
        return 0.0
    if iteration >= end:
        return final
    last = iteration - (iteration - start) % interval
    return final * (1 - (1 - (last - start) / (end - start)) ** 3)


def global_threshold(
    weights: Callable[[], Iterable[torch.Tensor]], count: int, add_up: Callable[[torch.Tensor], torch.Tensor]
) -> float:
    """The magnitude, as a float32, of the `count`-th smallest of all weights; -1 if `count` is 0.

    weights: returns the tensors of this rank; called three times.
    count: number of weights to prune.
    add_up: sums an int64 tensor over all ranks.

    Other weights may have the same magnitude, so more than `count` weights may be at or below the threshold.
    """
    if count <= 0:
        return -1.0
    prefix, below, shift = 0, 0, sum(_BITS)
    for bits in _BITS:
        shift -= bits
        counts = _count(weights(), prefix, shift, bits)
        total = add_up(counts).cumsum(0) + below
        digit = int((total < count).sum())
        assert digit < len(counts), f"{count} is more than there are weights"
        below = int(total[digit - 1]) if digit else below
        prefix = prefix << bits | digit
    return float(torch.tensor(prefix, dtype=torch.int32).view(torch.float32))


def _count(weights: Iterable[torch.Tensor], prefix: int, shift: int, bits: int) -> torch.Tensor:
    """Counts of the values of the next `bits` bits, among magnitudes whose bits begin with `prefix`."""
    counts = torch.zeros(1 << bits, dtype=torch.int64)
    for weight in weights:
        magnitude = weight.detach().abs().to(torch.float32).flatten().view(torch.int32)
        leading = magnitude >> (shift + bits)
        digits = (magnitude[leading == prefix] >> shift) & ((1 << bits) - 1)
        counts += torch.bincount(digits, minlength=1 << bits).cpu()
    return counts
