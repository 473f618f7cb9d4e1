"""Operations that NumPy and torch name differently, for code that runs on arrays of either."""

from typing import Any

import numpy as np
import torch

from balancing.upload import upload

__all__ = ["Arrays"]


class Arrays:
    """Integer arrays: NumPy arrays without a device, torch tensors with one. `_xp` is the module with common names."""

    def __init__(self, device: Any) -> None:
        self._xp: Any = np if device is None else torch
        self._device = device

    def _array(self, values: np.ndarray) -> Any:
        return values if self._xp is np else upload(values, torch.device(self._device))

    def _zeros(self, like: Any, *shape: int) -> Any:
        return np.zeros(shape, dtype=np.int64) if self._xp is np else like.new_zeros(shape)

    def _transposed(self, values: Any) -> Any:
        if self._xp is np:
            return np.ascontiguousarray(values.T, dtype=np.int64)
        return values.T.to(torch.int64).contiguous()

    def _positive(self, values: Any) -> Any:
        return np.maximum(values, 0) if self._xp is np else values.clamp_min(0)

    def _at_least_one(self, values: Any) -> Any:
        return np.maximum(values, 1) if self._xp is np else values.clamp_min(1)

    def _of_least(self, values: Any) -> Any:
        """Cumulative sums of each column in ascending order: the smallest value, the sum of the two smallest, ..."""
        if self._xp is torch:
            return torch.sort(values, 0).values.cumsum(0)
        values = values.copy()
        values.sort(0)
        return np.add.accumulate(values, 0, out=values)

    def _least(self, values: Any) -> Any:
        return np.minimum.reduce(values) if self._xp is np else values.amin(0)  # the method min takes twice as long

    def _sum(self, values: Any) -> Any:
        return np.add.reduce(values) if self._xp is np else values.sum(0)
