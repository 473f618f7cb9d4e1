"""Experts kept equally busy while Megatron-LM trains: plans between iterations, replicas within them.

The loads of a step decide where replicas go in the next one; a thread plans as soon as a layer has seen its last
micro-batch. Within a step every micro-batch is split exactly over what is there
(`megatron.balanced.experts.moe_layer`), and where the first one shows that the prediction was wrong, a few more
replicas are placed while everybody waits. This file ties the pieces to Megatron's step: it makes the slots when the
model is complete, places replicas when weights are final, and sees to it that a home expert's gradient is handed to
data parallelism only when its replicas' gradients are in it.
"""

import argparse
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.utils import unwrap_model

from balancing.cluster import Cluster
from balancing.experts import ExpertShape, LoadHistory, ReplicaPlacement, Splitter, plan_replicas
from balancing.experts.config import ExpertConfig
from balancing.experts.engine.slots import ReplicaSlots
from balancing.experts.planners import repair
from balancing.launch import detect_launch
from balancing.report import event, imbalance
from megatron.balanced.callbacks import StepCallback
from megatron.balanced.cpu.device import is_cpu
from megatron.balanced.experts.gradients import ExpertChunk
from megatron.balanced.experts.moe_layer import BalancedMoELayer
from megatron.balanced.optimizer_state import state_bytes
from megatron.balanced.process_groups import cluster_of, duplicate_group

__all__ = ["ExpertBalancer", "ReplicaMemoryError"]

_DRIFT = 0.05  # part of all tokens that may go to other experts until replicas are placed anew, if that decides


class _Planned(NamedTuple):
    """placement: of a layer, None where it stays. drift: of its load, in the last iteration. seconds: spent on this."""

    placement: ReplicaPlacement | None
    drift: float
    seconds: float


@dataclass
class _Replicas:
    """Of one layer. placed: without what was added in a step. drift: of its load, lately. age: iterations since the
    loads that replicas were placed for. due: the iteration after which they are placed anew."""

    placed: ReplicaPlacement
    history: LoadHistory = field(default_factory=LoadHistory)
    drift: float = 0.0
    age: int = 0
    due: int = 0


class ReplicaMemoryError(ValueError):
    """The slots need more memory than is free. Raised on all ranks together."""


class ExpertBalancer(StepCallback):
    """One on each rank; ranks of an expert-parallel group plan alike.

    machine: what transfers and computation take, for plans to weigh; without it they balance load alone. report: is
    given the events of a step; without it there are none.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        config: ExpertConfig,
        machine: Cluster | None,
        report: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        self.config, self._args, self._machine, self._report = config, args, machine, report
        self._model: list[torch.nn.Module] = []
        self._process_group: Any = None
        self._chunk_at: dict[int, ExpertChunk] = {}  # those that have experts
        self._group: Cluster | None = None
        self._shared = False
        self._iteration = 0
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="replicas")
        self._planning: list[tuple[_Replicas, Future[_Planned]]] = []
        self._replicas: dict[BalancedMoELayer, _Replicas] = {}  # of the layers that are here
        self._plan_ms = self._waited_ms = 0.0
        self._model_config: Any = None
        self._finalize: Callable | None = None

    def attach(self, chunks: list[torch.nn.Module]) -> None:
        """Make the slots of a model that is complete and wrapped.

        Raises ReplicaMemoryError, on all ranks of the job, when the slots do not fit into the memory of one.
        """
        self._model = chunks
        self._process_group = duplicate_group(
            mpu.get_expert_model_parallel_group(), self._args.distributed_timeout_minutes
        )
        self._group = cluster_of(dist.get_process_group_ranks(self._process_group), self._machine)
        self._shared = self._agree_on_mode([layer for own in self._layers_of_model() for layer in own])
        for position, ddp in enumerate(chunks):
            if ddp.ddp_config.overlap_grad_reduce:
                ddp.start_grad_sync = self._after_backward(position, ddp.start_grad_sync)
        self.layers_moved()

    def _after_backward(self, position: int, start_grad_sync: Callable) -> Callable:
        """With pipeline stages gradients are not reduced parameter by parameter, but all together at a moment that the
        schedule chooses, when the backward passes of the model chunk at `position` are over. Megatron keeps what this
        returns for as long as it trains."""

        def start(*unused: Any) -> None:
            if position in self._chunk_at:
                self._chunk_at[position].end_backward()
            start_grad_sync()

        return start

    def layers_moved(self) -> None:
        """Make the slots of the layers that are here now. Replicas of a layer that stays are kept, those of one that
        moved are not."""
        before, self._replicas, self._chunk_at = self._replicas, {}, {}
        for position, (ddp, own) in enumerate(zip(self._model, self._layers_of_model(), strict=True)):
            if own:
                assert self._group is not None
                chunk = self._chunk_at[position] = ExpertChunk(ddp, own, self._process_group, self._shared)
                for layer in own:
                    if layer not in before:
                        layer.live_on(self._group.ranks_per_node, self._group.nics_per_node)
                        before[layer] = _Replicas(layer.alone)
                    self._replicas[layer] = before[layer]
                    layer.on_load = partial(self._on_load, chunk, layer)

    def _layers_of_model(self) -> list[list[BalancedMoELayer]]:
        models = unwrap_model(self._model)
        return [[module for module in model.modules() if isinstance(module, BalancedMoELayer)] for model in models]

    def _agree_on_mode(self, layers: list[BalancedMoELayer]) -> bool:
        """True if layers share slots. Ranks may have more or less memory free; what they do must be the same."""
        free = torch.cuda.mem_get_info()[0]
        if is_cpu():
            free //= detect_launch().ranks_per_node  # which all have the same memory
        # The optimizer is made after the slots.
        for ddp in self._model:
            for p in ddp.parameters():
                of_expert = not getattr(p, "allreduce", True)
                free -= round(p.numel() * state_bytes(ddp, p.dtype, of_expert=of_expert)) if p.requires_grad else 0
        free = max(0, free)
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, free)
        shared, complaint = self._mode(layers, min(told)) if layers else (False, None)
        dist.all_gather_object(told, complaint)
        for text in told:
            if text is not None:
                raise ReplicaMemoryError(text)
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
            f"are free beside the optimizer; {int(free // (need / slots))} would fit{more}"
        )

    # Around a step.

    def begin_step(self, iteration: int, config: Any) -> None:
        self._iteration = iteration
        if self._planning:
            begin = time.perf_counter()
            done = [(replicas, planning.result()) for replicas, planning in self._planning]
            self._waited_ms = (time.perf_counter() - begin) * 1e3
            self._plan_ms = sum(planned.seconds for _, planned in done) * 1e3
            for replicas, planned in done:
                replicas.drift, replicas.age = planned.drift, replicas.age + 1
                if planned.placement is not None:
                    replicas.placed, replicas.age = planned.placement, 1
            self._planning.clear()
            if any(planned.placement is not None for _, planned in done):
                self._agree()
        self._model_config = config

    def begin_schedule(self) -> None:
        for layer in self._layers():
            layer.loads.clear()
            layer.served.clear()
            if layer.frozen:  # replicas would come for a forward pass alone
                self._replicas[layer].placed = layer.alone
            if layer.placement != self._replicas[layer].placed:
                layer.place(self._replicas[layer].placed)
        for chunk in self._chunk_at.values():
            chunk.begin_step()
        self._finalize = self._model_config.finalize_model_grads_func
        self._model_config.finalize_model_grads_func = self._finalize_gradients

    def _finalize_gradients(self, *args: Any, **kwargs: Any) -> Any:
        assert self._finalize is not None
        for chunk in self._chunk_at.values():
            chunk.end_backward()
        return self._finalize(*args, **kwargs)

    def end_schedule(self) -> None:
        self._model_config.finalize_model_grads_func = self._finalize

    def end_step(self) -> None:
        if (
            self._report is None
            or mpu.get_expert_model_parallel_rank()
            or mpu.get_expert_data_parallel_rank()
            or mpu.get_tensor_model_parallel_rank()
        ):
            return
        for chunk in self._chunk_at.values():
            traffic = chunk.slots.take_traffic()
            for layer in chunk.layers:
                self._report(self._event(layer, chunk, traffic.exposed_seconds / len(chunk.layers)))

    def _event(self, layer: BalancedMoELayer, chunk: ExpertChunk, exposed_seconds: float) -> dict[str, Any]:
        homes = layer.num_local_experts
        before = np.mean([imbalance(load.sum(0).reshape(-1, homes).sum(1)) for load in _host(layer.loads)])
        served = np.array(_host(layer.served))  # [micro-batch, rank]
        after = np.mean([imbalance(tokens) for tokens in served])
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
            reason="" if replicas else self._why_none(layer),
            layer=_number(layer),
            tokens_per_rank=served.sum(0),
            planner=self.config.expert_planner,
            drift=self._replicas[layer].drift,
            plan_age=self._replicas[layer].age,
            replicas=replicas,
            added=replicas - self._replicas[layer].placed.replicas,
            plan_wait_ms=self._waited_ms / len(self._layers()),
        )

    def _why_none(self, layer: BalancedMoELayer) -> str:
        if layer.frozen:
            return "frozen"
        return "nothing to gain" if self._iteration else "no load seen yet"

    # Plans.

    def _layers(self) -> list[BalancedMoELayer]:
        return [layer for chunk in self._chunk_at.values() for layer in chunk.layers]

    def _on_load(self, chunk: ExpertChunk, layer: BalancedMoELayer, load: Any) -> None:
        """`layer` is about to split `load`, that of one more micro-batch."""
        if layer.frozen:
            return
        if not layer.loads and self._machine is not None and layer.placement.split == "level":
            self._repair(chunk, layer, *_host([load]))
        if len(layer.loads) + 1 == get_num_microbatches():
            loads = [*layer.loads, load]
            own, first, attentions = self._replicas[layer], *self._computed_before(chunk, layer)
            plan = self._planner.submit(self._plan, layer, own, loads, self._iteration + 1, first, attentions)
            self._planning.append((own, plan))

    def _repair(self, chunk: ExpertChunk, layer: BalancedMoELayer, load: np.ndarray) -> None:
        """More replicas for this iteration, if `load`, its first micro-batch, shows that they pay although exposed."""
        assert self._group is not None
        better = repair(
            load,
            layer.placement,
            self._group,
            shape=_shape_of(layer),
            evict=False,
            micro_batches=self._micro_batches_served(),
        )
        if better is not layer.placement:
            layer.place(better)
            chunk.slots.add(layer.experts.position, better)

    def _computed_before(self, chunk: ExpertChunk, layer: BalancedMoELayer) -> tuple[bool, int]:
        """What runs while the replicas of `layer` travel: whether no experts do, for it is the first layer with experts
        of the model, and how many layers' attention does.

        While the first layer of a later stage or chunk is waited for, others compute.
        """
        position = layer.experts.position
        if position:
            return False, _number(layer) - _number(chunk.layers[position - 1])
        first = chunk is self._chunk_at.get(0) and mpu.get_pipeline_model_parallel_rank() == 0
        return first, _number(layer) + 1 if first else 1

    def _micro_batches_served(self) -> int:
        """Micro-batches that one transfer serves."""
        return 1 if self._shared else get_num_microbatches()

    def _plan(
        self,
        layer: BalancedMoELayer,
        own: _Replicas,
        loads: list[Any],
        iteration: int,
        first: bool,
        attentions: int,
    ) -> _Planned:
        """Where `layer`'s replicas go after the `iteration` with these loads. first, attentions: as
        `_computed_before` has them."""
        loads = _host(loads)
        begin = time.perf_counter()
        history, interval = own.history, self.config.expert_plan_interval
        drift = float(history.record(np.mean(loads, axis=0)))
        if iteration % interval if interval else iteration < own.due:
            return _Planned(None, drift, time.perf_counter() - begin)
        own.due = iteration + history.interval(_DRIFT)
        load = history.predict()
        assert self._group is not None
        costs: dict[str, Any] = {}
        if self._machine is not None:
            costs = {
                "shape": _shape_of(layer),
                "hidden_under": attentions * _attention_seconds(self._args, self._machine),
                "first": first,
                "micro_batches": self._micro_batches_served(),
            }
        placement = plan_replicas(
            load,
            self._group,
            slots=self.config.expert_replica_slots,
            method=self.config.expert_planner,
            **costs,
        )
        gain = 1 - _busiest(load, placement) / max(_busiest(load, layer.alone), 1)
        chosen = placement if gain >= self.config.expert_min_gain else layer.alone
        return _Planned(chosen, drift, time.perf_counter() - begin)

    def _agree(self) -> None:
        """Every rank of a group made the same plans, or nobody acts on them."""
        digest = "".join(self._replicas[layer].placed.digest() for layer in self._layers()).encode()
        digests: list[Any] = [None] * dist.get_world_size(mpu.get_expert_model_parallel_group())
        dist.all_gather_object(digests, digest, group=mpu.get_expert_model_parallel_group())
        if len(set(digests)) > 1:
            raise RuntimeError("ranks of an expert-parallel group made different plans for the same load")


def _host(values: list[Any]) -> list[np.ndarray]:
    """Arrays as they are; or tensors of one shape as arrays, for which this waits once where they are on a GPU."""
    return list(torch.stack(values).cpu().numpy()) if isinstance(values[0], torch.Tensor) else values


def _number(layer: BalancedMoELayer) -> int:
    """From 0. Layers of multi-token prediction have numbers of their own, and come after the decoder's here."""
    return layer.layer_number - 1 + (layer.config.num_layers if layer.is_mtp_layer else 0)


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
