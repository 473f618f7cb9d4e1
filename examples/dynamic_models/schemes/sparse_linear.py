"""A linear layer that multiplies by a pruned weight as a sparse matrix.

The weight stays a dense parameter with zeros, so optimizer and checkpoints do not change. Its pattern is stored beside
it as compressed rows (CSR) of the matrix and of its transpose, and changes only when weights are pruned. Forward and
input gradient multiply by the sparse matrix; the weight gradient is computed only for weights that remain. A sparse
product costs more per weight than a dense one, so it pays only below some density, a tenth or less
(`benchmarks/log/layers-plans.md`).
"""

import warnings
from typing import Any

import torch

__all__ = ["SparsePattern", "sparse_linear"]


class SparsePattern:
    """The positions of the weights that remain. mask: bool [out, in]."""

    def __init__(self, mask: torch.Tensor) -> None:
        self.shape = mask.shape
        rows, columns = mask.nonzero(as_tuple=True)
        self.flat = rows * mask.shape[1] + columns
        self.rows, self.columns = _starts(rows, mask.shape[0]), columns
        self._order = torch.argsort(columns, stable=True)  # that of the transpose
        self._t_rows, self._t_columns = _starts(columns[self._order], mask.shape[1]), rows[self._order]

    @property
    def density(self) -> float:
        """The fraction of weights that remain."""
        return self.flat.numel() / self.shape.numel()

    def matrix(self, values: torch.Tensor) -> torch.Tensor:
        """The matrix [out, in] in compressed rows. values: of the remaining weights, row by row."""
        return _csr(self.rows, self.columns, values, tuple(self.shape))

    def transpose(self, values: torch.Tensor) -> torch.Tensor:
        """The transpose [in, out] in compressed rows."""
        return _csr(self._t_rows, self._t_columns, values[self._order], (self.shape[1], self.shape[0]))


def _starts(rows: torch.Tensor, count: int) -> torch.Tensor:
    return torch.nn.functional.pad(torch.bincount(rows, minlength=count).cumsum(0), (1, 0))


def _csr(rows: torch.Tensor, columns: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(Sparse CSR|sparse CSR|Sparse invariant).*")
        return torch.sparse_csr_tensor(rows, columns, values, shape, check_invariants=False)


class _SparseLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, pattern: SparsePattern) -> torch.Tensor:
        values = weight.detach().flatten()[pattern.flat]
        flat = hidden.reshape(-1, hidden.shape[-1])
        ctx.pattern = pattern
        ctx.save_for_backward(flat, values)
        output = (pattern.matrix(values) @ flat.T).T
        return output.reshape(*hidden.shape[:-1], pattern.shape[0]).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        flat, values = ctx.saved_tensors
        pattern = ctx.pattern
        gradient = gradients[0].reshape(-1, gradients[0].shape[-1])
        of_hidden = of_weight = None
        if ctx.needs_input_grad[0]:
            of_hidden = (pattern.transpose(values) @ gradient.T).T
            of_hidden = of_hidden.reshape(*gradients[0].shape[:-1], pattern.shape[1]).contiguous()
        if ctx.needs_input_grad[1]:
            empty = pattern.matrix(torch.zeros_like(values))
            sampled = torch.sparse.sampled_addmm(empty, gradient.T.contiguous(), flat.contiguous())
            of_weight = torch.zeros(pattern.shape, dtype=values.dtype, device=values.device)
            of_weight.view(-1)[pattern.flat] = sampled.values()
        return of_hidden, of_weight, None


def sparse_linear(hidden: torch.Tensor, weight: torch.Tensor, pattern: SparsePattern) -> torch.Tensor:
    """hidden [..., in] times the transpose of `weight` [out, in], which is zero outside of `pattern` -> [..., out].

    Differentiable; the gradient of `weight` is zero outside of `pattern`. float32 and float64.
    """
    return _SparseLinear.apply(hidden, weight, pattern)
