"""The parts of a model that no plan moves, and the chunk that has each.

embedding  on the first chunk
head       the final norm, the output layer and the loss, on the last chunk
tail       the layers of multi-token prediction. They come after all others, on one chunk, which need not be the last
           one. Chunks after it have no layers

Planners, costs and bytes take one value for each part, in the order of `NAMES`, and no more is known of a part.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["NAMES", "add_fixed"]

NAMES = ("embedding", "head", "mtp")  # in a report


def add_fixed(values: Iterable[Any], sums: NDArray[np.float64], behind: int = 0) -> None:
    """Add the value of each fixed part to its chunk, in place.

    values: [part], in the order of `NAMES`.
    sums: float array [..., chunk] along the pipeline, or [..., stage].
    behind: number of chunks after that of the tail (`StagePlan.behind`).
    """
    for value, chunk in zip(values, (0, -1, -1 - behind), strict=True):
        sums[..., chunk % sums.shape[-1]] += value
