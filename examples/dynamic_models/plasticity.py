"""Measurement of plasticity, the change of the front layer's output, during training in Megatron-LM.

At every measurement the first layer that is not frozen runs two more times on a micro-batch, without dropout and
gradients: with its present weights, and with those of the last measurement. The data-parallel mean of the similarity
loss of both outputs is equal on all ranks; `schemes.freezing.PlasticityFreezer` decides by it.

The reference weights are non-persistent buffers of the layer, so they move with it and are not in checkpoints. They are
replaced after a checkpoint is written and when training begins, so that a resumed run has the same reference.
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist

from examples.dynamic_models.layer import DynamicLayer
from examples.dynamic_models.schemes.freezing import PlasticityFreezer, similarity_loss

__all__ = ["Plasticity"]

_TOKENS = 256  # number of compared tokens, rows of the matrix of inner products


class Plasticity:
    """Measures for a `PlasticityFreezer` every `interval` iterations."""

    def __init__(self, args: argparse.Namespace, interval: int, freezer: PlasticityFreezer) -> None:
        self.freezer, self._interval = freezer, interval
        self._save_interval = args.save_interval if args.save else None
        self._iteration = 0
        self._front = -1  # number of the layer that is measured
        self._is_outdated = True  # the reference weights
        self._measured: float | None = None

    def begin_step(self, iteration: int) -> None:
        self._iteration = iteration
        if self._front != self.freezer.frozen + 1:
            self._front, self._is_outdated = self.freezer.frozen + 1, True

    def _is_due(self) -> bool:
        return not (self._iteration + 1) % self._interval

    def begin_schedule(self, layers: list[DynamicLayer]) -> None:
        for layer in layers:
            if self._is_outdated or layer.layer_number != self._front:
                _forget(layer)
            if layer.layer_number == self._front and (self._is_due() or self._is_outdated):
                layer.probe = self._measure
        self._is_outdated = False

    def _measure(self, layer: DynamicLayer, hidden_states: torch.Tensor, run: Any) -> None:
        """`run(hidden_states)` is the layer's forward pass, which may first have to gather its weights."""
        layer.probe = None
        layer.eval()
        try:
            with torch.no_grad():
                now = run(hidden_states)[0]
                reference = _reference(layer)
                if reference and self._is_due():
                    own = [parameter.data for parameter, _ in reference]
                    for parameter, weights in reference:
                        parameter.data = weights
                    before = run(hidden_states)[0]
                    for (parameter, _), weights in zip(reference, own, strict=True):
                        parameter.data = weights
                    flat = (output.flatten(0, 1)[:_TOKENS].float() for output in (now, before))
                    self._measured = similarity_loss(*flat)
                _remember(layer)
        finally:
            layer.train()

    def end_step(self, learning_rate: float) -> None:
        """Reduce the measurement over all ranks, and decide.

        learning_rate: 0 on a rank without parameters to train.
        """
        if self._is_due():
            rate = torch.tensor(learning_rate, dtype=torch.float64, device=torch.cuda.current_device())
            dist.all_reduce(rate, dist.ReduceOp.MAX)
            total = torch.zeros(2, dtype=torch.float64, device=torch.cuda.current_device())  # sum, and count
            if self._measured is not None:
                total += torch.tensor([self._measured, 1.0], dtype=total.dtype, device=total.device)
            dist.all_reduce(total)
            self._measured = None
            measured, count = total.tolist()
            if count:  # the first measurement has no reference
                self.freezer.observe(measured / count, rate.item())
        if self._save_interval and not (self._iteration + 1) % self._save_interval:
            self._is_outdated = True


# The buffer with the parameter at the last measurement is registered beside the parameter, and sharded like it.
_SUFFIX = "_at_last_measurement"


def _reference(layer: DynamicLayer) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    """The parameters of `layer` with their reference weights; empty if there are none."""
    return [
        (parameter, module.get_buffer(name + _SUFFIX))
        for module in layer.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if name + _SUFFIX in module._buffers
    ]


def _remember(layer: DynamicLayer) -> None:
    for module in layer.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_buffer(name + _SUFFIX, parameter.data.clone(), persistent=False)


def _forget(layer: DynamicLayer) -> None:
    for module in layer.modules():
        for name in [name for name in module._buffers if name.endswith(_SUFFIX)]:
            delattr(module, name)
