"""Merging partial results of attention into a rank's earlier results, and adding gradients, in one operation a round.

On a GPU each is one Triton kernel that reads and writes each element once. Elsewhere, and where Triton does not
compile, each is a few operations of torch. All merge and add in float32 (float64 stays float64).
"""

import functools
import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from balancing.kernels.base import accumulation_dtype, merge

__all__ = ["add_rows", "choose_add", "choose_merge", "merge_rows"]

Merge = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, "slice | torch.Tensor"], None]
Add = Callable[..., None]  # as `add_rows`


def merge_rows(
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    more_out: torch.Tensor,
    more_logsumexp: torch.Tensor,
    rows: slice | torch.Tensor,
) -> None:
    """Merge results of attention to more keys into rows of `out` and `logsumexp`, in place.

    out: [row, heads, head_size], in `accumulation_dtype`.
    logsumexp: [heads, row], in `accumulation_dtype`.
    more_out: [token, heads, head_size], of the other keys.
    more_logsumexp: [heads, token], of the other keys.
    rows: the row of each token; no row occurs twice.
    """
    out[rows], logsumexp[:, rows] = merge(out[rows], logsumexp[:, rows], more_out, more_logsumexp)


def add_rows(
    total: torch.Tensor,
    rows: slice | torch.Tensor,
    parts: tuple[torch.Tensor, ...],
    terms: torch.Tensor | None = None,
    stores: bool = False,
) -> None:
    """Add one part, or two side by side, to rows of `total`, in place.

    total: [row, heads, sizes of the parts together]. What is added is summed in its `accumulation_dtype`.
    rows: the rows to which tokens are added; no row occurs twice.
    parts: [token, heads, size], in any type.
    terms: int32 [term, row], for each of `rows` the tokens to sum, in this order; -1 for no further term. None if each
        row receives one token, in their order.
    stores: whether the sums replace the rows.
    """
    start, wide = 0, accumulation_dtype(total.dtype)
    for part in parts:
        into = total[..., start : start + part.shape[2]]
        start += part.shape[2]
        if terms is not None:
            each = part.index_select(0, terms.clamp(min=0).flatten()).to(wide).unflatten(0, terms.shape)
            part = each.masked_fill_((terms < 0)[..., None, None], 0).sum(0)
        if stores:
            into[rows] = part.to(total.dtype)
        elif isinstance(rows, slice):
            into[rows] += part
        else:
            into.index_add_(0, rows, part.to(total.dtype))


def choose_merge(device: torch.device) -> Merge:
    """The function that merges on a device: as `merge_rows`."""
    return _fused() if device.type == "cuda" else merge_rows


def choose_add(device: torch.device) -> Add:
    """The function that adds gradients on a device: as `add_rows`."""
    return _fused_add() if device.type == "cuda" else add_rows


@functools.cache
def _fused() -> Merge:
    """The Triton kernel if it compiles here and gives the result of `merge_rows`, else `merge_rows`."""
    draw = torch.Generator().manual_seed(0)
    parts: list[Any] = [
        torch.randn(*shape, generator=draw).cuda() for shape in ((8, 2, 16), (2, 8), (4, 2, 16), (2, 4))
    ]
    rows = torch.tensor([6, 0, 3, 7], dtype=torch.int32).cuda()
    calls = [(*parts, which) for which in (rows, slice(2, 6))]
    what = "partial results of attention are merged"
    return _if_right("merge_rows_fused", merge_rows, calls, what)


@functools.cache
def _fused_add() -> Add:
    """The Triton kernel if it compiles here and gives the result of `add_rows`, else `add_rows`."""
    draw = torch.Generator().manual_seed(0)
    total, part, more = (torch.randn(*shape, generator=draw).cuda() for shape in ((8, 2, 24), (4, 2, 16), (4, 2, 8)))
    rows, sums = (torch.tensor(numbers, dtype=torch.int32).cuda() for numbers in ([6, 0, 3, 7], [[3, 1], [2, -1]]))
    calls: list[tuple[Any, ...]] = [
        (total, rows, (part, more)),
        (total, slice(2, 6), (part, more)),
        (total, rows[:2], (part, more), sums),
        (total, rows, (part,)),
        (total, rows[:2], (part, more), sums, True),
    ]
    return _if_right("add_rows_fused", add_rows, calls, "gradients of keys are added")


def _if_right(name: str, plain: Any, calls: Sequence[tuple[Any, ...]], what: str) -> Any:
    """The kernel `name` of `rows` if it changes its tensors as `plain` does in these calls; else `plain`."""
    try:
        fused = getattr(importlib.import_module("balancing.kernels.rows"), name)
        for arguments in calls:
            found = []
            for one in (plain, fused):
                copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
                one(*copies)
                found.append([x for x in copies if isinstance(x, torch.Tensor)])
            torch.testing.assert_close(*found)
    except Exception as error:  # no Triton, no compiler for it, or an error in either
        warnings.warn(
            f"{what} by operations of torch; the fused kernel does not run here: "
            f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}",
            stacklevel=3,
        )
        return plain
    return fused
