"""Merging of partial results of attention into rows of those that a rank already has, in one operation a round.

On a GPU it is one Triton kernel, which reads and writes each number once; elsewhere, and where Triton does not compile,
a few operations of torch. Both merge in float32 (float64 stays float64).
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from balancing.sequences.engine.kernels import merge

__all__ = ["choose_merge", "merge_rows"]

Merge = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, "slice | torch.Tensor"], None]


def merge_rows(
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    more_out: torch.Tensor,
    more_logsumexp: torch.Tensor,
    rows: slice | torch.Tensor,
) -> None:
    """Merge results of attention to more keys into rows of `out` and `logsumexp`, in place.

    out: [row, heads, head_size], in `accumulation_dtype`.
    logsumexp: [heads, row], likewise.
    more_out: [token, heads, head_size], of the other keys.
    more_logsumexp: [heads, token], of the other keys.
    rows: of each token, each at most once.
    """
    out[rows], logsumexp[:, rows] = merge(out[rows], logsumexp[:, rows], more_out, more_logsumexp)


def choose_merge(device: torch.device) -> Merge:
    """What merges on a device."""
    return _fused() if device.type == "cuda" else merge_rows


@functools.cache
def _fused() -> Merge:
    """The Triton kernel if it compiles and merges rightly here, else the operations of torch."""
    draw = torch.Generator().manual_seed(0)
    parts: list[Any] = [
        torch.randn(*shape, generator=draw).cuda() for shape in ((8, 2, 16), (2, 8), (4, 2, 16), (2, 4))
    ]
    rows = torch.tensor([6, 0, 3, 7], dtype=torch.int32).cuda()
    try:
        from balancing.sequences.engine.merge_kernel import merge_rows_fused

        for which in (rows, slice(2, 6)):
            found = []
            for merge_in_place in (merge_rows, merge_rows_fused):
                out, logsumexp, more_out, more_logsumexp = (x.clone() for x in parts)
                merge_in_place(out, logsumexp, more_out, more_logsumexp, which)
                found.append((out, logsumexp))
            torch.testing.assert_close(*found)
    except Exception as error:  # no Triton, no compiler for it, or a fault of either
        warnings.warn(
            "partial results of attention are merged by operations of torch; the fused kernel does not run here: "
            f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}",
            stacklevel=2,
        )
        return merge_rows
    return merge_rows_fused
