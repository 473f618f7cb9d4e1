"""The decisions of layer balancing: measured costs in, a plan and the reason for it out.

Every rank adds what it measured. At a decision all ranks exchange their measurements, average them
(`balancing.layers.CostAverage`), make the same plan and ask the same gate whether the plan is worth its move.

If one CUDA graph holds all passes of an iteration, layers are measured in the iterations without it: at the start, and
after each move. The gate compares iterations with it, and adds to a move what iterations without it take longer.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core import mpu
from megatron.core.transformer.transformer_config import TransformerConfig

from balancing.layers import (
    CostAverage,
    Gate,
    LayerMemory,
    LayerSeconds,
    Pipeline,
    Predicted,
    StagePlan,
    migration_seconds,
    noise_of_gain,
    plan_partition,
    plan_pipeline,
    stage_memory,
)
from balancing.layers.config import LayerConfig
from balancing.layers.measurements import fit_activations, join_ranks, layer_seconds
from balancing.pipeline import Schedule
from balancing.ranges import named
from balancing.report import IN_GRAPH, RankRecord
from megatron.balanced.cpu.device import is_cpu
from megatron.balanced.layers.mover import LayerMover, Moved
from megatron.balanced.shared.callbacks import StepCallback
from megatron.balanced.shared.captured_schedule import captures_iterations
from megatron.balanced.shared.log import print_once

__all__ = ["Choice", "LayerPlanner"]

# The assumed bandwidth (bytes/s) and fixed seconds of a move until one was measured: slow, so that the first one needs
# a clear gain.
_BANDWIDTH, _FIXED_SECONDS = 1e9, 1.0
_MOST_COMPARED = 16  # iterations whose costs tell how sure a gain is
_SPARE = 0.05  # fraction of usable device memory that plans leave free, for fragmentation


class Choice(NamedTuple):
    """A decision of the gate and its inputs.

    plan: the plan from now on; it may be the current one.
    action: "keep", "move" or "rollback".
    reason: for the log.
    cost: the averaged cost of layers.
    peaks: float array [stage], peak bytes of a rank of each stage.
    usable: bytes that a plan may use on each rank; infinite if devices have no memory of their own.
    predicted: seconds of a step under the current plan, and under `plan`.
    profile_ms, plan_ms: host milliseconds to exchange measurements, and to plan.
    """

    plan: StagePlan
    action: str
    reason: str
    cost: LayerSeconds
    peaks: np.ndarray
    usable: float
    predicted: tuple[float, float]
    profile_ms: float
    plan_ms: float


class LayerPlanner:
    """Collects the measurements of this rank and decides with the gate. All ranks call `choose` together.

    config: settings of layer balancing.
    mover: has the current plan.
    model: its config.
    weight_share: as of `TrainingLoop`.
    listeners: returns the callbacks, some of which hold memory.
    iterations: number of iterations of the whole training; None if unknown.

    The attribute `costs` is the average of all measurements since layers last changed their cost.
    """

    def __init__(
        self,
        config: LayerConfig,
        mover: LayerMover,
        model: TransformerConfig,
        weight_share: float,
        listeners: Callable[[], list[StepCallback]],
        iterations: int | None,
    ) -> None:
        self.costs = CostAverage(window=config.interval)
        self._config, self._mover, self._model, self._listeners = config, mover, model, listeners
        self._iterations = iterations
        self._gate: Gate
        self._seconds: list[np.ndarray] = []  # an iteration: [layers + 3, 2, 2]
        self._steps: list[tuple[int, float, int]] = []  # iteration, seconds, micro-batches
        self._eager_steps: list[float] = []  # seconds of iterations without the graph, if there is one
        self._recapture = 0.0  # seconds that the iterations without the graph take longer, after a move
        self._latest: list[LayerSeconds] = []  # the costs of each of the iterations that were measured last
        self._micro_batches = 0  # of the steps that are planned for
        self._bandwidth, self._fixed = _BANDWIDTH, _FIXED_SECONDS
        in_parts = model.overlap_moe_expert_parallel_comm
        self._schedule = Schedule(
            group=model.microbatch_group_size_per_vp_stage, in_parts=in_parts, weight_share=weight_share
        )
        self.restart()

    def restart(self) -> None:
        """Begin with a new gate: at the start of training, after a move by hand, and when the number of stages has
        changed."""
        gate = self._config.gate
        if self._config.once:  # a single move, whose gain lasts until training ends
            gate = replace(gate, horizon=self._iterations or gate.horizon)
        self._gate = Gate(gate, self._mover.plan)

    def add(self, iteration: int, record: RankRecord, micro_batches: int) -> None:
        """Add the measurements of this rank in `iteration`, which had `micro_batches` micro-batches."""
        in_turn, in_graph = self._model.overlap_moe_expert_parallel_comm, record.graphs == IN_GRAPH
        if not in_graph:
            self._seconds.append(layer_seconds(record, self._mover.plan.layers, in_turn=in_turn))
        if in_graph == captures_iterations(self._model):
            self._steps.append((iteration, record.step_seconds, micro_batches))
        else:
            self._eager_steps.append(record.step_seconds)

    def forget(self, but: int = 0) -> None:
        """Drop measurements that no decision has used, all but the last `but`. Called before layers move."""
        for measured in (self._seconds, self._steps, self._eager_steps):
            del measured[: max(0, len(measured) - but)]

    @property
    def has_measurements(self) -> bool:
        return bool(self._seconds or (self._steps and self._latest))

    def learn_speed(self, before: StagePlan, moved: Moved) -> None:
        """Use the speed of the move from `before` to the current plan to predict later moves."""
        busiest = migration_seconds(before, self._mover.plan, self._layer_bytes(), 1.0, fixed=0.0)  # bytes, at 1 byte/s
        self._fixed = moved.rebuild_ms / 1e3
        self._bandwidth = max(busiest / max(moved.move_ms / 1e3, 1e-9), 1.0)

    @named("plan of layers")
    def choose(self, iteration: int, micro_batches: int) -> Choice:
        """Plan from all measurements and decide, before `iteration`, whether layers move. micro_batches: of a coming
        step."""
        begin, self._micro_batches = time.perf_counter(), micro_batches
        steps, peaks, usable = self.exchange()
        cost = self.costs.cost
        profiled = time.perf_counter()
        plan = self._mover.plan
        candidate = self._plan(cost, peaks, usable)
        gate = self._gate
        now, then = self._step_seconds(cost, plan), self._step_seconds(cost, candidate)
        for measured, seconds, measured_for in steps:
            if measured_for != micro_batches:  # scale to the number of the coming step
                seconds *= now / self._step_seconds(cost, plan, measured_for)
            gate = gate.measured(measured, seconds)
        previous = self._step_seconds(cost, gate.watching) if gate.watching else None
        noise = 0.0
        if candidate.chunks != plan.chunks:
            some = self._latest[:: -(-len(self._latest) // _MOST_COMPARED)]
            noise = noise_of_gain([self._step_seconds(c, plan) - self._step_seconds(c, candidate) for c in some])
        self._gate, decision = gate.check(
            iteration,
            candidate,
            Predicted(now, then, previous, noise),
            migration_seconds(
                plan, candidate, self._layer_bytes(), self._bandwidth, fixed=self._fixed + self._recapture
            ),
            left=None if self._iterations is None else self._iterations - iteration,
        )
        return Choice(
            decision.plan,
            decision.action,
            decision.reason,
            cost,
            peaks,
            usable,
            (now, self._step_seconds(cost, decision.plan)),
            profile_ms=(profiled - begin) * 1e3,
            plan_ms=(time.perf_counter() - profiled) * 1e3,
        )

    def advise(self, micro_batches: int) -> tuple[StagePlan, float, float]:
        """The best plan for the measured costs, whatever its move would cost; and predicted seconds of a step under the
        current plan and under the best one. All ranks call it together. micro_batches: of a step."""
        self._micro_batches = micro_batches
        _, peaks, usable = self.exchange()
        cost = self.costs.cost
        best = self._plan(cost, peaks, usable)
        return best, self._step_seconds(cost, self._mover.plan), self._step_seconds(cost, best)

    def exchange(self) -> tuple[list[tuple[int, float, int]], np.ndarray, float]:
        """Add the measurements of all ranks since the last decision to the average.

        Returns [(iteration, seconds, micro-batches)], the peak bytes of a rank of each stage, and the bytes that a plan
        may use on each rank.
        """
        place = mpu.get_pipeline_model_parallel_rank(), mpu.get_expert_data_parallel_rank()
        peak, eager = torch.cuda.max_memory_allocated(), median(self._eager_steps or [0.0])
        every = self._mover.gather((place, self._seconds, self._steps, peak, eager, usable_memory()))
        # If micro-batches alternate, spans are of parts of layers, which wait for no other rank.
        tells_waiting = is_cpu() or self._model.overlap_moe_expert_parallel_comm
        measured, experts = [seconds for _, seconds, *_ in every], [group for (_, group), *_ in every]
        if self._seconds:
            self._latest = join_ranks([np.stack(seconds) for seconds in measured], experts, tells_waiting=tells_waiting)
            for cost in self._latest:
                self.costs.add(cost)
        steps = [
            (iterations[0][0], max(seconds for _, seconds, _ in iterations), iterations[0][2])
            for iterations in zip(*(steps for _, _, steps, *_ in every), strict=True)
        ]
        if (slowest := max(eager for *_, eager, _ in every)) and steps:
            without = self._model.cuda_graph_warmup_steps + 1  # 1: the iteration that captures
            self._recapture = without * max(0.0, slowest - median(seconds for _, seconds, _ in steps))
        peaks = np.zeros(self._mover.plan.stages)
        for (stage, _), _, _, peak, *_ in every:
            peaks[stage] = max(peaks[stage], peak)
        self.forget()
        return steps, peaks, min(usable for *_, usable in every)

    def _plan(self, cost: LayerSeconds, peaks: np.ndarray, limit: float) -> StagePlan:
        plan, micro_batches = self._mover.plan, self._micro_batches
        fewest = min(self._fewest(), *(len(chunk) for chunk in plan.order[: len(plan.order) - plan.behind]))
        memory = room = None
        if limit < np.inf:
            model, others = self._mover.resting_bytes(), self._held_by_others()
            layers, (embedding, head, tail) = np.split(model, [plan.layers])
            resting = LayerMemory(layers + others[:-1], embedding=embedding, head=head, tail=tail, buffers=others[-1])
            memory = fit_activations(resting, peaks, plan, micro_batches, self._schedule)
            room = np.maximum(limit, stage_memory(plan, memory, micro_batches, self._schedule))
        wanted: Any = {"memory": memory, "memory_limit": room, "current": plan, "min_layers": fewest}
        try:
            pipeline = Pipeline(plan.stages, micro_batches, plan.virtual, self._schedule)
            if self._config.planner == "optimal":
                best = plan_pipeline(cost, pipeline, **wanted)
            else:
                best = plan_partition(cost, pipeline, method=self._config.planner, **wanted)
        except ValueError as error:
            if memory is None:
                raise
            # The current plan fits, so training can go on with it.
            print_once(f"> layers stay where they are: {error}")
            return plan
        single = [1 in map(len, either.order) for either in (plan, best)]
        if self._model.fine_grained_activation_offloading and single == [False, True]:
            print_once("> layers stay where they are: a chunk would have one layer, whose activations Megatron-LM "
                         "0.19.2 cannot offload")  # fmt: skip
            return plan
        return best

    def _step_seconds(self, cost: LayerSeconds, plan: StagePlan, micro_batches: int | None = None) -> float:
        return cost.step_seconds(plan, micro_batches or self._micro_batches, schedule=self._schedule)

    def _fewest(self) -> int:
        """The fewest layers of a chunk: two with activation offloading, which fails for a single layer."""
        return 2 if self._model.fine_grained_activation_offloading else 1

    def _held_by_others(self) -> np.ndarray:
        """[layers + 1], bytes that other callbacks hold on a rank for each layer, and last, whichever layers it has."""
        needed = np.zeros(self._mover.plan.layers + 1)
        for callback in self._listeners():
            held = callback.held()
            for layer, size in held.layers.items():
                needed[layer] += size
            needed[-1] += held.buffers
        return np.max(self._mover.gather(needed), axis=0)

    def _layer_bytes(self) -> np.ndarray:
        return self._mover.travelling_bytes()[: self._mover.plan.layers]


def usable_memory() -> float:
    """Bytes that a plan may use on this rank's device now: memory that torch has reserved and free memory, less a
    spare. The rest belongs to others, such as communicators. Infinite on a CPU, where ranks share the memory."""
    return np.inf if is_cpu() else (1 - _SPARE) * (torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved())
