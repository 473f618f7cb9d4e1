"""Experts kept equally busy while Megatron-LM trains: plans between iterations, replicas within them.

Between two steps the loads of the last one decide where replicas go in the next; within a step every micro-batch is
split exactly over what is there (`megatron.balanced.moe_layer`). This file ties the pieces to Megatron's step: it makes
the slots when the model is complete, places replicas when weights are final, and sees to it that a home expert's
gradient is handed to data parallelism only when its replicas' gradients are in it.
"""

import argparse
import datetime
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.utils import unwrap_model

from balancing.cluster import Cluster
from balancing.experts import ExpertShape, ReplicaPlacement, Splitter, plan_replicas
from balancing.experts.apply import ReplicaSlots
from balancing.experts.config import ExpertConfig
from balancing.launch import detect_launch
from balancing.report import event, imbalance
from megatron.balanced.device import is_cpu
from megatron.balanced.group import cluster_of
from megatron.balanced.moe_layer import BalancedMoELayer

__all__ = ["DoesNotFit", "ExpertBalancer"]


class DoesNotFit(ValueError):
    """The slots need more memory than is free. Raised on all ranks together."""


class _Chunk:
    """The MoE layers of one model chunk, their slots, and the gradients that wait for their replicas."""

    def __init__(self, ddp: torch.nn.Module, layers: list[BalancedMoELayer], group: dist.ProcessGroup, shared: bool):
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
            ddp.start_grad_sync = self._after_backward(ddp.start_grad_sync)

    def _after_backward(self, start_grad_sync: Callable) -> Callable:
        """With pipeline stages gradients are not reduced parameter by parameter, but all together at a moment
        that the schedule chooses, when this chunk's backward passes are over."""

        def start(*unused: Any) -> None:
            self.end_backward()
            start_grad_sync()

        return start

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
        self.slots.begin_step([layer.placement.slot_expert for layer in self.layers], get_num_microbatches())

    def end_backward(self) -> None:
        self.slots.end_step()
        assert not self._waiting, "gradients were not handed on"


class ExpertBalancer:
    """A `megatron.balanced.step.StepCallback`. One on each rank; ranks of an expert-parallel group plan alike.

    machine: what transfers and computation take, for plans to weigh; without it they balance load alone. report: is
    given the events of a step.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        config: ExpertConfig,
        machine: Cluster | None,
        report: Callable[[dict[str, Any]], None],
    ) -> None:
        self.config, self._args, self._machine, self._report = config, args, machine, report
        self._chunks: list[_Chunk] = []
        self._group: Cluster | None = None
        self._shared = False
        self._iteration = 0
        self._plan_ms = 0.0
        self._model_config: Any = None
        self._finalize: Callable | None = None

    def attach(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Make the slots of a model that is complete and wrapped. Returns `chunks`, as Megatron's model hooks must.

        Raises DoesNotFit, on all ranks of the job, when the slots do not fit into the memory of one.
        """
        group = self._own_group()
        self._group = cluster_of(dist.get_process_group_ranks(group), self._machine)
        layers = [[m for m in model.modules() if isinstance(m, BalancedMoELayer)] for model in unwrap_model(chunks)]
        self._shared = self._agree_on_mode([layer for chunk in layers for layer in chunk])
        for ddp, own in zip(chunks, layers, strict=True):
            if own:
                self._chunks.append(_Chunk(ddp, own, group, self._shared))
        return chunks

    def _own_group(self) -> dist.ProcessGroup:
        """A group of the same ranks as the expert-parallel one, so that transfers pass beside the tokens."""
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, dist.get_process_group_ranks(mpu.get_expert_model_parallel_group()))
        timeout = datetime.timedelta(minutes=self._args.distributed_timeout_minutes)
        groups = {ranks: dist.new_group(list(ranks), timeout=timeout) for ranks in sorted({tuple(r) for r in every})}
        return groups[tuple(every[dist.get_rank()])]

    def _agree_on_mode(self, layers: list[BalancedMoELayer]) -> bool:
        """True if layers share slots. Ranks may have more or less memory free; what they do must be the same."""
        free = torch.cuda.mem_get_info()[0]
        if is_cpu():
            free //= detect_launch().ranks_per_node  # which all have the same memory
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, free)
        shared, complaint = self._mode(layers, min(told)) if layers else (False, None)
        dist.all_gather_object(told, complaint)
        for text in told:
            if text is not None:
                raise DoesNotFit(text)
        return shared

    def _mode(self, layers: list[BalancedMoELayer], free: int) -> tuple[bool, str | None]:
        """True for shared slots, and what to say if they do not fit into `free` bytes."""
        homes = [[list(expert.parameters()) for expert in layer.experts.local_experts] for layer in layers]
        slots, mode = self.config.expert_replica_slots, self.config.expert_replica_mode
        resident = ReplicaSlots.bytes_needed(homes, slots, shared=False)
        shared = mode == "shared" or (mode == "auto" and resident > free / 4)
        need = ReplicaSlots.bytes_needed(homes, slots, shared=shared)
        if need <= free:
            return shared, None
        more = "" if shared else ", or more with --expert-replica-mode shared"
        return shared, (
            f"--expert-replica-slots {slots} takes {need / 2**20:,.1f} MiB on a rank, where {free / 2**20:,.1f} MiB "
            f"are free; {int(free // (need / slots))} would fit{more}"
        )

    # Around a step.

    def begin_step(self, iteration: int, config: Any) -> None:
        self._iteration = iteration
        layers = self._layers()
        if iteration % self.config.expert_plan_interval == 0 and all(layer.loads for layer in layers):
            begin = time.perf_counter()
            for layer in layers:
                layer.place(self._plan(layer))
            self._plan_ms = (time.perf_counter() - begin) * 1e3
            self._agree()
        self._model_config = config

    def begin_schedule(self) -> None:
        for layer in self._layers():
            layer.loads.clear()
            layer.served.clear()
        for chunk in self._chunks:
            chunk.begin_step()
        self._finalize = self._model_config.finalize_model_grads_func
        self._model_config.finalize_model_grads_func = self._finalize_gradients

    def _finalize_gradients(self, *args: Any, **kwargs: Any) -> Any:
        assert self._finalize is not None
        for chunk in self._chunks:
            chunk.end_backward()
        return self._finalize(*args, **kwargs)

    def end_schedule(self) -> None:
        self._model_config.finalize_model_grads_func = self._finalize

    def end_step(self) -> None:
        if (
            mpu.get_expert_model_parallel_rank()
            or mpu.get_expert_data_parallel_rank()
            or mpu.get_tensor_model_parallel_rank()
        ):
            return
        for chunk in self._chunks:
            traffic = chunk.slots.take_traffic()
            for layer in chunk.layers:
                self._report(self._event(layer, chunk, traffic.exposed_seconds / len(chunk.layers)))

    def _event(self, layer: BalancedMoELayer, chunk: _Chunk, exposed_seconds: float) -> dict[str, Any]:
        homes = layer.num_local_experts
        before = np.mean([imbalance(load.sum(0).reshape(-1, homes).sum(1)) for load in layer.loads])
        after = np.mean([imbalance(served) for served in layer.served])
        replicas = layer.placement.replicas
        return event(
            self._iteration + 1,
            "experts",
            "layer",
            imbalance_before=float(before),
            imbalance_after=float(after),
            plan_ms=self._plan_ms / len(self._layers()),
            apply_ms=exposed_seconds * 1e3,
            moved_bytes=chunk.slots.moved_bytes(layer.experts.position),
            action="replicate" if replicas else "keep",
            reason="" if replicas else "nothing to gain" if self._iteration else "no load seen yet",
            layer=layer.layer_number - 1,
            planner=self.config.expert_planner,
            replicas=replicas,
        )

    # Plans.

    def _layers(self) -> list[BalancedMoELayer]:
        return [layer for chunk in self._chunks for layer in chunk.layers]

    def _plan(self, layer: BalancedMoELayer) -> ReplicaPlacement:
        """Where `layer`'s replicas go, from the loads of the last iteration."""
        load = np.sum(layer.loads, axis=0)
        assert self._group is not None
        costs: dict[str, Any] = {}
        if self._machine is not None:
            costs["shape"] = _shape_of(layer)
            costs["hidden_under"] = _attention_seconds(self._args, self._machine)
            costs["micro_batches"] = 1 if self._shared else get_num_microbatches()
        placement = plan_replicas(
            load // len(layer.loads),
            self._group,
            slots=self.config.expert_replica_slots,
            method=self.config.expert_planner,
            **costs,
        )
        gain = 1 - _busiest(load, placement) / max(_busiest(load, layer.alone), 1)
        return placement if gain >= self.config.expert_min_gain else layer.alone

    def _agree(self) -> None:
        """Every rank of a group made the same plans, or nobody acts on them."""
        digest = "".join(layer.placement.digest() for layer in self._layers()).encode()
        digests: list[Any] = [None] * dist.get_world_size(mpu.get_expert_model_parallel_group())
        dist.all_gather_object(digests, digest, group=mpu.get_expert_model_parallel_group())
        if len(set(digests)) > 1:
            raise RuntimeError("ranks of an expert-parallel group made different plans for the same load")


def _busiest(load: np.ndarray, placement: ReplicaPlacement) -> int:
    """Tokens of the busiest rank when `load` [source_rank, expert] is split over `placement`."""
    return int(Splitter(placement)(load).sum(0).reshape(len(load), -1).sum(1).max())


def _shape_of(layer: BalancedMoELayer) -> ExpertShape:
    """The part of an expert that one rank holds, as it travels."""
    config = layer.config
    return ExpertShape(
        hidden=config.hidden_size,
        ffn_hidden=config.moe_ffn_hidden_size // layer.token_dispatcher.tp_size,
        bytes_per_parameter=torch.tensor([], dtype=config.params_dtype).element_size(),
        gated=config.gated_linear_unit,
    )


def _attention_seconds(args: argparse.Namespace, machine: Cluster) -> float:
    """What a layer's attention takes at least, forward: its four projections and the causal half of its scores."""
    tokens = args.micro_batch_size * args.seq_length / args.tensor_model_parallel_size
    return tokens * args.hidden_size * (8 * args.hidden_size + 2 * args.seq_length) / machine.flops
