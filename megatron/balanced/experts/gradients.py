"""Replica slots of one model chunk. Gradients of home experts are held back until those of their replicas are added.

Megatron reduces a bucket of gradients over data-parallel ranks as soon as its last gradient is complete, during the
backward pass. All ranks of a reduction must start their buckets in the same order. But each expert-parallel group
places replicas on its own: a layer may have replicas in one group and none in another. So the gradients of every MoE
layer are released at a point that depends on the backward pass only, not on placements.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_layer import TransformerLayer

from balancing.experts.engine.late_slots import LateSlots
from balancing.experts.engine.slots import HomeExperts, ReplicaSlots
from megatron.balanced.experts.moe_layer import BalancedMoELayer
from megatron.balanced.experts.parameters import home_parameters, is_grouped_linear, owner, trained_parameters
from megatron.balanced.experts.quantized_weights import weight_format

__all__ = ["ExpertChunk"]


def _accumulates_fused(experts: torch.nn.Module) -> bool:
    """Whether the GEMMs for weight gradients of `experts` add them to gradient buffers (fused accumulation)."""
    return any(is_grouped_linear(module) and module.fuse_wgrad_accumulation for module in experts.modules())


def _accumulated(parameter: Any) -> torch.Tensor:
    """The gradient of a parameter of a home expert, or of its part of a parameter."""
    gradient: torch.Tensor = owner(parameter).main_grad
    return gradient[parameter.row.number] if hasattr(parameter, "row") else gradient


class ExpertChunk:
    """The MoE layers of one model chunk, their slots, and the home gradients that are held back.

    ddp: the model chunk, wrapped for data parallelism.
    layers: its MoE layers, in model order, at least one.
    process_group: expert-parallel group, used for nothing else at the same time.
    hosts: its ranks on gloo.
    shared, expert_share: as in `ReplicaSlots`.
    late_group: the expert-parallel group, used for late copies alone; None without them.

    All ranks of the group make it together.
    """

    def __init__(
        self,
        ddp: torch.nn.Module,
        layers: list[BalancedMoELayer],
        process_group: dist.ProcessGroup,
        hosts: dist.ProcessGroup,
        shared: bool,
        expert_share: float | None,
        late_group: dist.ProcessGroup | None = None,
    ):
        self.layers = layers
        self._holds = True  # whether gradients are held back, and parameters gathered early
        self._waiting: dict[int, dict[torch.nn.Parameter, Callable[[], None]]] = {}
        homes = [home_parameters(layer.experts) for layer in layers]
        trained = trained_parameters(homes, hosts)
        for layer, experts, by_expert in zip(layers, homes, trained, strict=True):
            sizes = np.array([p.numel() for p in experts[0]])
            layer.trained_share = float(np.mean(np.array(by_expert) @ sizes)) / sizes.sum()
        home_experts = HomeExperts(
            homes,
            gradient=_accumulated,
            trained=trained,
            fused=_accumulates_fused(layers[0].experts),
            format=weight_format(homes[0][0]),
            final=self._finish_gathers,
            first_layer=layers[0].index,  # all chunks of a rank share the process group
        )
        self.late: LateSlots | None = None
        if late_group is not None:
            self.late = LateSlots(home_experts, layers[0].late_slots, late_group)
        self.slots = ReplicaSlots(
            dataclasses.replace(home_experts, complete=self._complete),
            layers[0].slots,
            process_group,
            shared=shared,
            alternating=layers[0].config.overlap_moe_expert_parallel_comm,
            expert_share=expert_share,
        )
        for position, layer in enumerate(layers):
            layer.experts.slots, layer.experts.late_slots, layer.experts.position = self.slots, self.late, position
        self._ddp = ddp
        self._parameters = [[owner(p) for expert in layer for p in expert] for layer in homes]
        self._trains = [[p.requires_grad for p in layer] for layer in self._parameters]
        self._hooks = self._advance_transfers() if self.slots.turn_by_turn else []
        bucket_of, config = ddp.param_to_bucket_group, ddp.ddp_config
        self._buckets = [
            {bucket_of[p]: None for p in layer if p in bucket_of} for layer in self._parameters
        ]  # by layer, in the same order on all ranks
        self._gathers = [*ddp.bucket_groups[-1:], *ddp.expert_parallel_bucket_groups]  # `begin_step` starts them
        self._following: dict[Any, Any] = {}  # bucket group -> the one that Megatron would gather ahead
        if config.overlap_param_gather:
            for bucket_group in self._gathers:
                bucket_group.start_param_sync = self._once(bucket_group)
            for bucket_group in ddp.expert_parallel_bucket_groups:
                self._following[bucket_group] = bucket_group.next_param_gather_bucket_group
            self._gather_ahead(False)
        if config.overlap_grad_reduce:
            self._position = {p: n for n, layer in enumerate(self._parameters) for p in layer}
            for bucket_group in {
                bucket_group: None for layer_buckets in self._buckets for bucket_group in layer_buckets
            }:
                bucket_group.register_grad_ready = self._deferred(bucket_group)

    def _advance_transfers(self) -> list[Any]:
        """Start the next chunk of the transfers before each module with weights in the transformer layers, forward and
        backward, and before the experts. These modules run in the same order on all ranks of the expert-parallel group.
        """
        slots, experts = self.slots, [layer.experts for layer in self.layers]
        within = {module for layer_experts in experts for module in layer_experts.modules()}
        layers = [module for module in self._ddp.modules() if isinstance(module, TransformerLayer)]
        blocks = [layer for layer in layers if layer.config.num_moe_experts]  # a vision tower runs where images are
        between = [m for block in blocks for m in block.modules() if m._parameters and m not in within]

        def forward(*unused: Any) -> None:
            slots.advance()

        def backward(module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
            output = outputs[0] if isinstance(outputs, tuple) else outputs
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(lambda gradient: slots.advance())

        return [
            *(module.register_forward_pre_hook(forward) for module in [*between, *experts]),
            *(module.register_forward_hook(backward) for module in between),
        ]

    @property
    def all_slots(self) -> list[ReplicaSlots]:
        """The slots of planned replicas, and those of late copies if there are some."""
        return [self.slots, *([] if self.late is None else [self.late])]

    def abandon(self) -> None:
        """Drop the gradients of an iteration that has failed."""
        self._waiting.clear()
        for slots in self.all_slots:
            slots.abandon()

    def close(self) -> None:
        """Remove the hooks on modules, and keep nothing of the slots. All ranks of the group call it together."""
        for slots in self.all_slots:
            slots.end_abandoned()
        for hook in self._hooks:
            hook.remove()
        for layer in self.layers:
            layer.forget_slots()

    def take_off(self) -> None:
        """Close, and restore layers and buckets to their state without slots."""
        self.close()
        for bucket_group in {*self._gathers, *(group for layer_buckets in self._buckets for group in layer_buckets)}:
            for name in ("start_param_sync", "register_grad_ready"):
                vars(bucket_group).pop(name, None)
        self._gather_ahead(True)

    def _gather_ahead(self, ahead: bool) -> None:
        """Whether parameters of a bucket of experts are gathered while the bucket before it computes, as Megatron-LM
        does."""
        for bucket_group, following in self._following.items():
            bucket_group.next_param_gather_bucket_group = following if ahead else None

    def _once(self, bucket_group: Any) -> Callable:
        """The bucket's `start_param_sync`, which interleaved schedules repeat. It ignores an all-gather in flight."""
        start = bucket_group.start_param_sync

        def start_param_sync(force_sync: bool = False) -> None:
            if force_sync or not bucket_group.param_gather_dispatched:
                start(force_sync=force_sync)

        return start_param_sync

    def _gathers_ahead(self) -> bool:
        """Whether forward hooks gather parameters, as they do from the second iteration on."""
        return self._ddp.ddp_config.overlap_param_gather and bool(self._ddp.remove_forward_pre_hook_handles)

    def _finish_gathers(self, position: int) -> None:
        """Wait for the weights of a layer's home experts."""
        if self._gathers_ahead():
            for bucket_group in self._buckets[position]:
                bucket_group.finish_param_sync(skip_next_bucket_dispatch=True)

    def _deferred(self, bucket_group: Any) -> Callable:
        """The bucket's `register_grad_ready`, which holds back home gradients until those of replicas are added."""
        register = bucket_group.register_grad_ready

        def register_grad_ready(parameter: torch.nn.Parameter, force_all_reduce: bool | None = False) -> None:
            position = self._position.get(parameter)
            if position is None or not self._holds or not bucket_group.is_last_microbatch:
                register(parameter, force_all_reduce)
            else:
                assert parameter not in self._waiting.setdefault(position, {}), "a second gradient in one backward pass"
                self._waiting[position][parameter] = partial(register_last, parameter, force_all_reduce)

        def register_last(parameter: torch.nn.Parameter, force_all_reduce: bool | None) -> None:
            # Deferred weight gradients of an earlier micro-batch may be computed now, with the bucket set to it.
            now, bucket_group.is_last_microbatch = bucket_group.is_last_microbatch, True
            register(parameter, force_all_reduce)
            bucket_group.is_last_microbatch = now

        return register_grad_ready

    def _complete(self, position: int) -> None:
        """The gradients of a layer's planned replicas have been added to those of home experts."""
        if self.late is not None:
            self.late.finish(position)
        self._release(position)

    def _release(self, position: int) -> None:
        """Register the gradients of a layer's experts, now complete, from the last expert to the first: the order
        without replicas, whatever order autograd computed them in."""
        waiting = self._waiting.pop(position, None)
        if waiting is None:
            return
        for parameter in reversed(self._parameters[position]):
            if parameter in waiting:
                waiting.pop(parameter)()
        assert not waiting

    def leave_out(self) -> None:
        """Begin an iteration without replicas. Parameters are gathered and gradients reduced in Megatron-LM's order."""
        self._holds = False
        self._gather_ahead(True)

    def begin_step(self, micro_batches: int) -> None:
        """Begin an iteration with replicas. micro_batches: their number in the iteration.

        Raises ValueError if a loop has frozen a parameter since the slots were made, or has begun to train one.
        """
        for layer, parameters, trains in zip(self.layers, self._parameters, self._trains, strict=True):
            if not layer.frozen and [p.requires_grad for p in parameters] != trains:
                raise ValueError(
                    f"the experts of layer {layer.index} were frozen, or are trained again, while they have replicas; "
                    "call release() of the ExpertBalancer before, and restore() after"
                )
        self._holds = True
        self._gather_ahead(False)
        if self._gathers_ahead():
            # Replicas are sent before a forward pass would gather their weights. Gathers must start in the same order
            # on all ranks, but expert-parallel groups have replicas in different layers. So start all gathers now,
            # after that of the first dense layers, which the forward pass waits for first.
            for bucket_group in self._gathers:
                bucket_group.start_param_sync()
        placements = [layer.placement for layer in self.layers]
        for slots in self.all_slots:
            slots.begin_step(placements, micro_batches)

    def end_backward(self) -> None:
        if not self._holds:
            return
        for slots in self.all_slots:
            slots.end_step()
        assert not self._waiting, "gradients were not passed on"
