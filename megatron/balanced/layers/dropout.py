"""Dropout masks that do not depend on the stage of a layer.

Megatron-LM draws masks from generators of the rank, in the order of computation, so the masks of a layer depend on its
stage and on the other layers there. When layers can move, each pass of a layer draws from its own stream, keyed by
seed, layer, iteration, micro-batch and data-parallel rank, and by tensor-parallel rank where Megatron's masks of these
ranks differ. A recomputed pass draws the same masks. Draws outside of layers, for the embedding, are unchanged.
"""

import argparse
import hashlib
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model

from megatron.balanced.recompute import Replays

__all__ = ["DropoutStreams"]


class DropoutStreams:
    """A `megatron.balanced.callbacks.StepCallback`. One on each rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._seed, self._iteration = args.seed, 0
        self._passes: dict[int, int] = {}  # layer -> first passes in this schedule

    def attach(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Give each layer its stream. Returns `chunks`, as Megatron's model hooks must."""
        for number, model in enumerate(unwrap_model(chunks)):
            for layer in model.decoder.layers:
                self.watch_layer(layer, number)
        return chunks

    def watch_layer(self, layer: torch.nn.Module, chunk: int) -> None:
        """Make `layer` draw from its own stream. The number of its model chunk is not used."""
        replays: Replays[int] = Replays()
        before: list[Any] = []

        def enter(module: torch.nn.Module, *unused: Any) -> None:
            if module.training:
                micro_batch, _ = replays.decide(lambda: self._next(layer.layer_number))
                before.append((torch.cuda.get_rng_state(), get_cuda_rng_tracker().get_states()))
                self._draw_from(layer.layer_number, micro_batch)

        def leave(module: torch.nn.Module, *unused: Any) -> None:
            if before:
                default, tracked = before.pop()
                get_cuda_rng_tracker().set_states(tracked)
                torch.cuda.set_rng_state(default)

        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(leave, always_call=True)

    def _next(self, layer: int) -> int:
        self._passes[layer] = self._passes.get(layer, -1) + 1
        return self._passes[layer]

    def _draw_from(self, layer: int, micro_batch: int) -> None:
        data = mpu.get_data_parallel_rank(with_context_parallel=True)
        key = (self._seed, layer, self._iteration, micro_batch, data)
        tracker = get_cuda_rng_tracker()
        states = {}
        for name in tracker.get_states():
            torch.cuda.manual_seed(_seed_of(*key, name, mpu.get_tensor_model_parallel_rank()))
            states[name] = torch.cuda.get_rng_state()
        tracker.set_states(states)
        torch.cuda.manual_seed(_seed_of(*key))

    def begin_step(self, iteration: int, config: Any) -> None:
        self._iteration = iteration

    def begin_schedule(self) -> None:
        self._passes.clear()

    def end_schedule(self) -> None:
        pass

    def end_step(self) -> None:
        pass


def _seed_of(*key: int | str) -> int:
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest()) >> 1
