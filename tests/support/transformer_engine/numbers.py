"""Rounding to 8 bits, and the scale with which the largest number still fits."""

import torch

__all__ = ["in_8_bits", "largest_of", "scale_of"]


def in_8_bits(numbers: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """The bytes of `numbers` as type `kind`; what is too large becomes the largest."""
    largest = torch.finfo(kind).max
    return numbers.clamp(-largest, largest).to(kind).view(torch.uint8)


def largest_of(rows: torch.Tensor) -> torch.Tensor:
    """The largest absolute value, 0 of none."""
    return rows.float().abs().max() if rows.numel() else torch.zeros(())


def scale_of(largest: torch.Tensor, largest_stored: float, power_of_two: bool) -> torch.Tensor:
    """What numbers up to `largest` are multiplied by."""
    scale = torch.where(largest > 0, largest_stored / largest, 1.0)
    return torch.exp2(torch.floor(torch.log2(scale))) if power_of_two else scale
