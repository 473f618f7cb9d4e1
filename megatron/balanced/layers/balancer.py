"""Layer balancing (`--balance-layers`): when to decide, and how a decision is carried out.

Every `--layer-balance-interval` iterations, between two steps, all ranks make the same decision from measured costs
(`megatron.balanced.layers.planning`). If layers move (`megatron.balanced.layers.mover`), training continues with the
same numbers. The gate then watches the measured steps and reverts a move that made them slower. If the current plan is
the best one and the user allows it, the pipeline gets shorter where that saves GPU-hours: the last stages send their
layers to other stages and leave the job (`megatron.balanced.layers.repack`).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from balancing.layers import StagePlan
from balancing.layers.config import LayerConfig
from megatron.balanced.layers.events import decision_event, release_event
from megatron.balanced.layers.loop import TrainingLoop
from megatron.balanced.layers.mover import LayerMover, Moved
from megatron.balanced.layers.planning import Choice, LayerPlanner
from megatron.balanced.layers.repack import Repacker
from megatron.balanced.layers.source import LayerSource
from megatron.balanced.observe.observer import Observer
from megatron.balanced.shared.callbacks import StepCallback
from megatron.balanced.shared.log import print_once
from megatron.balanced.shared.micro_batches import get_num_microbatches

__all__ = ["LayerBalancer"]


class LayerBalancer(StepCallback):
    """One on each rank; all ranks make the same decisions.

    config: settings of this balancer.
    source: builds the layers of the model.
    observer: measures the iterations of this rank.
    loop: the training loop.
    report: receives the events; `observer.note` by default.
    """

    def __init__(
        self,
        config: LayerConfig,
        source: LayerSource,
        observer: Observer,
        loop: TrainingLoop,
        report: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.mover = LayerMover(source, loop)
        self.iteration = 0
        self._config, self._source, self._loop = config, source, loop
        self._observer, self._report = observer, report or observer.note
        self._first: int | None = None
        self._warm = 0  # the last iteration that began with new layers
        self._settled = False
        self._planner = LayerPlanner(config, self.mover, source.config, loop)
        self._repacker = Repacker(config, loop.log_interval)

    def before_wrapping(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Connect the ranks of the job before other features measure the free memory. Returns `chunks`, as
        Megatron-LM's model hooks must."""
        self.mover.connect()
        return chunks

    def attach(self, chunks: list[torch.nn.Module]) -> None:
        """Remember the wrapped model chunks of this rank."""
        self.mover.attach(chunks)
        self._planner.restart()

    # Around a step.

    def add_measured(self, iteration: int, micro_batches: int | None = None) -> None:
        """Add the observer's latest record to the measurements, before `iteration`. micro_batches: of the recorded
        step, if it had another number than the coming step."""
        self.iteration = iteration
        if self._observer.measured is not None:
            of, record = self._observer.measured
            # The first iteration, and the first after a move, includes warm-up, so its times are not representative.
            if of > self._warm and not self._settled:
                self._planner.add(of, record, micro_batches or get_num_microbatches())

    def begin_step(self, iteration: int, config: Any, measured: int | None = None) -> None:
        self.add_measured(iteration, measured)
        if self._first is None:
            self._first = self._warm = iteration
        shorter = self._repacker.due(iteration)
        since = iteration - self._first
        decides = not self._settled and since and since % self._config.interval == 0
        if shorter is None and decides and self._planner.has_measurements:
            self._carry_out(self._planner.choose(iteration))
            shorter = self._repacker.due(iteration)
        if shorter is not None:
            self.move(shorter)

    @property
    def layout(self) -> str:
        """The current layout, as the value of Megatron-LM's flag."""
        return self._source.text(self.mover.plan)

    def restart(self) -> None:
        """Decide from now on as if training began with the current layout. Called after a move by hand."""
        self._planner.restart()

    def read(self, layout: str) -> StagePlan:
        """The plan of a string in the form of `layout`."""
        return self._source.read(layout, self.mover.plan)

    def advise(self) -> str:
        """The best layout for the measured costs, in the form of `layout`. All ranks call it together. Raises
        ValueError if nothing was measured yet."""
        if not self._planner.has_measurements:
            raise ValueError("no layer was measured yet; train some steps first")
        plan, now, then = self._planner.advise()
        text = self._source.text(plan)
        print_once(f"> {self._source.flag} '{text}' is predicted to make a step {1 - then / now:.1%} shorter")
        return text

    def _carry_out(self, choice: Choice) -> None:
        if self._config.once:
            self._settled = True
            self._observer.stop_measuring()
            now, then = choice.predicted
            print_once(
                f"> final layout: {self._source.flag} '{self._source.text(choice.plan)}', predicted to make a step "
                f"{1 - then / now:.1%} shorter ({choice.reason})"
            )
        before = self.mover.plan
        if choice.plan.chunks == before.chunks:
            if choice.action == "keep" and self._repacker.consider(
                choice.cost, choice.plan, choice.peaks, dist.get_world_size()
            ):
                choice = choice._replace(reason=self._repacker.reason)
            self._report_decision(choice, before, None)
            return
        moved = self.move(choice.plan)
        self._planner.learn_speed(before, moved)
        self._report_decision(choice, before, moved)

    def move(self, plan: StagePlan) -> Moved:
        """Move layers to `plan` now."""
        self._warm = self.iteration
        self._planner.forget()
        trained, before = self._loop.trained(), self.mover.plan
        moved = self.mover.move(plan, trained.optimizer, trained.scheduler)
        if plan.stages < before.stages:
            self._planner.restart()
            self._report_release(before, moved)
        return moved

    def _report_decision(self, choice: Choice, before: StagePlan, moved: Moved | None) -> None:
        if dist.get_rank():
            return
        if moved is not None:
            print(f"> layers moved to {self._source.text(choice.plan)}: {choice.reason}", flush=True)
        self._report(decision_event(self.iteration, self._config, choice, before, moved, self._source.text))

    def _report_release(self, before: StagePlan, moved: Moved) -> None:
        plan, costs = self.mover.plan, self._planner.costs
        if dist.get_rank():
            return
        freed = dist.get_world_size() // plan.stages * (before.stages - plan.stages)
        print_once(f"> the pipeline has {plan.stages} instead of {before.stages} stages; {freed} ranks left the job")
        cost = costs.cost if costs.iterations else None
        reason, shown = self._repacker.reason, self._source.text
        released = release_event(self.iteration, before, plan, cost, moved, reason, shown)
        self._report(released | {"ranks_freed": freed})
