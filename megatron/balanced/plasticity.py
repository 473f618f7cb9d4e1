"""Measures how much the front layer still changes what it computes, while Megatron-LM trains.

At every measurement the first layer that is not frozen runs twice more on a micro-batch that passes, without dropout
and gradients: with its weights of now, and with those of the last measurement. The data-parallel mean of their
similarity loss is what `balancing.dynamics.PlasticityFreezer` decides on, the same on all ranks.

The weights to compare with are also taken anew whenever a checkpoint is written, and when training begins, so that a
resumed run compares with the same ones.
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist

from balancing.dynamics.freezing import PlasticityFreezer, similarity_loss
from megatron.balanced.dynamic_layer import DynamicLayer

__all__ = ["Plasticity"]

_TOKENS = 256  # that are compared; their inner products are a matrix of this many rows


class Plasticity:
    """Feeds a `PlasticityFreezer` every `interval` iterations."""

    def __init__(self, args: argparse.Namespace, interval: int, freezer: PlasticityFreezer) -> None:
        self.freezer, self._interval = freezer, interval
        self._save_interval = args.save_interval if args.save else None
        self._iteration = 0
        self._front = -1  # number of the layer that `_reference` was taken of, if it is here
        self._reference: dict[str, torch.Tensor] | None = None
        self._measured: float | None = None

    def begin_step(self, iteration: int, layers: list[DynamicLayer]) -> None:
        self._iteration = iteration
        if self._front != self.freezer.frozen + 1:
            self._take(layers)

    def _take(self, layers: list[DynamicLayer]) -> None:
        """Keep a copy of the front layer's weights, if it is on this rank."""
        self._front, self._reference = self.freezer.frozen + 1, None
        for layer in layers:
            if layer.layer_number == self._front:
                self._reference = {name: value.detach().clone() for name, value in layer.named_parameters()}

    def _is_due(self) -> bool:
        return not (self._iteration + 1) % self._interval

    def begin_schedule(self, layers: list[DynamicLayer], frozen: int) -> None:
        if self._is_due():
            for layer in layers:
                if layer.layer_number == self._front and self._reference is not None:
                    layer.probe = self._measure

    def _measure(self, layer: DynamicLayer, hidden_states: torch.Tensor, run: Any) -> None:
        """`run(hidden_states)` is the layer's forward pass."""
        layer.probe = None
        assert self._reference is not None
        layer.eval()
        try:
            with torch.no_grad():
                now = run(hidden_states)[0]
                own = {name: value.data for name, value in layer.named_parameters()}
                for name, value in layer.named_parameters():
                    value.data = self._reference[name]
                before = run(hidden_states)[0]
                for name, value in layer.named_parameters():
                    value.data = own[name]
        finally:
            layer.train()
        flat = (now.flatten(0, 1)[:_TOKENS], before.flatten(0, 1)[:_TOKENS])
        self._measured = similarity_loss(*(part.float() for part in flat))

    def end_step(self, layers: list[DynamicLayer], frozen: int, learning_rate: float) -> None:
        """Agree on what was measured, and decide."""
        if self._is_due():
            told = torch.zeros(2, dtype=torch.float64, device=torch.cuda.current_device())
            if self._measured is not None:
                told += torch.tensor([self._measured, 1.0], dtype=told.dtype, device=told.device)
            dist.all_reduce(told)
            self._measured = None
            self.freezer.observe(float(told[0] / told[1].clamp(min=1)), learning_rate)
        saves = self._save_interval and not (self._iteration + 1) % self._save_interval
        if self._is_due() or saves:
            self._take(layers)
