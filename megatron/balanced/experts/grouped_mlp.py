"""Experts as two grouped GEMMs (`--moe-grouped-gemm`) without Transformer Engine.

Megatron-LM's grouped experts are those of Transformer Engine; without it the flag has no effect, and experts run one
after another, which leaves a GPU idle between many small products. Here all experts of a rank share two grouped GEMMs
of torch. Parameters, checkpoints and the activation between the products are those of the sequential experts.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.mlp import MLP

from balancing.upload import upload
from megatron.balanced.experts.moe_layer import ReplicatedSequentialMLP

__all__ = ["GroupedMLP"]


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` [rows, columns] with the strides that grouped GEMM requires. An expanded gradient, as of a sum, does not
    have them; one without rows may not have them although torch calls it contiguous."""
    return tensor.contiguous() if tensor.numel() else tensor.new_empty(tensor.shape)


def _grouped_mm(rows: torch.Tensor, others: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """torch's grouped GEMM; in float64, which it does not support, one product after another."""
    if rows.dtype is not torch.float64:
        return torch.nn.functional.grouped_mm(rows, others, offs=ends)
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    if others.dim() == 3:  # a matrix for each group of rows
        return torch.cat([part @ matrix for part, matrix in zip(rows.split(sizes), others, strict=True)])
    pairs = zip(rows.split(sizes, dim=1), others.split(sizes), strict=True)
    return torch.stack([left @ right for left, right in pairs])


class _GroupedProduct(torch.autograd.Function):
    """A linear layer of each group of rows: rows [tokens, in], ends int32 [group], weights [out, in] -> [tokens, out].

    Saves the weights and stacks them again for the backward pass: keeping the stack for each micro-batch in flight
    would take as much memory as all experts.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, ends: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        rows = _rows(rows)
        ctx.save_for_backward(rows, ends, *weights)
        return _grouped_mm(rows, torch.stack(weights).transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, ends, *weights = ctx.saved_tensors
        gradient = _rows(gradients[0])
        of_rows: torch.Tensor | None = None
        of_weights: Sequence[torch.Tensor | None] = [None] * len(weights)
        if ctx.needs_input_grad[0]:
            of_rows = _grouped_mm(gradient, torch.stack(weights), ends)
        if any(ctx.needs_input_grad[2:]):
            of_weights = _grouped_mm(gradient.t(), rows, ends).unbind()
        return of_rows, None, *of_weights


class _GroupedLinear(torch.nn.Module):
    """One linear layer of all experts, for one call. It does not own its weights."""

    def __init__(self, ends: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._ends, self._weights = ends, tuple(weights)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _GroupedProduct.apply(rows, self._ends, *self._weights), None


class _GroupedExperts(MLP):
    """Megatron's MLP with grouped linear layers, so that the computation between them is Megatron's."""

    def __init__(self, like: MLP, linear_fc1: torch.nn.Module, linear_fc2: torch.nn.Module) -> None:
        torch.nn.Module.__init__(self)
        self.config, self.activation_func = like.config, like.activation_func
        self.linear_fc1, self.linear_fc2 = linear_fc1, linear_fc2


class GroupedMLP(ReplicatedSequentialMLP):
    """The experts of one layer on this rank, computed together. Experts must have no biases."""

    def _run_homes(self, hidden: torch.Tensor, counts: list[int], probs: torch.Tensor) -> torch.Tensor:
        return self._grouped([self._weights_of(expert) for expert in self.local_experts], hidden, counts, probs)

    @staticmethod
    def _weights_of(expert: MLP) -> list[torch.Tensor]:
        """Both weights of an expert. Its modules are not called, so their forward pre-hooks are called here, such as
        the one that waits for gathered weights (`--overlap-param-gather`)."""
        for linear in (expert.linear_fc1, expert.linear_fc2):
            for hook in linear._forward_pre_hooks.values():
                hook(linear, ())
        return list(expert.parameters())

    def _run_replicas(
        self, replicas: list[list[torch.Tensor]], hidden: torch.Tensor, counts: list[int], probs: torch.Tensor
    ) -> torch.Tensor:
        return self._grouped(replicas, hidden, counts, probs)

    def _grouped(
        self, experts: list[list[torch.Tensor]], hidden: torch.Tensor, counts: list[int], probs: torch.Tensor
    ) -> torch.Tensor:
        ends = upload(torch.tensor(counts).cumsum(0, dtype=torch.int32), hidden.device)
        # With expert tensor parallelism each rank has a part of both weights, and the dispatcher sums the outputs.
        fc1, fc2 = zip(*experts, strict=True)
        return _GroupedExperts(self.local_experts[0], _GroupedLinear(ends, fc1), _GroupedLinear(ends, fc2))(
            hidden, probs
        )[0]
