"""Replica placements of the next iteration, planned by a background thread while training goes on.

A layer's load is complete when its last micro-batch has been routed. `ReplicaPlanner.submit` then plans in a thread,
and `ReplicaPlanner.adopt` takes the placements before the next iteration begins. On a GPU another process computes
them, so that planning does not delay the thread that launches kernels. Plans are functions of the gathered load, so all
ranks of an expert-parallel group make the same ones; `check_same_plans` verifies it.
"""

import dataclasses
import hashlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig

from balancing.cluster import Cluster
from balancing.experts import ExpertShape, LoadHistory, ReplicaPlacement, TransferWindow, plan_replicas
from balancing.experts.config import ExpertConfig
from balancing.experts.split.placed_split import SplitTables
from balancing.ranges import named
from balancing.worker import Worker
from megatron.balanced.cpu.device import is_cpu
from megatron.balanced.experts.moe_layer import BalancedMoELayer
from megatron.balanced.shared.job import Job

__all__ = [
    "LayerPlan",
    "Overlap",
    "Planned",
    "ReplicaPlanner",
    "check_same_plans",
    "expert_share",
]


class Planned(NamedTuple):
    """Result of one planning task.

    tables: the tables of the layer's new placement; None keeps the current one.
    drift: total variation between the last two loads.
    seconds: time spent planning.
    due: whether a placement was planned, on all ranks alike.
    """

    tables: SplitTables | None
    drift: float
    seconds: float
    due: bool = True


class Overlap(NamedTuple):
    """The forward compute that overlaps the transfer of a layer's replicas.

    first: whether the layer is the first MoE layer of the model, so that no experts compute meanwhile.
    attention_layers: number of layers whose attention computes meanwhile.
    """

    first: bool
    attention_layers: int


@dataclass
class LayerPlan:
    """One layer's placement and loads from iteration to iteration.

    tables: of `placed`.
    history: loads of past iterations.
    last: the iteration, from 1, of the last load in `history`. Only the thread that plans reads and writes it.
    drift: total variation between the last two loads.
    age: iterations since the load that `placed` was planned from.
    arrived: whether the layer has moved here and has not been planned since. It is planned without waiting for the
        interval. Otherwise the layer balancer would measure the higher cost of a layer without replicas.
    """

    tables: SplitTables
    history: LoadHistory = field(default_factory=LoadHistory)
    last: int = 0
    drift: float = 0.0
    age: int = 0
    arrived: bool = False

    @property
    def placed(self) -> ReplicaPlacement:
        """The placement of the next iteration."""
        return self.tables.placement


class ReplicaPlanner:
    """Plans the layers of one rank.

    job: sizes of the run.
    model: its config.
    config: settings of the expert balancer.
    machine: hardware speeds for the cost model. None: placements only balance tokens.
    cluster: nodes and links of the expert-parallel group.
    shared: whether layers share slots, which are then filled again for every micro-batch.
    """

    def __init__(
        self,
        job: Job,
        model: TransformerConfig,
        config: ExpertConfig,
        machine: Cluster | None,
        cluster: Cluster,
        shared: bool,
    ) -> None:
        self._job, self._model, self._config, self._machine = job, model, config, machine
        self._cluster, self._shared = cluster, shared
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="replicas")
        # By the identity of the record: the record, its age when it was submitted, and the plan.
        self._submitted: dict[int, tuple[LayerPlan, int, Future[Planned]]] = {}
        # None on a CPU: another process would take cores from the threads that compute.
        self._worker = None if is_cpu() else Worker()
        self.plan_ms = 0.0  # of the last placements that were adopted, all layers together
        self.waited_ms = 0.0

    def use_cluster(self, machine: Cluster | None, cluster: Cluster) -> None:
        """Plan with these from now on, as in the constructor, once the submitted plans are made."""
        self.wait()
        self._machine, self._cluster = machine, cluster

    def submit(
        self, layer: BalancedMoELayer, plan: LayerPlan, loads: list[Any], iteration: int, overlap: Overlap
    ) -> None:
        """Start planning one layer, unless it was submitted already: a schedule that runs again has the same loads.

        layer: the layer, whose sizes and homes are read.
        plan: its record, whose history the thread extends.
        loads: int [source_rank, expert] of each micro-batch of the iteration.
        iteration: number of the iteration, from 1.
        overlap: the compute that its transfers overlap.
        """
        if id(plan) not in self._submitted:
            planned = self._thread.submit(self._plan, layer, plan, _on_host(loads), iteration, overlap)
            self._submitted[id(plan)] = plan, plan.age, planned

    def wait(self) -> None:
        """Wait for the submitted plans. Until the next `submit`, no thread of ours waits for the device."""
        begin = time.perf_counter()
        wait([planned for *_, planned in self._submitted.values()])
        self.waited_ms += (time.perf_counter() - begin) * 1e3

    def adopt(self) -> bool:
        """Wait for the submitted plans and take their placements. Returns whether a placement was planned, which
        this rank alone may have kept."""
        if not self._submitted:
            return False
        self.wait()
        done = [(plan, age, planned.result()) for plan, age, planned in self._submitted.values()]
        self.plan_ms = sum(planned.seconds for *_, planned in done) * 1e3
        for plan, age, planned in done:
            plan.drift = planned.drift
            if planned.tables is not None:
                plan.tables, plan.age = planned.tables, plan.age - age
        self._submitted.clear()
        return any(planned.due for *_, planned in done)

    def take_waited_ms(self) -> float:
        """Milliseconds for which steps have waited for plans since this was last called."""
        waited, self.waited_ms = self.waited_ms, 0.0
        return waited

    def _plan(
        self,
        layer: BalancedMoELayer,
        plan: LayerPlan,
        on_host: Callable[[], np.ndarray],
        iteration: int,
        overlap: Overlap,
    ) -> Planned:
        loads = on_host()
        begin = time.perf_counter()
        drift = float(plan.history.record(np.mean(loads, axis=0)))
        # The step in which a plan was due may have been left out.
        due = iteration // self._config.plan_interval > plan.last // self._config.plan_interval
        plan.last = iteration
        if not due and not plan.arrived:
            return Planned(None, drift, time.perf_counter() - begin, due=False)
        keep, plan.arrived = None if plan.arrived else plan.placed.planned, False
        error = float(plan.history.error())
        tables = self._place(layer, plan.history.predict(), overlap, len(loads), error, keep)
        return Planned(tables, drift, time.perf_counter() - begin)

    def place_known(self, layer: BalancedMoELayer, loads: list[Any], overlap: Overlap) -> SplitTables:
        """The placement for loads that are known, and its tables.

        layer: the layer, whose sizes and homes are read.
        loads: int [source_rank, expert] of each micro-batch.
        overlap: the compute that its transfers overlap.
        """
        load = np.rint(np.mean(loads, axis=0)).astype(np.int64)
        tables = self._place(layer, load, overlap, len(loads))
        assert tables is not None
        return tables

    @named("plan of replicas")
    def _place(
        self,
        layer: BalancedMoELayer,
        load: np.ndarray,
        overlap: Overlap,
        micro_batches: int,
        drift: float = 0.0,
        keep: ReplicaPlacement | None = None,
    ) -> SplitTables | None:
        """Plan for a load [source_rank, expert] that is expected to drift. None if `keep` stays.

        micro_batches: of an iteration.
        keep: the placement in force.
        """
        costs: dict[str, Any] = {}
        if self._machine is not None:
            served = 1 if self._shared else micro_batches  # by one transfer
            hidden = overlap.attention_layers * _attention_seconds(self._job, self._model, self._machine)
            costs = {"shape": expert_shape(layer), "window": TransferWindow(hidden, overlap.first, served)}
        alone, config = layer.without_replicas, self._config
        plan = plan_replicas if self._worker is None else partial(self._worker.call, plan_replicas)
        placement = plan(
            load,
            self._cluster,
            slots=config.replica_slots,
            method=config.planner,
            drift=drift,
            min_gain=config.min_gain,
            keep=keep,
            **costs,
        )
        if placement == keep:
            return None
        tables = alone if placement.replicas == 0 else layer.tables(placement)
        tables.placement.digest()  # computed here, and kept
        return tables


def check_same_plans(plans: list[LayerPlan], hosts: dist.ProcessGroup) -> None:
    """Raise RuntimeError on all ranks of the expert-parallel group unless they have the same placements.

    hosts: the ranks of the group on gloo, so that no host waits for its device.
    """
    digest = hashlib.sha256("".join(plan.placed.digest() for plan in plans).encode()).digest()
    digest_here = torch.tensor([int.from_bytes(digest[:7], "little")])
    digests = torch.empty(dist.get_world_size(hosts), dtype=torch.int64)
    dist.all_gather_into_tensor(digests, digest_here, group=hosts)
    if len(set(digests.tolist())) > 1:
        raise RuntimeError("ranks of an expert-parallel group made different plans for the same load")


def _on_host(loads: list[Any]) -> Callable[[], np.ndarray]:
    """Start the copy of loads of one shape from the GPU, if they are there. Returns a function that waits for this copy
    only, not for later work, and returns [micro-batch, source_rank, expert]."""
    if not isinstance(loads[0], torch.Tensor):
        return lambda: np.stack(loads)
    copied = torch.stack(loads).to("cpu", non_blocking=True)
    done = torch.cuda.current_stream().record_event()

    def wait() -> np.ndarray:
        done.synchronize()
        return copied.numpy()

    return wait


def expert_shape(layer: BalancedMoELayer) -> ExpertShape:
    """Size of the part of an expert that one tensor-parallel rank holds and sends."""
    config = layer.config
    shape = ExpertShape(
        hidden=config.moe_latent_size or config.hidden_size,
        ffn_hidden=config.moe_ffn_hidden_size // layer.token_dispatcher.tp_size,
        bytes_per_parameter=torch.tensor([], dtype=config.params_dtype).element_size(),
        gated=config.gated_linear_unit,
    )
    # Frozen parameters have no gradients to return.
    return dataclasses.replace(shape, gradient_bytes=shape.gradient_bytes * layer.trained_share)


def _attention_flops(job: Job, model: TransformerConfig) -> float:
    """Lower bound of the FLOPs of a layer's attention for one token, forward: its four projections and the causal half
    of its scores."""
    return model.hidden_size * (8 * model.hidden_size + 2 * job.seq_length)


def _attention_seconds(job: Job, model: TransformerConfig, machine: Cluster) -> float:
    """Seconds of a layer's attention for one micro-batch, forward."""
    return _tokens(job, model) * _attention_flops(job, model) / machine.flops


def _tokens(job: Job, model: TransformerConfig) -> float:
    """Tokens of a rank and micro-batch."""
    ways = model.tensor_model_parallel_size * model.context_parallel_size
    return job.micro_batch_size * job.seq_length / ways


def expert_share(job: Job, model: TransformerConfig, layers: list[BalancedMoELayer]) -> float | None:
    """The experts' fraction of the compute from one MoE layer to the next, for `ReplicaSlots`.

    job: sizes of the run.
    model: its config.
    layers: the MoE layers of one model chunk, at least one. Dense layers in between count as attention only.

    Returns None if a micro-batch computes during the token all-to-all of another: transfers need not keep links free.
    """
    if model.overlap_moe_expert_parallel_comm:
        return None
    first, last = layers[0], layers[-1]
    ways = first.token_dispatcher.tp_size
    experts = first.config.moe_router_topk * 2 * expert_shape(first).parameters * ways
    between = (last.index - first.index) / (len(layers) - 1) if len(layers) > 1 else 1
    shared = 6 * model.hidden_size * (model.moe_shared_expert_intermediate_size or 0)
    return experts / (experts + between * _attention_flops(job, model) + shared)
