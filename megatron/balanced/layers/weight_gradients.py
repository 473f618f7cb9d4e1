"""Linear layers whose weight gradients are computed later, in an order and at moments that the caller chooses.

The backward of a linear layer returns the gradient of its input, and queues the product that gives the gradient of its
weight. What Megatron-LM does behind this product is done when it is computed: the gradient is added to `main_grad` and,
for the last micro-batch of a step, the bucket learns that it is ready. Products of one weight are computed in the order
of micro-batches, so the sums are the same, bit for bit.

Autograd does not see these weights. If it did, it would run the hooks of their gradients in the backward pass.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

__all__ = ["WeightGradients", "deferring"]


def deferring(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The linear layers in `module` that may defer weight gradients: not those of experts that have replicas, whose
    gradients are sent on as soon as the backward pass has left them."""
    if getattr(module, "sends_gradients", False):
        return
    if isinstance(module, ColumnParallelLinear | RowParallelLinear):
        yield module
    for child in module.children():
        yield from deferring(child)


class WeightGradients:
    """The weight gradients of one rank that are not computed yet.

    chunks: its model chunks, wrapped for data parallelism.
    timed: a context manager around the weight gradients of a layer of a model chunk, for who measures layers.
    """

    def __init__(self, chunks: list[Any], timed: Callable[[Any, int], Any] | None = None) -> None:
        self._chunks = chunks
        self._timed = timed or (lambda layer, chunk: contextlib.nullcontext())
        self._defers = False
        # One entry for each layer and backward pass, oldest first: the layer, its chunk, and products.
        self._deferred: deque[tuple[Any, int, list[Callable[[], None]]]] = deque()
        self._is_open = False  # whether the newest entry is of the backward pass in progress

    def watch(self, layer: torch.nn.Module, chunk: int) -> None:
        """Let the linear layers in `layer`, of model chunk `chunk`, defer their weight gradients."""
        for module in deferring(layer):
            module._forward_impl = partial(self._linear, module._forward_impl, layer, chunk)

    def defer(self, on: bool) -> None:
        """Whether weight gradients of the backward passes from now on are deferred."""
        assert on or not self._deferred, "weight gradients are left"
        self._defers = on

    def compute(self, pieces: int) -> None:
        """Compute those of the `pieces` oldest backward passes of layers, fewer if there are not as many.

        Called between backward passes.
        """
        self._is_open = False
        for _ in range(min(pieces, len(self._deferred))):
            layer, chunk, products = self._deferred.popleft()
            with self._timed(layer, chunk):
                for product in products:
                    product()

    def compute_all(self) -> None:
        self.compute(len(self._deferred))

    def _linear(
        self,
        original: Callable[..., torch.Tensor],
        layer: Any,
        chunk: int,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: Any,
        **rest: Any,
    ) -> torch.Tensor:
        """In the place of a linear layer's `_forward_impl`."""
        defers = self._defers and torch.is_grad_enabled() and input.requires_grad
        if not (defers and weight in self._chunks[chunk].param_to_bucket_group):
            return original(
                input=input,
                weight=weight,
                bias=bias,
                allreduce_dgrad=allreduce_dgrad,
                sequence_parallel=sequence_parallel,
                tp_group=tp_group,
                **rest,
            )
        whole = input
        if sequence_parallel:
            whole = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
        elif allreduce_dgrad:
            whole = copy_to_tensor_model_parallel_region(input, group=tp_group)
        group = tp_group if sequence_parallel else None
        part = input.detach() if sequence_parallel else None
        later = partial(self._later, layer, chunk, (weight, bias))
        return _DeferredLinear.apply(
            whole, part, weight.detach(), None if bias is None else bias.detach(), group, later
        )

    def _later(
        self,
        layer: Any,
        chunk: int,
        parameters: tuple[torch.nn.Parameter, torch.nn.Parameter | None],
        gradients: Callable[[], tuple[torch.Tensor, torch.Tensor | None]],
    ) -> None:
        """Queue `gradients`, a function that computes those of `parameters`, a weight and perhaps its bias."""
        ddp = self._chunks[chunk]
        is_last = [
            p is not None and ddp.ddp_config.overlap_grad_reduce and ddp.param_to_bucket_group[p].is_last_microbatch
            for p in parameters
        ]

        @torch.no_grad()
        def compute() -> None:
            for parameter, gradient, last in zip(parameters, gradients(), is_last, strict=True):
                if parameter is None:
                    continue
                parameter.main_grad.add_(gradient)
                if last:
                    _register(ddp, parameter)

        if not self._is_open or self._deferred[-1][0] is not layer:
            self._deferred.append((layer, chunk, []))
            self._is_open = True
        self._deferred[-1][2].append(compute)


def _register(ddp: Any, parameter: torch.nn.Parameter) -> None:
    """The gradient of `parameter` is complete, though by now other micro-batches may be in their backward passes."""
    bucket_group = ddp.param_to_bucket_group[parameter]
    was_last, bucket_group.is_last_microbatch = bucket_group.is_last_microbatch, True
    bucket_group.register_grad_ready(parameter, ddp.force_all_reduce)
    bucket_group.is_last_microbatch = was_last


class _DeferredLinear(torch.autograd.Function):
    """`whole @ weight.T + bias`, with the gradients of weight and bias given to `later`."""

    @staticmethod
    def forward(
        ctx: Any,
        whole: torch.Tensor,
        part: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        group: Any,
        later: Callable[..., None],
    ) -> torch.Tensor:
        """part: this rank's part of `whole`, which then is not kept but gathered again; None to keep `whole`."""
        ctx.save_for_backward(whole if part is None else part, weight)
        ctx.has_bias, ctx.group, ctx.later = bias is not None, group, later
        output = torch.matmul(whole, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept, weight = ctx.saved_tensors

        def gradients() -> tuple[torch.Tensor, torch.Tensor | None]:
            whole = kept if ctx.group is None else gather_from_sequence_parallel_region(kept, group=ctx.group)
            rows = gradient.reshape(-1, gradient.shape[-1])
            product = rows.t().matmul(whole.reshape(-1, whole.shape[-1]))
            return product, rows.sum(dim=0) if ctx.has_bias else None

        ctx.later(gradients)
        return gradient.matmul(weight), None, None, None, None, None
