"""Training with a minimal time per layer, as if each process had a slow device of its own: for cores that are shared.

    LAYER_MS=60 torchrun --nproc-per-node 4 scripts/pretrain_paced.py FLAGS OF examples/dynamic_models/pretrain.py

Four processes on two cores take as long as the sum of their work, however layers are divided among them, so balancing
layers cannot shorten their steps. Here the forward pass of a layer lasts at least LAYER_MS milliseconds per micro-batch
and the backward pass twice as long. A layer waits for the rest of its time and leaves the cores to other processes. A
layer without a backward pass, such as a frozen one, takes a third. Results do not change.
"""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from balancing.clock import device_time, pace
from benchmarks.replaced import replace_name
from examples.dynamic_models.extension import DynamicModel
from megatron.balanced.trainer.arguments import parse_arguments


class _Pass:
    """A forward or backward pass of a layer that takes at least `seconds` of its device."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.begin = seconds, device_time()

    def end(self) -> None:
        pace(max(0.0, self.seconds - (device_time() - self.begin)))


class _Input(torch.autograd.Function):
    """The identity on a layer's input. Its backward pass ends the layer's backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, passes: list[_Pass]) -> torch.Tensor:
        ctx.passes = passes
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.passes.pop().end()
        return gradients[0], None


class _Output(torch.autograd.Function):
    """The identity on a layer's output. Its backward pass begins the layer's backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, passes: list[_Pass], seconds: float) -> torch.Tensor:
        ctx.passes, ctx.seconds = passes, seconds
        return hidden.clone()  # Megatron frees the output that a stage has sent, so it must not be a view

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.passes.append(_Pass(ctx.seconds))
        return gradients[0], None, None


def paced(forward: Callable, seconds: float) -> Callable:
    """`forward` of Megatron's transformer layer, slowed down: at least `seconds` in training, twice that backward."""

    @functools.wraps(forward)
    def slow(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return forward(self, hidden_states, *args, **kwargs)
        if torch.is_grad_enabled() and not hidden_states.requires_grad:  # the output of a frozen layer
            hidden_states = hidden_states.detach().requires_grad_()
        this, backward = _Pass(seconds), []
        output, context = forward(self, _Input.apply(hidden_states, backward), *args, **kwargs)
        this.end()
        return _Output.apply(output, backward, 2 * seconds), context

    return slow


def main() -> None:
    text = os.environ.get("LAYER_MS", "60")
    if not text.isdecimal():
        sys.exit(f"pretrain_paced.py: LAYER_MS={text} is not a whole number of milliseconds; give one, such as 60")
    model = DynamicModel()
    args, config = parse_arguments(extension=model)  # chooses the device, before megatron.core is imported

    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron.balanced.trainer.train import train

    replace_name(TransformerLayer, "forward", paced(TransformerLayer.forward, int(text) / 1e3))
    train(args, config, extension=model)


if __name__ == "__main__":
    main()
