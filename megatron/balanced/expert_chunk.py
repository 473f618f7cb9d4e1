"""Replica slots in one model chunk of Megatron-LM, and home gradients that must not leave before replicas' are in them.

Megatron reduces a gradient over data-parallel ranks as soon as it is there, or all of them when the schedule says so.
An expert with replicas is not done at that moment: its gradient is handed on only when `ReplicaSlots` says so.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches

from balancing.experts.apply import ReplicaSlots
from megatron.balanced.moe_layer import BalancedMoELayer

__all__ = ["ExpertChunk"]


class ExpertChunk:
    """The MoE layers of one model chunk, their slots, and the gradients that wait for their replicas.

    shared: as in `ReplicaSlots`.
    """

    def __init__(
        self,
        ddp: torch.nn.Module,
        layers: list[BalancedMoELayer],
        group: dist.ProcessGroup,
        shared: bool,
    ):
        self.layers = layers
        self._waiting: dict[int, list[Callable[[], None]]] = {}
        homes = [[list(expert.parameters()) for expert in layer.experts.local_experts] for layer in layers]
        self.slots = ReplicaSlots(
            homes,
            layers[0].slots,
            group,
            shared=shared,
            gradient=lambda parameter: parameter.main_grad,
            reduced=self._release,
        )
        for position, layer in enumerate(layers):
            layer.experts.slots, layer.experts.position = self.slots, position
        self._ddp = ddp
        if ddp.ddp_config.overlap_grad_reduce:
            self._position = {p: n for n, layer in enumerate(homes) for expert in layer for p in expert}
            for bucket_group in {ddp.param_to_bucket_group[p] for p in self._position}:
                bucket_group.register_grad_ready = self._deferred(bucket_group)

    def _deferred(self, bucket_group: Any) -> Callable:
        """Data parallelism must not reduce a home expert's gradient before the replicas' gradients are in it."""
        register = bucket_group.register_grad_ready

        def register_grad_ready(parameter: torch.nn.Parameter, force_all_reduce: bool | None = False) -> None:
            position = self._position.get(parameter)
            if position is None or not bucket_group.is_last_microbatch or not self.slots.is_used(position):
                register(parameter, force_all_reduce)
            else:
                self._waiting.setdefault(position, []).append(partial(register, parameter, force_all_reduce))

        return register_grad_ready

    def _release(self, position: int) -> None:
        for register in self._waiting.pop(position, []):
            register()

    def begin_step(self) -> None:
        if self._ddp.ddp_config.overlap_param_gather and self._ddp.remove_forward_pre_hook_handles:
            for bucket_group in self._ddp.expert_parallel_bucket_groups:
                bucket_group.finish_param_sync(skip_next_bucket_dispatch=True)
        self.slots.begin_step([layer.placement for layer in self.layers], get_num_microbatches())

    def end_backward(self) -> None:
        self.slots.end_step()
        assert not self._waiting, "gradients were not handed on"
