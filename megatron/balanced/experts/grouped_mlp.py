"""Experts as two grouped GEMMs (`--moe-grouped-gemm`) without Transformer Engine.

Megatron-LM's grouped experts are those of Transformer Engine; without it the flag has no effect, and experts run one
after another, which leaves a GPU idle between many small products. Here all experts of a rank share two grouped GEMMs
of torch. Parameters, checkpoints and the activation between the products are those of the sequential experts.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig

from balancing.upload import upload
from megatron.balanced.experts.moe_layer import ReplicatedSequentialMLP

__all__ = ["GroupedMLP"]


# Elements of a weight from which a product of its own is cheaper than a copy for the grouped one: a copy of n bfloat16
# moves 4 n bytes, on an H100 at 3.35 TB/s, and a launch takes 5 us of the host. Modelled, not measured.
_LARGE = 1 << 22


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` [rows, columns] with the strides that grouped GEMM requires. An expanded gradient, as of a sum, does not
    have them; one without rows may not have them although torch calls it contiguous."""
    return tensor.contiguous() if tensor.numel() else tensor.new_empty(tensor.shape)


def _as_one(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A view [group, out, in] of weights [out, in] that follow one another in memory at equal distances, as those of
    slots do; None for others."""
    first, size = weights[0], weights[0].element_size()
    if not all(weight.is_contiguous() for weight in weights):
        return None
    at = [weight.data_ptr() for weight in weights]
    step = at[1] - at[0] if len(at) > 1 else first.nbytes
    if any(right - left != step for left, right in pairwise(at)) or step < first.nbytes or step % size:
        return None
    if any(each.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() for each in weights):
        return None  # neighbours by chance
    return first.detach().as_strided((len(at), *first.shape), (step // size, *first.stride()))


class _Groups:
    """The rows of each group, known to the host and to the device.

    Only groups with rows take part in products. On B200 torch's grouped GEMM leaves weight gradients of empty groups
    unset (pytorch#172439). Products with the weights may pass over them.

    counts: rows of each group.
    device: where the rows are.
    """

    def __init__(self, counts: list[int], device: torch.device) -> None:
        self.counts = counts
        self.filled = [group for group, count in enumerate(counts) if count]
        self.stops = list(accumulate(counts))
        both = [*self.stops, *(self.stops[group] for group in self.filled)]
        table = upload(torch.tensor(both, dtype=torch.int32), device)
        self.ends, self.filled_ends = table.split([len(counts), len(self.filled)])

    def parts(self) -> list[tuple[int, slice]]:
        """The groups with rows, and which rows those are."""
        return [(group, slice(self.stops[group] - self.counts[group], self.stops[group])) for group in self.filled]


def _one_by_one(weight: torch.Tensor, stored: bool) -> bool:
    """Whether each group has its own product: in float64, which torch's grouped GEMM does not support, and where
    weights like this one would be copied at a higher cost. stored: whether the weights are one tensor in memory."""
    return weight.dtype is torch.float64 or (not stored and weight.numel() >= _LARGE)


def _with_weights(
    rows: torch.Tensor, groups: _Groups, weights: Sequence[torch.Tensor], *, transposed: bool
) -> torch.Tensor:
    """Each group of rows times its weight, or times its transpose. weights: [out, in] of each group."""
    columns = weights[0].shape[0 if transposed else 1]
    if not groups.filled:
        return rows.new_empty(0, columns)
    one = _as_one(weights)
    if _one_by_one(weights[0], one is not None):
        result = rows.new_empty(len(rows), columns)
        for group, part in groups.parts():
            weight = weights[group].detach()
            torch.mm(rows[part], weight.t() if transposed else weight, out=result[part])
        return result
    ends = groups.ends
    if one is None:
        one, ends = torch.stack([weights[group] for group in groups.filled]), groups.filled_ends
    return torch.nn.functional.grouped_mm(rows, one.transpose(1, 2) if transposed else one, offs=ends)


def _of_weights(
    gradient: torch.Tensor, rows: torch.Tensor, groups: _Groups, weight: torch.Tensor
) -> list[torch.Tensor]:
    """Gradients [out, in] of the weights, zero for groups without rows. weight: one of them."""
    empty = len(groups.counts) - len(groups.filled)
    if weight.dtype is torch.float64:
        filled = weight.new_empty(len(groups.filled), *weight.shape)
        for result, (_, part) in zip(filled, groups.parts(), strict=True):
            torch.mm(gradient[part].t(), rows[part], out=result)
    elif groups.filled:
        filled = torch.nn.functional.grouped_mm(gradient.t(), rows, offs=groups.filled_ends)
    else:
        filled = weight.new_empty(0, *weight.shape)
    of_filled, of_empty = iter(filled), iter(weight.new_zeros(empty, *weight.shape) if empty else ())
    return [next(of_filled if count else of_empty) for count in groups.counts]


class _GroupedProduct(torch.autograd.Function):
    """A linear layer of each group of rows: rows [tokens, in], weights [out, in] of each group -> [tokens, out].

    Saves the weights. Where they do not follow one another in memory, they are stacked for each product and direction:
    keeping the stack for each micro-batch in flight would take as much memory as all experts.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, groups: _Groups, *weights: torch.Tensor) -> torch.Tensor:
        rows = _rows(rows)
        ctx.groups = groups
        ctx.save_for_backward(rows, *weights)
        return _with_weights(rows, groups, weights, transposed=True)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, *weights = ctx.saved_tensors
        gradient = _rows(gradients[0])
        of_rows: torch.Tensor | None = None
        of_weights: Sequence[torch.Tensor | None] = [None] * len(weights)
        if ctx.needs_input_grad[0]:
            of_rows = _with_weights(gradient, ctx.groups, weights, transposed=False)
        if any(ctx.needs_input_grad[2:]):
            of_weights = _of_weights(gradient, rows, ctx.groups, weights[0])
        return of_rows, None, *of_weights


class _GroupedLinear(torch.nn.Module):
    """One linear layer of all experts, for one call. It does not own its weights."""

    def __init__(self, groups: _Groups, weights: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._groups, self._weights = groups, tuple(weights)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _GroupedProduct.apply(rows, self._groups, *self._weights), None


class _GroupedExperts(MLP):
    """Megatron's MLP with grouped linear layers, so that the computation between them is Megatron's."""

    def __init__(self, like: MLP, linear_fc1: torch.nn.Module, linear_fc2: torch.nn.Module) -> None:
        torch.nn.Module.__init__(self)
        self.config, self.activation_func = like.config, like.activation_func
        self.linear_fc1, self.linear_fc2 = linear_fc1, linear_fc2


class GroupedMLP(ReplicatedSequentialMLP):
    """The experts of one layer on this rank, computed together. Experts must have no biases.

    Weights of the same kind follow one another in memory, so that the products need no copy of them. A distributed
    optimizer moves them into its own buffer, in the opposite order.
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(num_local_experts, config, *args, **kwargs)
        self._lay_out()

    def _apply(self, fn: Callable, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # to another device or type, which makes each weight a tensor of its own
        self._lay_out()
        return self

    def _lay_out(self) -> None:
        """Move the weights of each kind into one tensor, where each has its own memory so far."""
        for weights in zip(*(expert.parameters() for expert in self.local_experts), strict=True):
            # Not sharded, not quantized, not on the meta device, and in no buffer.
            own = (type(w) is torch.nn.Parameter and not w.is_meta for w in weights)
            if not all(own) or any(w.untyped_storage().nbytes() != w.nbytes for w in weights):
                continue
            for weight, part in zip(weights, torch.stack([w.detach() for w in weights]), strict=True):
                weight.data = part

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
        groups = _Groups(counts, hidden.device)
        # With expert tensor parallelism each rank has a part of both weights, and the dispatcher sums the outputs.
        fc1, fc2 = zip(*experts, strict=True)
        return _GroupedExperts(self.local_experts[0], _GroupedLinear(groups, fc1), _GroupedLinear(groups, fc2))(
            hidden, probs
        )[0]
