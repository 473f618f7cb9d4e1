"""Megatron-LM's transformer layer with a frozen mode, and the option to run for a part of the tokens only."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from examples.dynamic_models.config import DynamicsConfig
from examples.dynamic_models.schemes.early_exit import exits, saturation
from examples.dynamic_models.schemes.gather_tokens import put_back, take, tokens_of
from examples.dynamic_models.schemes.mixture_of_depths import choose_tokens, gate, is_routed
from megatron.balanced.shared.callbacks import StepCallback

__all__ = ["DynamicLayer", "TokenFlow", "dynamic_layer"]


class TokenFlow(StepCallback):
    """The tokens of the present micro-batch that have not exited, shared by the layers of a model chunk. A callback, so
    that it stays here when a layer moves: `Tokens` gives arrived layers their own.

    active: bool [s, b], or None if no token has exited. is_on: whether tokens may exit in this pass.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.active: torch.Tensor | None = None  # bool [s, b]
        self._chosen: tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] | None = None

    def tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`tokens_of(active)`, cached until another token exits, since the host waits for their number."""
        assert self.active is not None
        if self._chosen is None or self._chosen[0] is not self.active:
            self._chosen = self.active, tokens_of(self.active)
        return self._chosen[1]


class DynamicLayer(TransformerLayer):
    """A layer of a dynamic model, installed through the layer spec."""

    dynamics: ClassVar[DynamicsConfig]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.dynamics
        self.frozen = False
        # Called before the next forward pass in training. Arguments: this layer, hidden states, the forward function.
        self.probe: Callable[[DynamicLayer, torch.Tensor, Callable], None] | None = None
        self.flow: TokenFlow | None = None
        self.tokens_run = self.tokens_seen = 0  # counted in training; Tokens resets them every step
        self.depth_router: torch.nn.Linear | None = None
        if config.mixture_of_depths and is_routed(self.layer_number, config.mixture_of_depths_every):
            kind, device = self.config.params_dtype, torch.cuda.current_device()
            self.depth_router = torch.nn.Linear(self.config.hidden_size, 1, bias=False, dtype=kind, device=device)
            if self.config.perform_initialization:
                self.config.init_method(self.depth_router.weight)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """hidden_states [s, b, h] -> output [s, b, h], and upstream's second output, the context."""
        if self.probe is not None and self.training:
            self.probe(self, hidden_states.detach(), partial(super().forward, *args, **kwargs))
        if self.frozen and self.training:
            with self._without_graph():
                return self._run(hidden_states.detach(), *args, **kwargs)
        return self._run(hidden_states, *args, **kwargs)

    @contextlib.contextmanager
    def _without_graph(self) -> Iterator[None]:
        usual = self.bias_dropout_add_exec_handler  # upstream's enables gradients
        self.bias_dropout_add_exec_handler = torch.no_grad
        try:
            with torch.no_grad():
                yield
        finally:
            self.bias_dropout_add_exec_handler = usual

    def _run(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        flow = self.flow
        if self.depth_router is not None:
            output, context = self._run_chosen(hidden, *args, **kwargs)
        elif flow is not None and flow.active is not None:
            index, real = flow.tokens()
            output, context = self._run_some(hidden, index, real[..., None].to(hidden.dtype), *args, **kwargs)
        else:
            self._count(hidden, hidden.shape[0] * hidden.shape[1])
            output, context = super().forward(hidden, *args, **kwargs)
        if flow is not None and flow.is_on and self.layer_number in self.dynamics.early_exit_layers:
            active = flow.active if flow.active is not None else torch.ones_like(output[..., 0], dtype=torch.bool)
            done = exits(saturation(hidden, output), active, self.dynamics.early_exit_threshold)
            flow.active = active & ~done
        return output, context

    def _run_chosen(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Mixture of depths: run the tokens with the highest scores of the router."""
        assert self.depth_router is not None
        scores = self.depth_router(hidden)
        index = choose_tokens(scores.detach()[..., 0], self.dynamics.mixture_of_depths)
        return self._run_some(hidden, index, gate(take(scores, index)), *args, **kwargs)

    def _run_some(
        self, hidden: torch.Tensor, index: torch.Tensor, scale: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Run only the tokens `index` [k, b], and scale what the layer adds to them by `scale` [k, b, 1]."""
        self._count(hidden, index.numel())
        chosen = take(hidden, index)
        kwargs["attention_mask"] = None  # tokens are in order, so the causal mask of k tokens is right
        if (rotary := kwargs.get("rotary_pos_emb")) is not None:  # of the original positions
            kwargs["rotary_pos_emb"] = rotary[:, 0, 0][index][:, :, None]
        output, context = super().forward(chosen, *args, **kwargs)
        change = (output - chosen).masked_fill(scale == 0, 0)  # where sequences have fewer tokens than others
        return put_back(hidden, index, change * scale), context

    def _count(self, hidden: torch.Tensor, run: int) -> None:
        if self.training:
            self.tokens_seen += hidden.shape[0] * hidden.shape[1]
            self.tokens_run += run


def dynamic_layer(config: DynamicsConfig) -> type[DynamicLayer]:
    """The layer class for a model with these schemes; Megatron's specs need a class."""
    return type("DynamicLayer", (DynamicLayer,), {"dynamics": config})
