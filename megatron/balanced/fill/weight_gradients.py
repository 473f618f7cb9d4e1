"""Deferred weight gradients of linear layers. The caller chooses when they are computed.

The backward pass of a linear layer returns the gradient of its input and queues the matrix product that gives the
gradient of its weight. When the product is computed, the steps of Megatron-LM that follow it are done, too: the
gradient is added to `main_grad`, and in the last micro-batch of a step the bucket is told that the gradient is ready.
Products of one weight are computed in the order of micro-batches, so the sums are the same, bit for bit.

Megatron-LM's own linear layers get another forward function, which hides the weights from autograd. Otherwise autograd
would run the hooks of their gradients in the backward pass. Transformer Engine's linear layers have a store of delayed
products (`delay_wgrad_compute`). It is wrapped to call us for each new product. What replicas of experts do after their
weight gradients is queued behind these.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
    """The linear layers in `module` whose weight gradients can be deferred."""
    for part in module.modules():
        if isinstance(part, ColumnParallelLinear | RowParallelLinear) or _store(part) is not None:
            yield part


def _store(module: torch.nn.Module) -> Any:
    """Where a linear layer of Transformer Engine keeps delayed products; None for all other modules."""
    store = getattr(module, "wgrad_store", None)
    return store if store is not None and store.delay_wgrad_compute() else None


@dataclass(slots=True)
class _Piece:
    """The deferred weight gradients of one backward pass of a layer.

    is_last: whether it was the last micro-batch of its chunk, after which gradients are reduced.
    products: functions that compute the gradients, in order.
    """

    layer: Any
    chunk: int
    is_last: bool
    products: list[Callable[[], None]] = field(default_factory=list)


class WeightGradients:
    """The weight gradients of one rank that are not computed yet.

    chunks: its model chunks, wrapped for data parallelism.
    timed: (layer, model chunk) -> a context manager that times weight gradients of the layer.
    """

    def __init__(self, chunks: list[Any], timed: Callable[[Any, int], Any] | None = None) -> None:
        self._chunks = chunks
        self._timed = timed or (lambda layer, chunk: contextlib.nullcontext())
        self._defers = False
        self._deferred: deque[_Piece] = deque()  # oldest first
        self._is_open = False  # whether the newest piece is of the backward pass in progress

    def watch(self, layer: torch.nn.Module, chunk: int) -> None:
        """Let the linear layers in `layer`, of model chunk `chunk`, defer their weight gradients."""
        experts_of = _experts_of(layer)
        for experts in experts_of.values():
            experts.when_computed = partial(self._after_gradients, layer, chunk, experts)
        for module in deferring(layer):
            experts = experts_of.get(module)
            if _store(module) is None:
                module._forward_impl = partial(self._linear, module._forward_impl, layer, chunk, experts)
            else:
                self._tell(module, partial(self._put, layer, chunk, experts, module))

    def watch_rest(self, ddp: Any) -> None:
        """Make Transformer Engine's linear layers outside of the body, as in the tail, compute their weight gradients
        at once. Make all of its linear layers pass on gradients as this class does. Called when data parallelism has
        new hooks.
        """
        experts_of = _experts_of(ddp)
        for experts in experts_of.values():
            if not isinstance(experts.when_computed, partial):
                experts.when_computed = partial(_compute_first, experts)
        for module in ddp.modules():
            if (store := _store(module)) is not None:
                if not isinstance(store.put, partial):
                    own = module.backward_dw
                    if module in experts_of:
                        own = partial(_compute_without_replicas, experts_of[module], module)
                    self._tell(module, own)
                module.wgrad_accumulation_and_reduce_hooks[:] = [partial(self._hand_on, ddp, module)]

    def defer(self, on: bool) -> None:
        """Set whether backward passes from now on defer their weight gradients."""
        assert on or not self._deferred, "deferred weight gradients were not computed"
        self._defers = on

    def compute(self, pieces: int) -> None:
        """Compute the weight gradients of the `pieces` oldest backward passes of layers, or of all if there are fewer.

        Called between backward passes.
        """
        self._is_open = False
        for _ in range(min(pieces, len(self._deferred))):
            piece = self._deferred.popleft()
            with self._timed(piece.layer, piece.chunk), self._as_then(piece):
                for product in piece.products:
                    product()

    def compute_all(self) -> None:
        self.compute(len(self._deferred))

    @contextlib.contextmanager
    def _as_then(self, piece: _Piece) -> Iterator[None]:
        """Set the buckets of a chunk to the micro-batch of `piece`. Another one may be in its backward pass by now."""
        ddp = self._chunks[piece.chunk]
        buckets = [*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups]
        now = [bucket_group.is_last_microbatch for bucket_group in buckets]
        for bucket_group in buckets:
            bucket_group.is_last_microbatch = piece.is_last
        yield
        for bucket_group, is_last in zip(buckets, now, strict=True):
            bucket_group.is_last_microbatch = is_last

    def _queue(self, layer: Any, chunk: int, product: Callable[[], None]) -> None:
        """Compute `product` with the other weight gradients of this backward pass of `layer`."""
        if not self._is_open or self._deferred[-1].layer is not layer:
            ddp = self._chunks[chunk]
            buckets = [*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups]
            self._deferred.append(_Piece(layer, chunk, any(group.is_last_microbatch for group in buckets)))
            self._is_open = True
        self._deferred[-1].products.append(product)

    def _defers_of(self, experts: Any) -> bool:
        """Whether a backward pass defers its weight gradients. experts: with replicas, if the weights are theirs, else
        None. With slots that layers share it does not: they have memory for the gradients of one micro-batch."""
        shares = experts is not None and experts.active and experts.slots is not None and experts.slots.shared
        return self._defers and not shares

    def _after_gradients(self, layer: Any, chunk: int, experts: Any, act: Callable[[], None]) -> None:
        """Call `act` when the weight gradients of this backward pass of `experts` have been computed."""
        if self._defers_of(experts):
            self._queue(layer, chunk, act)
        else:
            _compute_first(experts, act)

    # Transformer Engine's linear layers.

    def _tell(self, module: Any, then: Callable[[], None]) -> None:
        """Make the store of `module` call `then` after each new product. Autograd gets a gradient at once: that of a
        bias is complete and is added; that of a weight is memory yet to be written and is dropped."""
        module.wgrad_store.put = partial(_put_and_tell, module.wgrad_store.put, then)
        for parameter in _with_delayed_hook(module):
            parameter.register_post_accumulate_grad_hook(_drop_gradient if parameter.ndim > 1 else _add_gradient)

    def _put(self, layer: Any, chunk: int, experts: Any, module: Any) -> None:
        """The store of `module` got a product."""
        if experts is None:
            if self._defers:
                self._queue(layer, chunk, module.backward_dw)
            else:
                module.backward_dw()
        elif module is experts.linear_fc1 and self._defers_of(experts):  # the backward pass comes to it last
            self._queue(layer, chunk, experts.compute_weight_gradients)
        else:
            _compute_without_replicas(experts, module)

    def _hand_on(self, ddp: Any, module: Any) -> None:
        """Add gradients of the weights of `module`, unless the product has added them, and tell their buckets."""
        for parameter in _with_delayed_hook(module):
            if parameter in ddp.param_to_bucket_group:
                _add_gradient(parameter)
                _register(ddp, parameter)

    # Megatron-LM's linear layers.

    def _linear(
        self,
        original: Callable[..., torch.Tensor],
        layer: Any,
        chunk: int,
        experts: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: Any,
        **rest: Any,
    ) -> torch.Tensor:
        """Replaces a linear layer's `_forward_impl`."""
        defers = self._defers_of(experts) and torch.is_grad_enabled() and input.requires_grad
        if not (defers and weight.requires_grad):
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
        parameters: tuple[torch.Tensor, torch.Tensor | None],
        gradients: Callable[[], tuple[torch.Tensor, torch.Tensor | None]],
    ) -> None:
        """Queue `gradients`, a function that computes those of `parameters`, a weight and perhaps its bias."""
        ddp = self._chunks[chunk]

        @torch.no_grad()
        def compute() -> None:
            for parameter, gradient in zip(parameters, gradients(), strict=True):
                if parameter is None or gradient is None:
                    continue
                if parameter in ddp.param_to_bucket_group:
                    parameter.main_grad.add_(gradient)  # type: ignore[attr-defined]
                    _register(ddp, parameter)
                elif parameter.grad is None:  # of a replica
                    parameter.grad = gradient
                else:
                    parameter.grad += gradient

        self._queue(layer, chunk, compute)


def _experts_of(module: torch.nn.Module) -> dict[torch.nn.Module, Any]:
    """Module within experts that may have replicas -> these experts, which end a pass without `backward_dw`."""
    experts_of: dict[torch.nn.Module, Any] = {}
    for experts in module.modules():
        if hasattr(experts, "when_computed"):
            experts_of |= dict.fromkeys(experts.modules(), experts)
            experts.ends_after_backward_dw = False
    return experts_of


def _compute_first(experts: Any, act: Callable[[], None]) -> None:
    """Call `act` after the weight gradients that grouped experts have delayed. They are not computed earlier, since
    autograd adds to the gradients of replicas what the linear layers returned before they were complete."""
    experts.compute_weight_gradients()
    act()


def _compute_without_replicas(experts: Any, module: Any) -> None:
    """Compute the weight gradients that grouped experts have delayed, if a step has left replicas out: nothing else
    does it then. module: the linear layer whose backward pass has ended."""
    if not experts.active and module is experts.linear_fc1:  # the backward pass comes to it last
        experts.compute_weight_gradients()


def _put_and_tell(put: Callable, then: Callable[[], None], tensors: Any, product: Callable) -> None:
    put(tensors, product)
    then()


def _with_delayed_hook(module: torch.nn.Module) -> list[Any]:
    """The parameters of a linear layer of Transformer Engine whose gradients the hooks of `backward_dw` pass on."""
    return [p for p in module.parameters(recurse=False) if getattr(p, "skip_backward_post_hook", False)]


def _drop_gradient(parameter: Any) -> None:
    parameter.grad = None


def _add_gradient(parameter: Any) -> None:
    """Add the gradient of `parameter` to its main gradient, unless the product has added it."""
    if parameter.grad is not None:
        if not parameter.grad_added_to_main_grad:
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None


def _register(ddp: Any, parameter: torch.Tensor) -> None:
    """Tell the bucket of `parameter` that a gradient was added."""
    if ddp.ddp_config.overlap_grad_reduce:
        ddp.param_to_bucket_group[parameter].register_grad_ready(parameter, ddp.force_all_reduce)


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
        """part: this rank's part of `whole`. It is kept, and `whole` is gathered again. None keeps `whole`."""
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
