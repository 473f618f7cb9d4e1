"""Products of the experts of a rank: each multiplies its rows with its own weights.

Experts are small where there are many, and a host that starts the product of each apart is then slower than the GPU. A
grouped product is one kernel for all of them. PyTorch has one, of operands whose groups lie side by side:
`torch.nn.functional.grouped_mm`, in older releases `torch._grouped_mm`.

What it is never asked, because releases differ: groups without rows, which some leave unwritten (experts without rows
are left out of the call, and their gradients are zeros), and groups along the columns of an operand, whose offsets must
be multiples of 16 bytes. Here groups are along rows, of any number, so nothing is padded. A row's bytes must be a
multiple of 16.

Weights of experts do not lie side by side: data-parallel buffers hold parameters in reverse order, and replicas are in
another buffer. So each product copies its weights, forward and backward, into memory that is free again after it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from balancing.upload import upload

__all__ = ["Groups", "Product", "grouped_linear", "rows_of_biases", "torch_product"]

_ONES = 8  # columns of ones, 16 bytes


class Groups(NamedTuple):
    """Rows of each group, all above 0, and int32 [group], where each ends, on the device."""

    rows: list[int]
    ends: torch.Tensor


# (rows [row, k], weights [group, k, n], groups) -> [row, n], or (rows' columns [m, row], rows [row, n], groups) ->
# [group, m, n], of contiguous rows and weights or transposes of such.
Product = Callable[[torch.Tensor, torch.Tensor, Groups], torch.Tensor]


def _operator() -> Any:
    """PyTorch's grouped product. Raises NotImplementedError for a release without it."""
    found = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if found is None:
        raise NotImplementedError(f"torch {torch.__version__} has no grouped product")
    return found


def torch_product(left: torch.Tensor, right: torch.Tensor, groups: Groups) -> torch.Tensor:
    """PyTorch's grouped product, a `Product`. It has none of float64, for which groups are multiplied in turn."""
    if left.dtype is not torch.float64:
        result: torch.Tensor = _operator()(left, right, offs=groups.ends)
        return result
    if right.dim() == 3:
        return torch.cat([rows @ each for rows, each in zip(left.split(groups.rows), right, strict=True)])
    parts = zip(left.split(groups.rows, 1), right.split(groups.rows), strict=True)
    return torch.stack([columns @ rows for columns, rows in parts])


def grouped_linear(
    product: Product, rows: torch.Tensor, counts: Sequence[int], weights: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The linear layers of experts: [row, out], differentiable by rows and weights.

    rows: [row, in], those of the first expert first.
    counts: rows of each expert.
    weights: [expert] -> [out, in].
    """
    result: torch.Tensor = _GroupedLinear.apply(product, [*counts], rows, *weights)
    return result


def rows_of_biases(product: Product, counts: Sequence[int], biases: Sequence[torch.Tensor]) -> torch.Tensor:
    """[row, out], the bias of each row's expert, differentiable. biases: [expert] -> [out]."""
    result: torch.Tensor = _RowsOfBiases.apply(product, [*counts], *biases)
    return result


def _groups(counts: list[int], device: torch.device) -> Groups:
    rows = [count for count in counts if count]
    return Groups(rows, upload(np.cumsum(rows, dtype=np.int32), device))


def _of_groups[Each](every: Sequence[Each], counts: list[int]) -> list[Each]:
    """Those of experts that have rows."""
    return [each for each, count in zip(every, counts, strict=True) if count]


def _gradients(
    ctx: Any, found: torch.Tensor | None, like: Sequence[torch.Tensor], needs: Sequence[bool]
) -> list[torch.Tensor | None]:
    """[expert] -> its gradient. found: of experts that have rows."""
    parts = iter(() if found is None else found)
    own = [next(parts) if count else None for count in ctx.counts]
    return [
        None if not need else torch.zeros_like(each) if part is None else part
        for part, each, need in zip(own, like, needs, strict=True)
    ]


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Product, counts: list[int], rows: torch.Tensor, *weights: torch.Tensor) -> Any:
        rows = rows.contiguous()
        assert len(rows) == sum(counts), (len(rows), counts)
        ctx.product, ctx.counts = product, counts
        ctx.save_for_backward(rows, *weights)
        if not len(rows):
            return rows.new_empty(0, len(weights[0]))
        ctx.groups = _groups(counts, rows.device)
        return product(rows, torch.stack(_of_groups(weights, counts)).transpose(1, 2), ctx.groups)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        rows, *weights = ctx.saved_tensors
        gradient, (_, _, needs_rows, *needs) = gradients[0].contiguous(), ctx.needs_input_grad
        of_rows, of_weights = None, None
        if not len(rows):
            of_rows = torch.zeros_like(rows) if needs_rows else None
        else:
            if needs_rows:
                of_rows = ctx.product(gradient, torch.stack(_of_groups(weights, ctx.counts)), ctx.groups)
            if any(needs):
                of_weights = ctx.product(gradient.t(), rows, ctx.groups)
        return None, None, of_rows, *_gradients(ctx, of_weights, weights, needs)


class _RowsOfBiases(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Product, counts: list[int], *biases: torch.Tensor) -> Any:
        ctx.product, ctx.counts = product, counts
        ctx.save_for_backward(*biases)
        return torch.cat([bias.expand(count, -1) for bias, count in zip(biases, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        # A sum by index would add in any order on a GPU. A product with ones adds in one order, in float32.
        gradient, biases, found = gradients[0].contiguous(), ctx.saved_tensors, None
        if len(gradient):
            ones = gradient.new_ones(len(gradient), _ONES)
            found = ctx.product(gradient.t(), ones, _groups(ctx.counts, gradient.device))[:, :, 0]
        return None, None, *_gradients(ctx, found, biases, ctx.needs_input_grad[2:])
