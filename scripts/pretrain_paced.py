"""Training where each layer takes as long as on a slow device of its own: for runs whose processes share cores.

    LAYER_MS=60 torchrun --nproc-per-node 4 scripts/pretrain_paced.py FLAGS OF examples/dynamic_models/pretrain.py

Four processes on two cores take as long as their work together, however it is divided among them, so no division of
layers makes their steps shorter. Here a layer that has computed its forward pass of a micro-batch waits until LAYER_MS
milliseconds of work have passed, twice as long in its backward pass, and so leaves the cores to the others. A layer
without a backward pass, as a frozen one, takes a third. What is computed stays the same.
"""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from balancing.clock import device_time, pace
from examples.dynamic_models.extension import DynamicModel
from megatron.balanced.trainer.arguments import parse_arguments


class _Pass:
    """A forward or backward pass of a layer, which takes `seconds` of its device at least."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.begin = seconds, device_time()

    def end(self) -> None:
        pace(max(0.0, self.seconds - (device_time() - self.begin)))


class _Input(torch.autograd.Function):
    """The identity on a layer's input. Its backward pass is the end of the layer's."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, passes: list[_Pass]) -> torch.Tensor:
        ctx.passes = passes
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.passes.pop().end()
        return gradients[0], None


class _Output(torch.autograd.Function):
    """The identity on a layer's output. Its backward pass is the beginning of the layer's."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, passes: list[_Pass], seconds: float) -> torch.Tensor:
        ctx.passes, ctx.seconds = passes, seconds
        return hidden.clone()  # Megatron frees what a stage has sent on, which must not be a view

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.passes.append(_Pass(ctx.seconds))
        return gradients[0], None, None


def paced(forward: Callable, seconds: float) -> Callable:
    """`forward` of Megatron's transformer layer, which takes `seconds` at least in training and twice that backward."""

    @functools.wraps(forward)
    def slow(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return forward(self, hidden_states, *args, **kwargs)
        if torch.is_grad_enabled() and not hidden_states.requires_grad:  # what a frozen layer gives
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

    TransformerLayer.forward = paced(TransformerLayer.forward, int(text) / 1e3)
    train(args, config, extension=model)


if __name__ == "__main__":
    main()
