"""Moves layers of a finished model between its pipeline stages: when to decide, and how a decision is carried out.

Every `interval` steps, between two steps, all ranks make the same decision from measured costs
(`megatron.balanced.layers.planning`). If layers move (`megatron.balanced.layers.mover`), training continues with the
same numbers. The gate then watches the measured steps and reverts a move that made them slower. If the current plan is
the best one and the user allows it, the pipeline gets shorter (`megatron.balanced.layers.shrink`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer
from megatron.core.utils import get_model_config, unwrap_model

from balancing.layers import StagePlan
from balancing.layers.config import LayerConfig
from balancing.layers.plan import check_movable
from balancing.layers.repack import check_repack
from megatron.balanced.layers.events import decision_event, release_event
from megatron.balanced.layers.move_groups import MoveGroups
from megatron.balanced.layers.mover import LayerMover, Moved
from megatron.balanced.layers.planning import Choice, LayerPlanner
from megatron.balanced.layers.shrink import Repacker
from megatron.balanced.layers.source import LayerSource
from megatron.balanced.layers.training_loop import TrainingLoop
from megatron.balanced.observe.observer import Observer
from megatron.balanced.shared.callbacks import StepCallback
from megatron.balanced.shared.captured_schedule import captures_iterations, drop_graph, graph_of_iterations, renew_stash
from megatron.balanced.shared.job import Job
from megatron.balanced.shared.log import print_once
from megatron.balanced.shared.model_checks import check_model, mark_model

__all__ = ["LayerBalancer"]


class LayerBalancer(StepCallback):
    """Moves layers of a finished model between its pipeline stages, between two steps. Construct it on all ranks
    together, before the first step.

    Each training schedule of `Balancers` is measured. Every `interval` steps, before a schedule, all ranks decide
    whether layers move, so losses and checkpoints of a step belong to the layout before a move. Moves are unsafe in
    loops that keep copies of weights by name. There, pass `moves=False` and restart with the layout that `advise`
    returns.

    chunks: the model chunks of this rank, each in `DistributedDataParallel`.
    optimizer: from `get_megatron_optimizer`.
    scheduler: scheduler of the learning rate, with Megatron-LM's `step`.
    config: settings such as `interval` and `planner`; None for the defaults.
    layer_spec: virtual stage of a chunk -> the layer spec that the model was built with, in the current layout.
    job: as for `ExpertBalancer`. Only its timeout and `recaptures` are read.
    overrides: the `config_overrides` passed to `get_megatron_optimizer`.
    steps: number of training steps; None if unknown.
    gloo_groups: the `use_gloo_process_groups` passed to `get_megatron_optimizer`.
    moves: whether layers move.
    on_layout: called with the string of each new layout, for checkpoints.
    report: called on rank 0 for each event, with a function that returns the event.
    loop: what only Megatron-LM's trainer provides.

    Raises ValueError for a model or an optimizer whose layers cannot move.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        optimizer: Any,
        scheduler: Any,
        config: LayerConfig | None = None,
        *,
        layer_spec: Callable[[int | None], Any],
        job: Job | None = None,
        overrides: Any = None,
        steps: int | None = None,
        gloo_groups: bool = True,
        moves: bool = True,
        on_layout: Callable[[str], None] | None = None,
        report: Callable[[Callable[[], dict[str, Any]]], None] | None = None,
        loop: TrainingLoop | None = None,
    ) -> None:
        facts = job or Job()
        check_model("LayerBalancer", chunks, optimizer, config=config, recaptures=facts.recaptures)
        self._config = config = config or LayerConfig(enabled=True)
        model = get_model_config(chunks[0])
        loop = loop or TrainingLoop(Observer(measures=True, watches_entry=True), MoveGroups(facts.timeout_minutes))
        _check(optimizer, config, model, loop)
        self.chunks, self._moves, self._report = list(chunks), moves, report
        self.iteration = 0  # from 0, the step in progress, or else the next one
        self._first: int | None = None  # the first step
        self._warm = 0  # the last step that began with new layers
        self._settled = False
        self._has_begun, self._captures = False, captures_iterations(model)
        self._micro_batches: tuple[int, ...] = ()  # of the last two schedules; the earlier one has been measured
        pattern = getattr(unwrap_model(self.chunks)[0], "hybrid_layer_pattern", None)
        self._source = LayerSource(model, layer_spec, pattern=pattern)
        if on_layout is not None:
            self._source.on_layout = on_layout

        def new_optimizer(config: Any, chunks: Any) -> Any:
            return get_megatron_optimizer(
                config, chunks, config_overrides=_as_given(overrides), use_gloo_process_groups=gloo_groups
            )

        def listeners() -> list[StepCallback]:
            return [self] if self.run is None else self.run.callbacks

        self.mover = LayerMover(
            self.chunks, optimizer, scheduler, new_optimizer, self._source, loop, listeners, moves=moves
        )
        plan = self.mover.plan
        check_movable(plan, config.planner)
        self._planner = LayerPlanner(config, self.mover, model, loop.weight_share, listeners, steps)
        self._repacker = Repacker(config, loop.log_interval)
        self.observer = loop.observer
        mark_model("LayerBalancer", chunks)

    @property
    def layout(self) -> str:
        """The current layout, as a value of --pipeline-model-parallel-layout; for a hybrid model, its pattern."""
        return self._source.text(self.mover.plan)

    def move(self, layout: str) -> None:
        """Move layers to `layout` now, between two steps. All ranks call it together."""
        self.move_to(self._source.read(layout, self.mover.plan))
        self._planner.restart()

    def advise(self) -> str:
        """The best layout for the measured costs. All ranks call it together. Raises ValueError if no step was measured
        yet. The first steps are not, since they include warm-up."""
        if not (self._planner.has_measurements or self._planner.costs.iterations):
            raise ValueError("no layer was measured yet; train some steps first")
        plan, now, then = self._planner.advise(self._micro_batches[-1])
        text = self._source.text(plan)
        print_once(f"> {self._source.flag} '{text}' is predicted to make a step {1 - then / now:.1%} shorter")
        return text

    def close(self) -> None:
        """Stop measuring. Layers stay where they are."""
        self.observer.stop_measuring()

    # Around a step.

    def begin_step(self, iteration: int, config: Any) -> None:
        if self._captures and not self._has_begun:
            self._has_begun = True
            graph_of_iterations(self.run.schedule, self.chunks)

    def end_step(self) -> None:
        self._micro_batches = (*self._micro_batches[-1:], self.run.micro_batches)

    # A decision, and what follows from it.

    def between_steps(self, step: int) -> None:
        """Use what was measured. Every `interval` steps, decide whether layers move. All ranks call it together, before
        step `step`."""
        self.iteration = step
        if self.observer.measured is not None:
            measured_step, record = self.observer.measured
            # The first iteration, and the first after a move, includes warm-up, so its times are not representative.
            if measured_step > self._warm and not self._settled:
                self._planner.add(measured_step, record, self._micro_batches[0])
        if not self._moves:
            self._planner.forget(but=self._config.interval)  # as many as `advise` averages
            return
        if self._first is None:
            self._first, self._warm = step, self.run.iteration
        shorter = self._repacker.due(step)
        since = step - self._first
        decides = not self._settled and since and since % self._config.interval == 0
        if shorter is None and decides and self._planner.has_measurements:
            self._carry_out(self._planner.choose(step, self.run.micro_batches))
            shorter = self._repacker.due(step)
        if shorter is not None:
            self.move_to(shorter)

    def _carry_out(self, choice: Choice) -> None:
        if self._config.once:
            self._settled = True
            self.observer.stop_measuring()
            now, then = choice.predicted
            print_once(
                f"> final layout: {self._source.flag} '{self._source.text(choice.plan)}', predicted to make a step "
                f"{1 - then / now:.1%} shorter ({choice.reason})"
            )
        before = self.mover.plan
        if choice.plan.chunks == before.chunks:
            self.mover.agree(choice.plan)  # that it stays; a move asks for itself
            ranks = dist.get_world_size()
            if choice.action == "keep" and self._repacker.consider(
                choice.cost, choice.plan, choice.peaks, self.run.micro_batches, ranks, choice.usable
            ):
                choice = choice._replace(reason=self._repacker.reason)
            self._report_decision(choice, before, None)
            return
        moved = self.move_to(choice.plan)
        self._planner.learn_speed(before, moved)
        self._report_decision(choice, before, moved)

    def move_to(self, plan: StagePlan) -> Moved:
        """Move layers to `plan` now."""
        self._warm = self.iteration if self.run is None else self.run.iteration
        self._planner.forget()
        before = self.mover.plan
        if self._captures:  # first, since a graph holds the memory of all activations
            drop_graph(self.run.schedule)
        moved = self.mover.move(plan)
        renew_stash(None if self.run is None else self.run.schedule)
        if plan.stages < before.stages:
            self._planner.restart()
            if not dist.get_rank():
                cost = costs.cost if (costs := self._planner.costs).iterations else None
                freed = dist.get_world_size() // plan.stages * (before.stages - plan.stages)
                print_once(
                    f"> the pipeline has {plan.stages} instead of {before.stages} stages; {freed} ranks left the job"
                )
                reason, shown = self._repacker.reason, self._source.text
                self._note(release_event(self.iteration, reason, before, plan, cost, moved, freed, shown))
        return moved

    def _report_decision(self, choice: Choice, before: StagePlan, moved: Moved | None) -> None:
        if dist.get_rank():
            return
        if moved is not None:
            print(f"> layers moved to {self._source.text(choice.plan)}: {choice.reason}", flush=True)
        self._note(decision_event(self.iteration, self._config, choice, before, moved, self._source.text))

    def _note(self, event: dict[str, Any]) -> None:
        if self._report is not None:
            self._report(lambda: event)


def _as_given(overrides: Any) -> Any:
    """`overrides` as they were before `get_megatron_optimizer`. It adds to them which parameters have another optimizer
    than Muon, and refuses to be given that."""
    if overrides is None:
        return None
    return {key: override for key, override in overrides.items() if "optimizer" not in override}


def _check(optimizer: Any, config: LayerConfig, model: Any, loop: TrainingLoop) -> None:
    """Raise ValueError for what cannot move, or for settings that the loop cannot follow."""
    stages, chunks = model.pipeline_model_parallel_size, model.virtual_pipeline_model_parallel_size or 1
    if not isinstance(optimizer, ChainedOptimizer):
        raise ValueError(
            f"layers cannot move with an optimizer of class {type(optimizer).__name__}; use get_megatron_optimizer"
        )
    if stages == 1:
        raise ValueError("layers cannot move, since there is only one pipeline stage; drop the LayerBalancer")
    if config.repacks and loop.shrinking is None:
        raise ValueError("only pretrain_gpt.py can shorten the pipeline; leave the settings of repacking out")
    check_repack(config, stages, chunks)
