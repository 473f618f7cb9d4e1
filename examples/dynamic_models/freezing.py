"""Freezing of a prefix of the model (`--freeze-layers`) in Megatron-LM's training step.

Frozen layers run without gradients (`examples.dynamic_models.layer`), so the embedding before them gets none either.
This module excludes their parameters from what follows the backward passes:

- Gradient reduction. Buckets are filled from the back of the model, so frozen parameters are the tail of a buffer:
  frozen buckets are not reduced, and the bucket with the boundary is reduced up to it. A distributed optimizer shards
  buckets, so there that bucket is reduced as a whole.
- The optimizer's step. Frozen parameters are not in its parameter groups then. Their moments stay in the optimizer and
  in its checkpoints. Checkpoints have one step count for all parameters, so Adam's count continues.
- The pipeline. A stage that begins with a frozen layer has no gradient for the previous stage, which waits for one. It
  sends zeros.

Between steps a frozen layer requires gradients and is in the optimizer like any other, so it moves to another stage
with its moments (`megatron.balanced.layers.mover`).
"""

import argparse
import weakref
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import make_viewless_tensor, unwrap_model

from balancing.report import event
from examples.dynamic_models.config import DynamicsConfig
from examples.dynamic_models.layer import DynamicLayer
from examples.dynamic_models.plasticity import Plasticity
from examples.dynamic_models.schemes.freezing import PlasticityFreezer, scheduled_prefix
from megatron.balanced.shared.callbacks import StepCallback
from megatron.balanced.shared.optimizer_state import Part, parts

__all__ = ["Freezing"]


class _Link(torch.autograd.Function):
    """Returns `output`, and gives `input` a gradient of zero, although `output` does not depend on it."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        ctx.like = input.shape, input.dtype, input.device
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape, dtype, device = ctx.like
        return gradients[0], torch.zeros(shape, dtype=dtype, device=device)


class Freezing(StepCallback):
    """All ranks freeze the same layers at the same iteration.

    saved: the `state_dict` in the checkpoint that this run resumes, or None.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        config: DynamicsConfig,
        saved: dict[str, Any] | None,
    ) -> None:
        self.config = config
        self.frozen = 0  # layers
        self._chunks: list[torch.nn.Module] = []  # wrapped for data parallelism
        self._iteration = 0
        self._optimizer: Any = None
        self._taken_out: list[tuple[dict[str, Any], list[torch.Tensor]]] = []
        self._frozen_parts: list[Part] = []
        self._plasticity: Plasticity | None = None
        if config.freeze_layers_policy == "plasticity":
            freezer = PlasticityFreezer(
                config.freeze_layers, config.freeze_layers_tolerance, config.freeze_layers_patience
            )
            if saved:
                freezer.load_state_dict(saved)
            self._plasticity = Plasticity(args, config.freeze_layers_interval, freezer)

    def attach(self, chunks: list[torch.nn.Module]) -> None:
        """Watch the model chunks of this rank."""
        self._chunks = chunks
        for model in unwrap_model(chunks):
            if not model.pre_process:
                model.decoder.register_forward_hook(_keep_link)

    def state_dict(self) -> dict[str, Any] | None:
        """The state that the iteration does not determine: the decisions of plasticity; None without it."""
        return None if self._plasticity is None else self._plasticity.freezer.state_dict()

    # Around a step.

    def begin_step(self, iteration: int, config: Any) -> None:
        self._iteration = iteration
        self._optimizer = self.run.optimizer
        if self._plasticity is not None:
            self._plasticity.begin_step(iteration)
        frozen = self._prefix(iteration)
        if frozen != self.frozen:
            self._freeze(frozen)

    def _prefix(self, iteration: int) -> int:
        config = self.config
        start, until = config.freeze_layers_start, config.freeze_layers_until
        if self._plasticity is None:
            return scheduled_prefix(
                iteration,
                layers=config.freeze_layers,
                start=start,
                interval=config.freeze_layers_interval,
                until=until,
            )
        if iteration < start or (until and iteration >= until):
            return 0
        return self._plasticity.freezer.frozen

    def _layers(self) -> list[DynamicLayer]:
        return [layer for model in unwrap_model(self._chunks) for layer in model.decoder.layers]

    def _freeze(self, frozen: int) -> None:
        before, self.frozen = self.frozen, frozen
        self.layers_moved()
        if dist.get_rank() == dist.get_world_size() - 1:
            self.report(
                event(
                    self._iteration + 1,
                    "dynamics",
                    "layer",
                    imbalance_before=1.0,
                    action="freeze" if frozen > before else "unfreeze",
                    reason=self.config.freeze_layers_policy,
                    scheme="freezing",
                    frozen_layers=frozen,
                )
            )

    def layers_moved(self) -> None:
        """Freeze and unfreeze the present layers. Called again after layers have moved."""
        for layer in self._layers():
            layer.frozen = layer.layer_number <= self.frozen
            for module in layer.modules():
                if isinstance(module, MoELayer):
                    module.frozen = layer.frozen
        frozen_parameters = set(self._frozen_parameters())
        for chunk in self._chunks:
            for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
                _reduce_live(group, frozen_parameters)

    def _frozen_parameters(self) -> list[torch.nn.Parameter]:
        found = []
        for model in unwrap_model(self._chunks):
            if self.frozen and model.pre_process:
                found += list(model.embedding.parameters())
            for layer in model.decoder.layers:
                if layer.frozen:
                    found += list(layer.parameters())
        return found

    def begin_schedule(self) -> None:
        if self._plasticity is not None:
            self._plasticity.begin_schedule(self._layers())

    def end_schedule(self) -> None:
        """Take frozen parameters out of the optimizer until it has stepped."""
        if self._taken_out or not self.frozen:
            return
        frozen = set(self._frozen_parameters())
        held = [part for part in parts(self._optimizer) if part.parameter in frozen]
        self._fill_empty_state()
        out = {id(part.main) for part in held}
        for each in {id(part.optimizer): part.optimizer for part in held}.values():
            for group in each.param_groups:
                self._taken_out.append((group, group["params"]))
                group["params"] = [main for main in group["params"] if id(main) not in out]
        self._frozen_parts = held

    def _fill_empty_state(self) -> None:
        """Create moments of parameters that freeze before their first step, since checkpoints need them all."""
        for each in getattr(self._optimizer, "chained_optimizers", [self._optimizer]):
            torch_optimizer = getattr(each, "optimizer", None)
            if torch_optimizer is None or torch_optimizer.state:
                continue
            each.init_state_fn(torch_optimizer, each.config)

    def end_step(self) -> None:
        if self._taken_out:
            for group, parameters in self._taken_out:
                group["params"] = parameters
            self._taken_out.clear()
            self._count_steps()
            self._frozen_parts.clear()  # they refer to tensors of layers that may move away
        if self._plasticity is not None:
            rate = max((group["lr"] for group in self._optimizer.param_groups), default=0.0)
            self._plasticity.end_step(rate)

    def _count_steps(self) -> None:
        """Advance the step count of frozen parameters with the others; a checkpoint has one for all parameters."""
        frozen = {id(part.main) for part in self._frozen_parts}
        for each in {id(part.optimizer): part.optimizer for part in self._frozen_parts}.values():
            steps = [state["step"] for main, state in each.state.items() if id(main) not in frozen and "step" in state]
            for part in self._frozen_parts:
                if part.optimizer is not each or "step" not in part.state:
                    continue
                if steps:
                    part.state["step"] = steps[0].clone() if torch.is_tensor(steps[0]) else steps[0]
                else:  # all parameters of this rank are frozen
                    part.state["step"] += 1


def _keep_link(block: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
    """Give the input of a chunk that begins with a frozen layer a gradient of zeros for the previous stage."""
    if not (block.training and torch.is_grad_enabled() and block.layers and block.layers[0].frozen):
        return output
    linked = _Link.apply(output, block.input_tensor)
    # Megatron frees the output of a stage after it was sent, so it must not be a view.
    return make_viewless_tensor(inp=linked, requires_grad=True, keep_graph=True)


def _reduce_live(group: Any, frozen: set[torch.nn.Parameter]) -> None:
    """Restrict a bucket group to gradients of parameters that are not frozen."""
    for name in ("start_grad_sync", "finish_grad_sync"):
        group.__dict__.pop(name, None)
    # With overlap, a group records in one iteration which gradients to wait for in the next.
    group.params = set(group.param_to_bucket) - frozen
    group.is_first_batch = True
    group.golden_per_param_grad_ready_counts, group.per_param_grad_ready_counts = {}, {}
    for bucket in group.buckets:
        if not hasattr(bucket, "whole_grad_data"):
            bucket.whole_grad_data = bucket.grad_data
        if not group.ddp_config.use_distributed_optimizer:
            live = [bucket.param_to_index[p][1] for p in bucket.params_list if p not in frozen]
            bucket.grad_data = bucket.whole_grad_data[: max(live, default=0)]
    if group.params:
        return
    own = weakref.proxy(group)  # a reference cycle would keep the buffers when layers move

    def nothing(force_all_reduce: bool | None = False) -> None:
        own.param_gather_dispatched = False  # as the original does

    group.start_grad_sync = group.finish_grad_sync = nothing
