"""Layers kept where every pipeline stage costs the same, while Megatron-LM trains.

Between two steps, every few iterations, all ranks tell what their layers have cost, make the same plan of it, and ask
the same gate whether it is worth its move (`balancing.layers`). If it is, layers move
(`megatron.balanced.layers.mover`) and training goes on with the same numbers. Steps are watched after a move, and one
that made them slower is taken back. Where layers are at their best and the user allows it, the pipeline gets shorter
when that saves GPU-hours: the last stages give their layers away and leave (`megatron.balanced.layers.repack`).
"""

import argparse
import time
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training.models.gpt import GPTModelConfig
from megatron.training.utils import print_rank_0

from balancing.layers import (
    CostAverage,
    Gate,
    GateConfig,
    LayerCost,
    LayerMemory,
    StagePlan,
    migration_seconds,
    plan_stages,
    stage_memory,
)
from balancing.layers.config import LayerConfig
from balancing.layers.layout import to_layout
from balancing.layers.load import fit_activations, join_ranks, layer_seconds
from balancing.report import RankRecord, event, imbalance
from megatron.balanced import callbacks
from megatron.balanced.callbacks import StepCallback
from megatron.balanced.cpu.device import is_cpu
from megatron.balanced.layers.mover import LayerMover, Moved
from megatron.balanced.layers.release import hand_over_tensorboard
from megatron.balanced.layers.repack import Repacker
from megatron.balanced.observer import Observer

__all__ = ["LayerBalancer"]

# What a move is taken to cost until one has been measured: slow, so that the first one has to be worth it.
_BANDWIDTH, _FIXED_SECONDS = 1e9, 1.0
_SPARE = 0.05  # of a device's memory, that plans do not count on


class _Choice(NamedTuple):
    """What was decided, and from what. peaks: the most bytes that a rank of each stage has held. predicted: seconds of
    a step under the plan in force, and under the chosen."""

    plan: StagePlan
    action: str
    reason: str
    cost: LayerCost
    peaks: np.ndarray
    predicted: tuple[float, float]
    profile_ms: float
    plan_ms: float


class LayerBalancer(StepCallback):
    """One on each rank; all ranks decide alike.

    observer: measures what each iteration costs this rank, and is given the events.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        config: LayerConfig,
        spec: GPTModelConfig,
        observer: Observer,
    ) -> None:
        self.mover = LayerMover(args, spec)
        self.iteration = 0
        self._args, self._config, self._observer, self._report = args, config, observer, observer.note
        self._first: int | None = None
        self._warm = 0  # the last iteration that began with new layers
        self._settled = False
        self._costs = CostAverage(window=config.layer_balance_interval)
        self._gate: Gate | None = None
        self._repacker = Repacker(args, config)
        self._seconds: list[np.ndarray] = []
        self._steps: list[tuple[int, float]] = []
        self._bandwidth, self._fixed = _BANDWIDTH, _FIXED_SECONDS

    def attach(self, chunks: list[torch.nn.Module]) -> None:
        """Remember the wrapped model chunks of this rank."""
        self.mover.attach(chunks)
        self._gate = self._new_gate()

    def _new_gate(self) -> Gate:
        usual = GateConfig(
            min_gain=self._config.layer_min_gain, interval=self._config.layer_balance_interval, confirm=1
        )
        # What is settled once pays off until training ends.
        gate = (
            replace(usual, horizon=self._args.train_iters or usual.horizon)
            if self._config.balance_layers_once
            else usual
        )
        return Gate(gate, self.mover.plan)

    def _take_in(self, iteration: int, record: RankRecord) -> None:
        """Note what this rank measured in an iteration that is over."""
        # The first one, and the first after a move, warms everything up: its seconds say nothing of those that follow.
        if iteration > self._warm and not self._settled:
            self._seconds.append(layer_seconds(record, self.mover.plan.layers))
            self._steps.append((iteration, record.step_seconds))

    # Around a step.

    def begin_step(self, iteration: int, config: Any) -> None:
        self.iteration = iteration
        if self._observer.measured is not None:
            self._take_in(*self._observer.measured)
        if self._first is None:
            self._first = self._warm = iteration
        shorter = self._repacker.due(iteration)
        since = iteration - self._first
        decides = not self._settled and since and since % self._config.layer_balance_interval == 0
        if shorter is None and decides and self._seconds:
            self._carry_out(self._choose())
            shorter = self._repacker.due(iteration)
        if shorter is not None:
            self.move(shorter)

    def after_release(self, headed: torch.nn.Module | None) -> None:
        hand_over_tensorboard(self._args)

    def _carry_out(self, choice: _Choice) -> None:
        if self._config.balance_layers_once:
            self._settled = True
            self._observer.stop_measuring()
            now, then = choice.predicted
            print_rank_0(
                f"> layers settle as --pipeline-model-parallel-layout '{to_layout(choice.plan)}', which takes "
                f"{1 - then / now:.1%} off a step by prediction ({choice.reason})"
            )
        before = self.mover.plan
        if choice.plan.chunks == before.chunks:
            if choice.action == "keep" and self._repacker.consider(choice.cost, choice.plan, choice.peaks):
                choice = choice._replace(reason=self._repacker.reason)
            self._tell(choice, before, None)
            return
        moved = self.move(choice.plan)
        busiest = migration_seconds(before, choice.plan, self._layer_bytes(), 1.0)  # bytes, at a byte a second
        self._fixed = moved.rebuild_ms / 1e3
        self._bandwidth = max(busiest / max(moved.move_ms / 1e3, 1e-9), 1.0)
        self._tell(choice, before, moved)

    def move(self, plan: StagePlan) -> Moved:
        """Have the layers as `plan` says, now."""
        self._warm = self.iteration
        self._seconds, self._steps = [], []
        trained, before = callbacks.trained(), self.mover.plan
        moved = self.mover.move(plan, trained.optimizer, trained.scheduler)
        if plan.stages < before.stages:
            self._gate = self._new_gate()
            self._tell_release(before, moved)
        return moved

    # What it costs, and what to do.

    def _choose(self) -> _Choice:
        assert self._gate is not None
        begin = time.perf_counter()
        steps, peaks = self._learn()
        cost = self._costs.cost
        profiled = time.perf_counter()
        plan = self.mover.plan
        weights = self._parameters() if self._config.layer_cost == "parameters" else cost
        candidate = self._plan(weights, peaks)
        gate = self._gate
        for iteration, seconds in steps:
            gate = gate.measured(iteration, seconds)
        now, then = self._step(weights, plan), self._step(weights, candidate)
        scale = 1.0
        if self._config.layer_cost == "parameters":  # which say how stages compare, not how long they take
            scale = float(np.median([seconds for _, seconds in steps])) / now
        self._gate, decision = gate.check(
            self.iteration,
            candidate,
            now * scale,
            then * scale,
            migration_seconds(plan, candidate, self._layer_bytes(), self._bandwidth, fixed=self._fixed),
            left=self._args.train_iters - self.iteration,
            previous_now=self._step(weights, gate.watching) * scale if gate.watching else None,
        )
        predicted = now, self._step(weights, decision.plan)
        return _Choice(
            decision.plan,
            decision.action,
            decision.reason,
            weights,
            peaks,
            predicted,
            profile_ms=(profiled - begin) * 1e3,
            plan_ms=(time.perf_counter() - profiled) * 1e3,
        )

    def _learn(self) -> tuple[list[tuple[int, float]], np.ndarray]:
        """Take in what all ranks have measured since the last time.

        Returns the iterations with the seconds that each took, and the most bytes that a rank of each stage held.
        """
        place = mpu.get_pipeline_model_parallel_rank(), mpu.get_expert_data_parallel_rank()
        every = self.mover.gather((place, np.stack(self._seconds), self._steps, torch.cuda.max_memory_allocated()))
        for cost in join_ranks([seconds for _, seconds, _, _ in every], [group for (_, group), *_ in every]):
            self._costs.add(cost)
        steps = [
            (iterations[0][0], max(seconds for _, seconds in iterations))
            for iterations in zip(*(steps for _, _, steps, _ in every), strict=True)
        ]
        peaks = np.zeros(self.mover.plan.stages)
        for (stage, _), _, _, peak in every:
            peaks[stage] = max(peaks[stage], peak)
        self._seconds, self._steps = [], []
        return steps, peaks

    def _plan(self, cost: LayerCost, peaks: np.ndarray) -> StagePlan:
        plan, micro_batches = self.mover.plan, get_num_microbatches()
        limit = min(self.mover.gather(_device_memory()))
        memory = None
        if limit < np.inf:
            counts = self.mover.parameters() * self.mover.resting_bytes()
            resting = LayerMemory(counts[:-2], embedding=counts[-2], head=counts[-1])
            memory = fit_activations(resting, peaks, plan, micro_batches)
        try:
            return plan_stages(
                cost.total,
                plan.stages,
                embedding=sum(cost.embedding),
                head=sum(cost.head),
                memory=memory,
                memory_limit=None if memory is None else np.maximum(limit, stage_memory(plan, memory, micro_batches)),
                virtual=plan.virtual,
                current=plan,
                method=self._config.layer_planner,  # type: ignore[arg-type]
                micro_batches=micro_batches,
            )
        except ValueError as error:
            if memory is None:
                raise
            # The plan in force fits, so there is always one to go on with.
            print_rank_0(f"> layers stay where they are: {error}")
            return plan

    @staticmethod
    def _step(cost: LayerCost, plan: StagePlan) -> float:
        return cost.simulate(plan, get_num_microbatches()).step_time

    def _parameters(self) -> LayerCost:
        """Numbers of parameters in the place of seconds."""
        counts = self.mover.parameters()
        layers = counts[:-2]
        return LayerCost(layers, np.zeros_like(layers), embedding=(counts[-2], 0.0), head=(counts[-1], 0.0))

    def _layer_bytes(self) -> np.ndarray:
        return self.mover.parameters()[:-2] * self.mover.travelling_bytes()

    def _tell_release(self, before: StagePlan, moved: Moved) -> None:
        plan = self.mover.plan
        if dist.get_rank():
            return
        free = self._args.world_size // plan.stages * (before.stages - plan.stages)
        print_rank_0(f"> {plan.stages} of {before.stages} pipeline stages go on, {free} ranks left the job")
        loads = (
            [self._costs.cost.stage_loads(each) for each in (before, plan)]
            if self._costs.iterations
            else [[1.0], [1.0]]
        )
        self._report(
            event(
                self.iteration + 1,
                "layers",
                "stage",
                imbalance_before=imbalance(loads[0]),
                imbalance_after=imbalance(loads[1]),
                plan_ms=0.0,
                apply_ms=moved.move_ms + moved.rebuild_ms,
                moved_bytes=moved.moved_bytes,
                action="release",
                reason=self._repacker.reason,
                layout_before=to_layout(before),
                layout_after=to_layout(plan),
                stages_left=plan.stages,
                ranks_freed=free,
                move_ms=moved.move_ms,
                rebuild_ms=moved.rebuild_ms,
            )
        )

    def _tell(self, choice: _Choice, before: StagePlan, moved: Moved | None) -> None:
        if dist.get_rank():
            return
        loads = [choice.cost.stage_loads(plan) for plan in (before, choice.plan)]
        if moved is not None:
            print(f"> layers now lie as {to_layout(choice.plan)}: {choice.reason}", flush=True)
        took = {} if moved is None else {"move_ms": moved.move_ms, "rebuild_ms": moved.rebuild_ms}
        self._report(
            event(
                self.iteration + 1,
                "layers",
                "stage",
                imbalance_before=imbalance(loads[0]),
                imbalance_after=imbalance(loads[1]),
                plan_ms=choice.profile_ms + choice.plan_ms,
                apply_ms=sum(took.values()),
                moved_bytes=0 if moved is None else moved.moved_bytes,
                action=choice.action,
                reason=choice.reason,
                planner=self._config.layer_planner,
                cost=self._config.layer_cost,
                layout_before=to_layout(before),
                layout_after=to_layout(choice.plan),
                stage_cost_before=loads[0],
                stage_cost_after=loads[1],
                predicted_step_before=choice.predicted[0],
                predicted_step_after=choice.predicted[1],
                profile_ms=choice.profile_ms,
                **took,
            )
        )


def _device_memory() -> float:
    """Bytes that a plan may count on, on this rank. On a CPU, whose ranks share what there is, any number."""
    return np.inf if is_cpu() else (1 - _SPARE) * torch.cuda.mem_get_info()[1]
