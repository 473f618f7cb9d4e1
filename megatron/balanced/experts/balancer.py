"""Replicas of hot experts in the training step. They are placed between steps and used within them.

The load of a step decides where replicas are in the next step; a thread plans it
(`megatron.balanced.experts.planning`). Within a step, the tokens of each micro-batch are split over the instances of
their experts, homes and replicas (`megatron.balanced.experts.moe_layer`). `ExpertBalancer` connects these parts with
the step. It allocates the slots when the model is complete and places replicas when weights are final. It delays the
reduction of a home expert's gradient until the gradients of its replicas have been added.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.optimizer import OptimizerConfig
from megatron.core.utils import get_model_config, unwrap_model

from balancing.cluster import Cluster
from balancing.experts.config import ExpertConfig
from balancing.experts.engine.slots import ReplicaSlots
from balancing.experts.late import late_tokens
from balancing.launch import detect_launch
from megatron.balanced.cpu.device import is_cpu
from megatron.balanced.experts.events import LayerMilliseconds, layer_event
from megatron.balanced.experts.exchange import balance_layer, moe_layers, restore_layers
from megatron.balanced.experts.gradients import ExpertChunk
from megatron.balanced.experts.moe_layer import BalancedMoELayer, place_layers
from megatron.balanced.experts.parameters import home_parameters
from megatron.balanced.experts.planning import (
    LayerPlan,
    Overlap,
    ReplicaPlanner,
    check_same_plans,
    expert_shape,
    expert_share,
)
from megatron.balanced.experts.products import choose_products, own_products, why_own_products
from megatron.balanced.experts.quantized_weights import copied_bytes, weight_format
from megatron.balanced.experts.replay import check_loads, gather_loads
from megatron.balanced.experts.structure import why_no_replicas
from megatron.balanced.shared.callbacks import HeldBytes, StepCallback
from megatron.balanced.shared.job import Job
from megatron.balanced.shared.log import print_once
from megatron.balanced.shared.model_checks import check_configs, check_model, mark_model
from megatron.balanced.shared.optimizer_state import state_bytes
from megatron.balanced.shared.process_groups import cluster_of, duplicate_group, gather_objects
from megatron.balanced.shared.tail import layers_with_tail

__all__ = ["ExpertBalancer", "ReplicaMemoryError"]


class ReplicaMemoryError(ValueError):
    """Replica slots need more memory than is free. Raised on all ranks together."""


class ExpertBalancer(StepCallback):
    """Replicates the hot experts of a finished model. Construct it on all ranks together, before the first step.

    Replicas are used only while a training schedule of `Balancers` runs. Evaluation, log-probabilities, the export of
    weights, and steps that are left out see Megatron-LM's own layers. After such a step, replicas are placed by
    the last load from before it. All ranks of an expert-parallel group make the same plans.

    chunks: the model chunks of this rank, each in `DistributedDataParallel`.
    config: settings such as `replica_slots` and `min_gain`; None for the defaults.
    job: sizes and timeout of the run. None: one sample a micro-batch, of the longest sequence that the model takes, and
        10 minutes.
    cluster: hardware speeds for the cost model. None: placements only balance tokens; transfers have no cost.
    report: called on one rank of each expert-parallel group for each event, with a function that returns the event.
    reserved: bytes of device memory that the loop has not allocated yet, beside the optimizer.
    optimizer: its config, which tells its memory; None: Adam, whose state is float32 and on the device.
    had_gemm: the name of the products of experts that a resumed run had (`gemm`).

    Raises ValueError for a model that cannot be balanced. Raises ReplicaMemoryError on all ranks of the job if the
    slots do not fit into the memory of some rank.
    """

    name = "experts"

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        config: ExpertConfig | None = None,
        *,
        job: Job | None = None,
        cluster: Cluster | None = None,
        report: Callable[[Callable[[], dict[str, Any]]], None] | None = None,
        reserved: float = 0.0,
        optimizer: OptimizerConfig | None = None,
        had_gemm: str | None = None,
    ) -> None:
        self._job = _with_length(job or Job(), chunks)
        check_model("ExpertBalancer", chunks, config=config, recaptures=self._job.recaptures)
        self._model_config = get_model_config(chunks[0])
        self.config = _fitted(config or ExpertConfig(enabled=True), self._model_config)
        self.chunks, self._report, self._reserved, self._optimizer = list(chunks), report, reserved, optimizer
        self._iteration = 0
        self._plans: dict[BalancedMoELayer, LayerPlan] = {}  # of the layers on this rank
        self._known: list[torch.Tensor] | None = None  # loads of the next schedule, if `will_route` got them
        self._finalize: Callable | None = None
        self._chunk_at: dict[int, ExpertChunk] = {}  # position of a model chunk with experts -> its slots
        minutes = self._job.timeout_minutes
        self._process_group = duplicate_group(mpu.get_expert_model_parallel_group(), minutes)
        self._hosts = duplicate_group(mpu.get_expert_model_parallel_group(), minutes, on_host=True)  # the same on gloo
        self._late_group: dist.ProcessGroup | None = None
        if self.config.late_slots:
            self._late_group = duplicate_group(mpu.get_expert_model_parallel_group(), minutes)
        self._layers_of_chunks = self._exchange(had_gemm)
        self._set_machine(cluster)
        self._shared = self._agree_on_mode([layers for layers in self._layers_of_chunks if layers])
        planned = self._planner_config()
        self._planner = ReplicaPlanner(
            self._job, self._model_config, planned, self._machine, self._cluster, self._shared
        )
        for position, ddp in enumerate(self.chunks):
            if ddp.ddp_config.overlap_grad_reduce:
                ddp.start_grad_sync = self._after_backward(position, ddp.start_grad_sync)
        self._use_grad_sync()
        self._allocate(arrived=False)
        self._use_replicas(False)
        mark_model("ExpertBalancer", chunks)

    def _exchange(self, had_gemm: str | None) -> list[list[BalancedMoELayer]]:
        """[model chunk] -> its MoE layers, which are balanced from now on. On GPUs rank 0 prints their products.

        Raises ValueError on all ranks of the job if there are none, or if experts on some rank cannot have replicas.
        """
        plain = [moe_layers(chunk) for chunk in self.chunks]
        reason = why_no_replicas([item for layers in plain for item in layers.items()], self._hosts)
        experts = [layer.experts for layers in plain for layer in layers.values()]
        here = next(map(own_products, experts), None)
        everywhere = gather_objects((here, reason), dist.group.WORLD)  # some stages may have none
        if reasons := [reason for _, reason in everywhere if reason is not None]:
            raise ValueError(reasons[0])
        if not (own := [name for name, _ in everywhere if name is not None]):
            raise ValueError("no MoE layer of the model is megatron.core's own MoELayer; drop the ExpertBalancer")
        why_own = next(filter(None, map(why_own_products, experts)), "")
        self.gemm = choose_products(self.config, self._model_config, self._job, own[0], why_own=why_own, had=had_gemm)
        if not is_cpu():
            print_once(f"> {self.gemm.line}")
        return [[self._balance(layer) for layer in layers.values()] for layers in plain]

    def _balance(self, layer: Any) -> BalancedMoELayer:
        return balance_layer(layer, *self._slots, self.gemm.name)

    def _set_machine(self, machine: Cluster | None) -> None:
        """Plan with these speeds, and with rates of the products that the run has."""
        self._machine = None if machine is None else machine.with_gemm(self.gemm.name)
        self._cluster = cluster_of(dist.get_process_group_ranks(self._process_group), self._machine)

    @property
    def _slots(self) -> tuple[int, int]:
        """Planned replicas and late copies that a rank can hold of a layer."""
        return self.config.replica_slots, self.config.late_slots

    def _planner_config(self) -> ExpertConfig:
        """Settings of the planner."""
        return self.config

    def release(self) -> None:
        """Free the memory of replica slots until `restore`, for an offload or a rollout. All ranks call it together."""
        for chunk in self._chunk_at.values():
            chunk.take_off()
        self._chunk_at = {}

    def restore(self) -> None:
        """Allocate the slots again, with the placements from before `release`. All ranks call it together."""
        self.layers_moved()

    def close(self) -> None:
        """Free the slots. The layers are Megatron-LM's own from now on."""
        self.release()
        for layers in self._layers_of_chunks:
            restore_layers(layers)
        self._layers_of_chunks, self._plans = [[] for _ in self.chunks], {}
        for ddp in self.chunks:
            vars(ddp).pop("start_grad_sync", None)
        self._use_grad_sync()

    def _use_grad_sync(self) -> None:
        """Have the schedules call `start_grad_sync` as the chunks have it now."""
        if self._model_config.grad_sync_func is not None:
            functions = [chunk.start_grad_sync for chunk in self.chunks]
            several = isinstance(self._model_config.grad_sync_func, list)
            self._model_config.grad_sync_func = functions if several else functions[0]

    def _use_replicas(self, active: bool) -> None:
        self._active = active
        for layers in self._layers_of_chunks:
            for layer in layers:
                layer.active = active

    def held(self) -> HeldBytes:
        chunks = [layers for layers in self._layers_of_chunks if layers]
        late = sum(map(self._late_bytes, chunks))
        if self._shared:
            return HeldBytes(buffers=late + sum(self._slot_bytes(layers, True) for layers in chunks))
        bytes_by_layer = {layer.index: self._slot_bytes([layer], False) for layers in chunks for layer in layers}
        last = self._model_config.num_layers  # higher numbers are layers of the tail, which do not move
        return HeldBytes(
            {number: size for number, size in bytes_by_layer.items() if number < last},
            late + sum(size for number, size in bytes_by_layer.items() if number >= last),
        )

    def _slot_bytes(self, layers: list[BalancedMoELayer], shared: bool) -> int:
        """Bytes of the slots of the MoE layers of one model chunk."""
        homes = [home_parameters(layer.experts) for layer in layers]
        return ReplicaSlots.bytes_needed(
            homes,
            self.config.replica_slots,
            shared=shared,
            alternating=self._model_config.overlap_moe_expert_parallel_comm,
            format=weight_format(homes[0][0]),
            copies=copied_bytes(layers[0].config),
        )

    def _late_bytes(self, layers: list[BalancedMoELayer]) -> int:
        """Bytes of the late slots of the MoE layers of one model chunk."""
        if not self.config.late_slots:
            return 0
        homes = [home_parameters(layer.experts) for layer in layers]
        return ReplicaSlots.bytes_needed(homes, self.config.late_slots, shared=True, format=weight_format(homes[0][0]))

    def _after_backward(self, position: int, start_grad_sync: Callable) -> Callable:
        """`start_grad_sync` of the model chunk at `position`, which waits for the replicas' gradients first.

        With pipeline stages, all gradients are reduced together after the backward passes of the chunk, when the
        schedule calls this function. Megatron keeps the function for the whole run.
        """

        def start(*unused: Any) -> None:
            if position in self._chunk_at:
                self._chunk_at[position].end_backward()
            start_grad_sync()

        return start

    def layer_arrived(self, layer: Any, chunk: int) -> None:
        """Layers arrive plain. Callbacks after this one may look at the experts of `layer`."""
        for moe in moe_layers(layer).values():
            self._balance(moe)

    def layers_moved(self) -> None:
        """Allocate the slots of the layers on this rank anew. Called between two steps when layers have moved or have
        been wrapped again. Layers that stay keep their placement and history; layers that arrive start without."""
        models = unwrap_model(self.chunks)
        self._layers_of_chunks = [
            [module for module in model.modules() if isinstance(module, BalancedMoELayer)] for model in models
        ]
        self._allocate(arrived=True)
        self._use_replicas(self._active)

    def _allocate(self, *, arrived: bool) -> None:
        """Allocate slots. arrived: whether layers without a plan have moved here."""
        for chunk in self._chunk_at.values():
            chunk.close()
        before, self._plans, self._chunk_at = self._plans, {}, {}
        for position, (ddp, layers) in enumerate(zip(self.chunks, self._layers_of_chunks, strict=True)):
            if layers:
                self._chunk_at[position] = chunk = self._chunk(ddp, layers)
                for layer in layers:
                    if layer not in before:
                        self._price_late_copies(layer)
                        layer.set_topology(self._cluster.ranks_per_node, self._cluster.nics_per_node)
                        before[layer] = LayerPlan(layer.without_replicas, arrived=arrived)
                    self._plans[layer] = before[layer]
                    layer.routed = partial(self._submit, chunk, layer)

    def _chunk(self, ddp: torch.nn.Module, layers: list[BalancedMoELayer]) -> ExpertChunk:
        share = expert_share(self._job, self._model_config, layers)
        return ExpertChunk(ddp, layers, self._process_group, self._hosts, self._shared, share, self._late_group)

    def _price_late_copies(self, layer: BalancedMoELayer) -> None:
        """Tell a layer how many tokens a late copy must take off a rank. Without prices, any number does."""
        if self.config.late_slots and self._machine is not None:
            same_node = self._cluster.nodes == 1
            layer.late_least = late_tokens(self._machine, expert_shape(layer), same_node=same_node)

    def _agree_on_mode(self, chunks: list[list[BalancedMoELayer]]) -> bool:
        """Whether layers share slots. All ranks agree; the rank with the least free memory decides.

        chunks: the MoE layers of each model chunk that has some.

        Raises ReplicaMemoryError on all ranks if the slots do not fit.
        """
        free = torch.cuda.mem_get_info()[0]
        if is_cpu():
            free //= detect_launch().ranks_per_node  # ranks share the memory of their node
        else:  # PyTorch keeps what measuring products took
            free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        # The optimizer is allocated after the slots.
        for ddp in self.chunks:
            for p in ddp.parameters():
                state = state_bytes(ddp, p.dtype, is_expert=not getattr(p, "allreduce", True), config=self._optimizer)
                free -= round(p.numel() * state) if p.requires_grad else 0
        free = max(0, free - round(self._reserved))
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, free)
        shared, error = self._mode(chunks, min(gathered)) if chunks else (False, None)
        dist.all_gather_object(gathered, error)
        for text in gathered:
            if text is not None:
                raise ReplicaMemoryError(text)
        return shared

    def _mode(self, chunks: list[list[BalancedMoELayer]], free: int) -> tuple[bool, str | None]:
        """Whether slots are shared, and the error message if they do not fit into `free` bytes."""
        slots, mode = self.config.replica_slots, self.config.replica_mode
        free -= sum(map(self._late_bytes, chunks))
        resident = sum(self._slot_bytes(layers, False) for layers in chunks)
        shared = mode == "shared" or (mode == "auto" and resident > free / 4)
        need = sum(self._slot_bytes(layers, True) for layers in chunks) if shared else resident
        if need <= free:
            return shared, None
        more = "" if shared else ", or more with experts.replica_mode shared"
        return shared, (
            f"--expert-replica-slots {slots} takes {need / 2**20:,.1f} MiB on a rank, where {free / 2**20:,.1f} MiB "
            f"are free beside the optimizer; {int(free // (need / slots))} would fit{more}"
        )

    def use_cluster(self, cluster: Cluster) -> None:
        """Plans already submitted still use the old cluster."""
        self._set_machine(cluster)
        self._planner.use_cluster(self._machine, self._cluster)
        for layer in self._layers():
            self._price_late_copies(layer)

    def will_route(self, loads: Sequence[Any]) -> None:
        """Announce the routing of the next training schedule, if it is known. Replicas are placed for it. All ranks
        call it together, before each such schedule.

        loads: [micro-batch] -> int [layer, expert], tokens that this rank sends to each expert, as counted by
            `replay.count_routed`. There is a row for each layer of the whole model, from 0, those of its tail
            (`megatron.balanced.shared.tail`) behind the others. Rows of layers on other ranks and of layers without
            experts are ignored. A layer whose rows are 0 on all ranks keeps the placement that was predicted.

        Raises ValueError for other shapes.
        """
        known, model = [torch.as_tensor(load) for load in loads], self._model_config
        check_loads(known, layers_with_tail(model), model.num_moe_experts)
        self._known = known

    # Around a step.

    def between_steps(self, step: int) -> None:
        """Layers may move next, so nobody may refer to them."""
        self._end_abandoned()
        self._planner.wait()

    def adopt_plans(self) -> None:
        if not self._chunk_at and any(self._layers_of_chunks):
            raise ValueError("the balancer has released its replica slots; call restore() before a training schedule")
        self._end_abandoned()
        if self._planner.adopt():
            check_same_plans([self._plans[layer] for layer in self._layers()], self._hosts)

    def begin_step(self, iteration: int, config: Any) -> None:
        self._use_replicas(True)
        self._iteration, self._model_config = iteration, config

    def skip_step(self) -> None:
        self._end_abandoned()
        self._planner.take_waited_ms()  # of plans that a later step adopts
        self._known = None
        for chunk in self._chunk_at.values():
            chunk.leave_out()
        self._end_plans()

    def _end_abandoned(self) -> None:
        """End the transfers of a schedule that has failed. Raises RuntimeError if ranks failed at different places."""
        every = [slots for chunk in self._chunk_at.values() for slots in chunk.all_slots]
        chunks = [slots for slots in every if slots.is_abandoned]
        if not chunks:
            return
        if len({*gather_objects(tuple(slots.started for slots in chunks), self._hosts)}) > 1:
            raise RuntimeError(
                f"ranks {dist.get_process_group_ranks(self._process_group)} left a schedule of balanced experts at "
                "different places, so its transfers cannot end; let all ranks raise in the same micro-batch, or start "
                "again from a checkpoint"
            )
        for slots in chunks:
            slots.end_abandoned()

    def begin_schedule(self) -> None:
        self._place_known()
        tables = {}
        for layer in self._layers():
            plan = self._plans[layer]
            if layer.frozen:  # replicas would be sent for a forward pass only
                plan.tables = layer.without_replicas
            if layer.placement != plan.placed:
                tables[layer] = plan.tables
        place_layers(tables)
        self._begin_passes()
        self._finalize = self._model_config.finalize_model_grads_func
        self._model_config.finalize_model_grads_func = self._finalize_gradients

    def _begin_passes(self) -> None:
        """Before the passes of an iteration: start the transfers of replicas."""
        for layer in self._layers():
            layer.forget_passes()
        for chunk in self._chunk_at.values():
            chunk.begin_step(self.run.micro_batches)

    def _place_known(self) -> None:
        """Place replicas for the routing that `will_route` has announced, if any."""
        known, self._known = self._known, None
        if known is None:
            return
        if len(known) != self.run.micro_batches:
            raise ValueError(
                f"will_route got loads of {len(known)} micro-batches for a schedule of {self.run.micro_batches}; call "
                "it before each training schedule, with all of its micro-batches"
            )
        chunks = {layer: chunk for chunk in self._chunk_at.values() for layer in chunk.layers}
        if not chunks:
            return
        for (layer, chunk), loads in zip(chunks.items(), gather_loads([*chunks], known), strict=True):
            if not np.any(loads):  # not known after all
                continue
            plan = self._plans[layer]
            plan.tables, plan.age = self._planner.place_known(layer, loads, self._overlap(chunk, layer)), 0
        check_same_plans([self._plans[layer] for layer in chunks], self._hosts)

    def _finalize_gradients(self, *args: Any, **kwargs: Any) -> Any:
        for chunk in self._chunk_at.values():
            chunk.end_backward()
        return None if self._finalize is None else self._finalize(*args, **kwargs)

    def end_schedule(self) -> None:
        self._model_config.finalize_model_grads_func = self._finalize

    def abandon_schedule(self) -> None:
        self._use_replicas(False)
        self._known = None
        if self._model_config.finalize_model_grads_func == self._finalize_gradients:
            self._model_config.finalize_model_grads_func = self._finalize
        for chunk in self._chunk_at.values():
            chunk.abandon()

    def end_step(self) -> None:
        self._use_replicas(False)
        if self._model_config.cuda_graph_impl != "none":  # a capture may come next, and fails if another thread waits
            self._planner.wait()
        self._tell()
        self._end_plans()

    def _end_plans(self) -> None:
        """A step ends, with replicas or without."""
        for plan in self._plans.values():
            plan.age += 1

    def _tell(self) -> None:
        """Report what replicas did in the step."""
        waited_ms = self._planner.take_waited_ms()
        if (
            self._report is None
            or mpu.get_expert_model_parallel_rank()
            or mpu.get_expert_data_parallel_rank()
            or mpu.get_tensor_model_parallel_rank()
        ):
            return
        layers = len(self._layers())
        for chunk in self._chunk_at.values():
            exposed = sum(slots.take_statistics().exposed_seconds for slots in chunk.all_slots)
            spent = LayerMilliseconds(
                exposed=exposed / len(chunk.layers) * 1e3,
                plan=self._planner.plan_ms / layers,
                plan_wait=waited_ms / layers,
            )
            for layer in chunk.layers:
                plan, planner = self._plans[layer], self.config.planner
                line = layer_event(self._iteration, layer, chunk, plan, planner, spent)
                self._report(line)

    def _submit(self, chunk: ExpertChunk, layer: BalancedMoELayer, load: Any) -> None:
        """Plan the next iteration of `layer` if `load`, of the micro-batch that is routed now, is the last of this
        iteration."""
        if layer.frozen:
            return
        if len(layer.loads) + 1 == self.run.micro_batches:
            overlap = self._overlap(chunk, layer)
            self._planner.submit(layer, self._plans[layer], [*layer.loads, load], self._iteration + 1, overlap)

    def _overlap(self, chunk: ExpertChunk, layer: BalancedMoELayer) -> Overlap:
        """The compute that overlaps the transfer of `layer`'s replicas. In later pipeline stages and chunks, other
        stages compute while the first layer waits."""
        position = layer.experts.position
        if position:
            return Overlap(False, layer.index - chunk.layers[position - 1].index)
        first = chunk is self._chunk_at.get(0) and mpu.get_pipeline_model_parallel_rank() == 0
        return Overlap(first, layer.index + 1 if first else 1)

    def _layers(self) -> list[BalancedMoELayer]:
        return [layer for chunk in self._chunk_at.values() for layer in chunk.layers]


def _with_length(job: Job, chunks: Sequence[torch.nn.Module]) -> Job:
    """`job` with the longest sequence that the model takes, unless it has the length of a sample."""
    if job.seq_length:
        return job
    longest = getattr(unwrap_model(chunks)[0], "max_sequence_length", None)
    if longest is None:
        raise ValueError("the model does not tell its longest sequence; pass job=Job(seq_length)")
    return dataclasses.replace(job, seq_length=longest)


def _fitted(config: ExpertConfig, model: Any) -> ExpertConfig:
    """The settings that fit the model. Raises ValueError for a model that has nothing to replicate."""
    if not model.num_moe_experts:
        raise ValueError("the model has no experts; drop the ExpertBalancer")
    ranks = mpu.get_expert_model_parallel_world_size()
    if ranks == 1:
        raise ValueError("the expert-parallel group is one rank, which has all experts; drop the ExpertBalancer")
    if config.late_slots:
        check_configs("late_slots", model)
    if config.late_slots and config.planner == "prophet":
        raise ValueError("late_slots needs replicas that take any token, and those of prophet do not; use quota")
    return config.fitted(model.num_moe_experts, ranks)
