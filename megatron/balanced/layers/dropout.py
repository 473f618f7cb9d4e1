"""Dropout masks that do not depend on the stage of a layer.

Megatron-LM draws masks from generators of the rank, in the order of computation, so the masks of a layer depend on its
stage and on the other layers there. When layers can move, each pass of a layer draws from its own stream, keyed by
seed, layer, iteration, micro-batch and data-parallel rank, and by tensor-parallel rank where Megatron's masks of these
ranks differ. A recomputed pass draws the same masks. The parts of a layer that runs in turn with another one
(`--overlap-moe-expert-parallel-comm`) draw from its stream one after the other. Draws outside of layers, for the
embedding, are unchanged.
"""

import argparse
import hashlib
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.pipeline_parallel.utils import ScheduleNode
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model

from megatron.balanced.callbacks import StepCallback
from megatron.balanced.recompute import Replays

__all__ = ["DropoutStreams"]


class DropoutStreams(StepCallback):
    """One on each rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._seed, self._iteration = args.seed, 0
        self._passes: dict[int, int] = {}  # layer -> first passes in this schedule

    def attach(self, chunks: list[torch.nn.Module]) -> None:
        """Give each layer its stream."""
        for number, model in enumerate(unwrap_model(chunks)):
            for layer in model.decoder.layers:
                self.layer_arrived(layer, number)

    def layer_arrived(self, layer: torch.nn.Module, chunk: int) -> None:
        """Make `layer` draw from its own stream. The number of its model chunk is not used."""
        number = layer.layer_number
        replays: Replays[int] = Replays()
        before: list[Any] = []

        def enter(module: torch.nn.Module, *unused: Any) -> None:
            if module.training:
                micro_batch, _ = replays.decide(lambda: self._next(number))
                before.append(_states())
                self._draw_from(number, micro_batch)

        def leave(module: torch.nn.Module, *unused: Any) -> None:
            if before:
                _go_on_from(before.pop())

        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(leave, always_call=True)

    def parts(self, plan: Any, chunk: int) -> None:
        """Make the nodes of a micro-batch's layers draw from the streams of these. The number of the model chunk is not
        used.

        plan: Megatron-LM's `TransformerModelChunkSchedulePlan`, whose first layers are those of the decoder.
        """
        for number in range(len(plan.state.model.decoder.layers)):
            of = plan.get_layer(number)
            layer = of.layer.layer_number
            stream = [self._start(layer, self._next(layer))]
            for node in (of.pre_dispatch_computation, of.mlp, of.moe_combine):
                if isinstance(node, ScheduleNode):  # others do nothing
                    node.forward_func = _drawing_from(stream, node.forward_func)

    def _next(self, layer: int) -> int:
        self._passes[layer] = self._passes.get(layer, -1) + 1
        return self._passes[layer]

    def _start(self, layer: int, micro_batch: int) -> Any:
        """The states of generators from which the layer's pass begins to draw."""
        before = _states()
        self._draw_from(layer, micro_batch)
        start = _states()
        _go_on_from(before)
        return start

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


def _states() -> Any:
    return torch.cuda.get_rng_state(), get_cuda_rng_tracker().get_states()


def _go_on_from(states: Any) -> None:
    default, tracked = states
    get_cuda_rng_tracker().set_states(tracked)
    torch.cuda.set_rng_state(default)


def _drawing_from(stream: list[Any], run: Callable) -> Callable:
    """`run` that draws from where `stream`, of one element, is, and moves it on."""

    def run_drawing(*args: Any) -> Any:
        before = _states()
        _go_on_from(stream[0])
        try:
            return run(*args)
        finally:
            stream[0] = _states()
            _go_on_from(before)

    return run_drawing


def _seed_of(*key: int | str) -> int:
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest()) >> 1
