"""Megatron-LM's transformer layer, of which not all is always run: frozen, or run for some of the tokens only."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from balancing.dynamics.config import DynamicsConfig

__all__ = ["DynamicLayer", "dynamic_layer"]


class DynamicLayer(TransformerLayer):
    """A layer of a dynamic model. Handed in through the layer spec."""

    dynamics: ClassVar[DynamicsConfig]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.frozen = False
        # Called with this layer, the hidden states and the forward pass, before the next one in training.
        self.probe: Callable[[DynamicLayer, torch.Tensor, Callable], None] | None = None

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """hidden_states [s, b, h] -> the same, and upstream's second output, the context."""
        if self.probe is not None and self.training:
            self.probe(self, hidden_states.detach(), partial(super().forward, *args, **kwargs))
        if self.frozen and self.training:
            with self._without_graph():
                return super().forward(hidden_states.detach(), *args, **kwargs)
        return super().forward(hidden_states, *args, **kwargs)

    @contextlib.contextmanager
    def _without_graph(self) -> Iterator[None]:
        usual = self.bias_dropout_add_exec_handler  # which switches gradients on again
        self.bias_dropout_add_exec_handler = torch.no_grad
        try:
            with torch.no_grad():
                yield
        finally:
            self.bias_dropout_add_exec_handler = usual


def dynamic_layer(config: DynamicsConfig) -> type[DynamicLayer]:
    """The layer for a model with these schemes. A class, for Megatron's specs want one."""
    return type("DynamicLayer", (DynamicLayer,), {"dynamics": config})
