"""Measures how much the front layer still changes what it computes, while Megatron-LM trains.

At every measurement the first layer that is not frozen runs twice more on a micro-batch that passes, without dropout
and gradients: with its weights of now, and with those of the last measurement. The data-parallel mean of their
similarity loss is what `balancing.dynamics.PlasticityFreezer` decides on, the same on all ranks.

The weights to compare with are also taken anew after a checkpoint is written and when training begins, so that a
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

    def begin_step(self, iteration: int) -> None:
        self._iteration = iteration
        if self._front != self.freezer.frozen + 1:
            self._front, self._reference = self.freezer.frozen + 1, None

    def _is_due(self) -> bool:
        return not (self._iteration + 1) % self._interval

    def begin_schedule(self, layers: list[DynamicLayer]) -> None:
        for layer in layers:
            if layer.layer_number == self._front and (self._is_due() or self._reference is None):
                layer.probe = self._measure

    def _measure(self, layer: DynamicLayer, hidden_states: torch.Tensor, run: Any) -> None:
        """`run(hidden_states)` is the layer's forward pass. Weights may be there only once it has been run."""
        layer.probe = None
        layer.eval()
        try:
            with torch.no_grad():
                now = run(hidden_states)[0]
                own = {name: value.data for name, value in layer.named_parameters()}
                if self._reference is not None and self._is_due():
                    for name, value in layer.named_parameters():
                        value.data = self._reference[name]
                    before = run(hidden_states)[0]
                    for name, value in layer.named_parameters():
                        value.data = own[name]
                    flat = (output.flatten(0, 1)[:_TOKENS].float() for output in (now, before))
                    self._measured = similarity_loss(*flat)
                self._reference = {name: value.clone() for name, value in own.items()}
        finally:
            layer.train()

    def end_step(self, learning_rate: float) -> None:
        """Agree on what was measured, and decide."""
        if self._is_due():
            told = torch.zeros(2, dtype=torch.float64, device=torch.cuda.current_device())
            if self._measured is not None:
                told += torch.tensor([self._measured, 1.0], dtype=told.dtype, device=told.device)
            dist.all_reduce(told)
            self._measured = None
            if told[1]:  # at first there is nothing to compare with
                self.freezer.observe(float(told[0] / told[1]), learning_rate)
        if self._save_interval and not (self._iteration + 1) % self._save_interval:
            self._reference = None
