"""Mixture of depths and early exit in Megatron-LM's training step: layers that run for a part of the tokens.

The layers choose their tokens (`examples.dynamic_models.layer`); this module counts them for the report. With early
exit, the next pipeline stage receives the hidden states of all tokens, and must know which tokens have exited; so must
the loss, which weighs them. This module sends one byte per token beside the hidden states, in a separate process group,
so that these messages do not mix with Megatron's.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import unwrap_model

from balancing.report import event, imbalance
from examples.dynamic_models.config import DynamicsConfig
from examples.dynamic_models.layer import DynamicLayer, TokenFlow
from examples.dynamic_models.schemes.early_exit import weigh_loss
from megatron.balanced.shared.callbacks import StepCallback
from megatron.balanced.shared.process_groups import duplicate_group

__all__ = ["Tokens"]


class Tokens(StepCallback):
    """Counts the tokens that each layer runs, and sends exits from stage to stage."""

    def __init__(self, args: argparse.Namespace, config: DynamicsConfig) -> None:
        self.config, self._args = config, args
        self._models: list[torch.nn.Module] = []
        self._flow = TokenFlow()
        self._weighs = False
        self._stages = 1
        self._group: Any = None  # process group of these stages, if there are several
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []  # kept until they are received
        self._coming: tuple[list[dist.Work], torch.Tensor] | None = None  # of the next micro-batch
        self._to_come = 0  # messages of this step that are not waited for yet
        self._iteration = 0

    def attach(self, chunks: list[torch.nn.Module]) -> None:
        """Watch the model chunks of this rank."""
        self._models = unwrap_model(chunks)
        if self.config.early_exit_layers:
            assert len(self._models) == 1, "early exit with several model chunks a stage is refused"
            decoder = self._models[0].decoder
            decoder.register_forward_pre_hook(self._begin_chunk, with_kwargs=True)
            decoder.register_forward_hook(self._end_chunk)
        self.layers_moved()

    def layers_moved(self) -> None:
        """Connect the present layers to the exits. Called again on all ranks after layers have moved: after a release
        of stages, another rank may have the head."""
        if not self.config.early_exit_layers:
            return
        for layer in self._layers():
            layer.flow = self._flow
        model = self._models[0]
        if model.post_process and not self._weighs:
            self._weighs = True
            model.register_forward_hook(self._weigh)
        stages = mpu.get_pipeline_model_parallel_world_size()
        if stages != self._stages:
            self._group = None  # the release has destroyed the old one
            if stages > 1:
                self._group = duplicate_group(
                    mpu.get_pipeline_model_parallel_group(), self._args.distributed_timeout_minutes
                )
            self._stages = stages

    def _layers(self) -> list[DynamicLayer]:
        return [layer for model in self._models for layer in model.decoder.layers]

    # Around a chunk's forward pass.

    def _has_exited(self, layer_number: int) -> bool:
        """True if tokens may have exited after a layer up to `layer_number`."""
        return any(exit <= layer_number for exit in self.config.early_exit_layers)

    def _begin_chunk(self, block: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        self._flow.active = None
        self._flow.is_on = block.training and self._iteration >= self.config.early_exit_start
        if not self._flow.is_on or self._coming is None:
            return
        works, active = self._coming
        self._coming = None
        for work in works:
            work.wait()
        self._flow.active = active.bool()

    def _end_chunk(self, block: torch.nn.Module, args: tuple, output: torch.Tensor) -> None:
        active = self._flow.active
        if active is not None and not block.post_process:
            self._send(active)
        if self._flow.is_on:
            self._expect()

    def _expect(self) -> None:
        """Start to receive the exits of the next micro-batch, if any. Exits are sent before its hidden states. Both
        stages must start the operations of the two communicators in the same order: if kernels of one communicator had
        to end before those of the other, as when the device is synchronized, each stage would wait for the other."""
        if not self._to_come:
            return
        self._to_come -= 1
        shape = self._args.seq_length, self._args.micro_batch_size
        active = torch.empty(shape, dtype=torch.uint8, device=torch.cuda.current_device())
        works = self._message(dist.irecv, active, mpu.get_pipeline_model_parallel_prev_rank())
        self._coming = works, active

    def _send(self, active: torch.Tensor) -> None:
        message = active.to(torch.uint8)
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        works = self._message(dist.isend, message, mpu.get_pipeline_model_parallel_next_rank())
        self._sent += [(work, message) for work in works]

    def _message(self, kind: Callable, message: torch.Tensor, other: int) -> list[dist.Work]:
        """Start to send or receive, as a batch of one message: outside of a batch, NCCL would first connect the two
        ranks and block the host of each until the other has arrived."""
        return dist.batch_isend_irecv([dist.P2POp(kind, message, other, self._group)])

    def _weigh(self, model: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        active, weight = self._flow.active, self.config.early_exit_loss_weight
        if active is None or weight == 1:
            return output
        return weigh_loss(output, active, weight)

    # Around a step.

    def begin_step(self, iteration: int, config: Any) -> None:
        self._iteration = iteration
        for layer in self._layers():
            layer.tokens_run = layer.tokens_seen = 0

    def begin_schedule(self) -> None:
        if self._stages == 1 or not self.config.early_exit_layers or self._iteration < self.config.early_exit_start:
            return
        decoder = self._models[0].decoder
        before = decoder.layers[0].layer_number - 1 if decoder.layers else get_transformer_layer_offset(decoder.config)
        if not decoder.pre_process and self._has_exited(before):
            self._to_come = get_num_microbatches()
            self._expect()

    def end_schedule(self) -> None:
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def end_step(self) -> None:
        if mpu.get_data_parallel_rank(with_context_parallel=True) or mpu.get_tensor_model_parallel_rank():
            return
        layers = self._layers()
        if not layers:
            return
        run = [layer.tokens_run for layer in layers]
        self.report(
            event(
                self._iteration + 1,
                "dynamics",
                "layer",
                imbalance_before=imbalance(run),
                scheme="early exit" if self.config.early_exit_layers else "mixture of depths",
                layers=[layer.layer_number - 1 for layer in layers],
                tokens=run,
                tokens_all=[layer.tokens_seen for layer in layers],
            )
        )

    def state_dict(self) -> None:
        """None: routers are parameters, and exits do not depend on the past."""
