"""Balancers for any loop that trains with `megatron.core`. They take a finished model and wrap the loop's schedule.

Every loop calls a schedule of `megatron.core.pipeline_parallel.schedules`. `Balancers.schedule` wraps that call. Layer
balancing also needs `Balancers.after_step` after each optimizer step. Nothing else in the loop changes.
`examples/plain_loop.py` is an example.
"""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config, unwrap_model

from balancing.layers.config import LayerConfig
from balancing.layers.plan import ONE_CHUNK
from megatron.balanced.experts.balancer import ExpertBalancer
from megatron.balanced.layers import balancer as layers
from megatron.balanced.layers.loop import TrainingLoop
from megatron.balanced.layers.source import LayerSource
from megatron.balanced.observe.observer import Observer
from megatron.balanced.sequences.balancer import SequenceBalancer
from megatron.balanced.shared.callbacks import Callbacks, StepCallback
from megatron.balanced.shared.counters import keep_counters_exact
from megatron.balanced.shared.job import Job
from megatron.balanced.shared.micro_batches import get_num_microbatches, schedule_of
from megatron.balanced.shared.model_checks import check_model, mark_model, unmark_model

__all__ = ["Balancers", "ExpertBalancer", "LayerBalancer", "SequenceBalancer"]

_SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)


class LayerBalancer(StepCallback):
    """Moves layers of a finished model between its pipeline stages, between two steps. Construct it on all ranks
    together, before the first step.

    Each training schedule of `Balancers` is measured. Every `interval` steps, `Balancers.after_step` decides whether
    layers move. Moves are unsafe in loops that keep copies of weights by name. There, pass `moves=False` and restart
    with the layout that `advise` returns.

    chunks: the model chunks of this rank, each in `DistributedDataParallel`.
    optimizer: from `get_megatron_optimizer`.
    scheduler: of the learning rate, with Megatron-LM's `step`.
    config: settings such as `interval` and `planner`; None for the defaults.
    layer_spec: virtual stage of a chunk -> the layer spec that the model was built with, in the current layout.
    job: as for `ExpertBalancer`. Only its timeout is read.
    overrides: the `config_overrides` passed to `get_megatron_optimizer`.
    steps: number of training steps; None if unknown.
    gloo_groups: the `use_gloo_process_groups` passed to `get_megatron_optimizer`.
    moves: whether `Balancers.after_step` moves layers.
    on_layout: called with the string of each new layout, for checkpoints.
    report: called on rank 0 for each event, with a function that returns the event.

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
    ) -> None:
        check_model("LayerBalancer", chunks, optimizer)
        config = config or LayerConfig(enabled=True)
        model = get_model_config(chunks[0])
        if not isinstance(optimizer, ChainedOptimizer):
            raise ValueError(
                f"layers cannot move with an optimizer of class {type(optimizer).__name__}; use get_megatron_optimizer"
            )
        if model.pipeline_model_parallel_size == 1:
            raise ValueError("layers cannot move, since there is only one pipeline stage; drop the LayerBalancer")
        if config.repacks:
            raise ValueError("only pretrain_gpt.py can shorten the pipeline; leave the settings of repacking out")
        self.chunks, self._moves, self._steps = list(chunks), moves, 0
        self._micro_batches: tuple[int, ...] = ()  # of the last two schedules; the earlier one has been measured
        self._observer, self.beside = Observer(measures=True), [self]  # `beside`: all balancers, told of moves
        pattern = getattr(unwrap_model(self.chunks)[0], "hybrid_layer_pattern", None)
        source = LayerSource(model, layer_spec, pattern=pattern)
        if on_layout is not None:
            source.on_layout = on_layout
        loop = TrainingLoop(
            iterations=steps,
            log_interval=1,
            timeout_minutes=(job or Job).timeout_minutes,
            gloo_groups=gloo_groups,
            optimizer_overrides=lambda config: overrides,
            trained=lambda: _Optimized(optimizer, scheduler),
            callbacks=lambda: self.beside,
        )
        self._inner = layers.LayerBalancer(config, source, self._observer, loop, self._tell(report))
        self._inner.attach(self.chunks)
        plan = self._inner.mover.plan
        if config.planner in ONE_CHUNK and plan.virtual > 1:
            raise ValueError(f"the planner {config.planner} plans one chunk a stage, not {plan.virtual}; use optimal")
        if config.planner in ONE_CHUNK and plan.behind:
            raise ValueError(
                f"the planner {config.planner} does not support stages without layers behind multi-token prediction; "
                "use optimal"
            )
        self._observer.attach(self.chunks)
        self._hooks = [
            chunk.register_forward_pre_hook(partial(self._enter, number))
            for number, chunk in enumerate(unwrap_model(self.chunks))
        ]
        mark_model("LayerBalancer", chunks)

    def _tell(self, report: Callable[[Callable[[], dict[str, Any]]], None] | None) -> Callable[[dict[str, Any]], None]:
        return lambda event: None if report is None else report(lambda: event)

    def _enter(self, number: int, *unused: Any) -> None:
        self._observer.documents(list, number)

    @property
    def layout(self) -> str:
        """The current layout, as a value of --pipeline-model-parallel-layout; for a hybrid model, its pattern."""
        return self._inner.layout

    def move(self, layout: str) -> None:
        """Move layers to `layout` now, between two steps. All ranks call it together."""
        self._inner.move(self._inner.read(layout))
        self._inner.restart()

    def advise(self) -> str:
        """The best layout for the measured costs. All ranks call it together, after at least two steps."""
        with schedule_of(self._micro_batches[-1] if self._micro_batches else 1):
            return self._inner.advise()

    def layer_arrived(self, layer: Any, chunk: int) -> None:
        self._observer.layer_arrived(layer, chunk)

    def begin_step(self, iteration: int, config: Any) -> None:
        self._observer.begin_step(self._steps, config)

    def begin_schedule(self) -> None:
        self._observer.begin_schedule()

    def end_schedule(self) -> None:
        self._observer.end_schedule()

    def end_step(self) -> None:
        self._micro_batches = (*self._micro_batches[-1:], get_num_microbatches())
        self._observer.end_step()

    def abandon_schedule(self) -> None:
        self._observer.abandon_schedule()

    def close(self) -> None:
        """Stop measuring. Layers stay where they are."""
        self._observer.stop_measuring()
        while self._hooks:
            self._hooks.pop().remove()

    def after_step(self) -> None:
        """An optimizer step has ended. Layers may move."""
        self._steps += 1
        if not self._micro_batches:
            return
        measured, last = self._micro_batches[0], self._micro_batches[-1]
        if not self._moves:
            self._inner.add_measured(self._steps, measured)
            return
        with schedule_of(last):
            self._inner.begin_step(self._steps, None, measured)


class _Optimized(NamedTuple):
    optimizer: Any
    scheduler: Any


class Balancers:
    """The balancers of one model. A process with several models, such as an actor and a critic, makes one for each.

    before: called with the keyword arguments of each balanced schedule before it begins, and may replace them; None
        for nothing. A loop whose micro-batches hold replayed routing calls `will_route` here.
    """

    def __init__(self, *balancers: StepCallback, before: Callable[[dict[str, Any]], None] | None = None) -> None:
        kinds = [type(balancer) for balancer in balancers]
        if len({*kinds}) < len(kinds):
            raise ValueError(f"{kinds[0].__name__} is given twice; a model has one balancer of a kind")
        self._balancers, self._before = Callbacks(balancers), before
        chunks = [chunk for balancer in balancers for chunk in getattr(balancer, "chunks", ())]
        self._chunks = set(map(id, chunks))
        for chunk in chunks:
            keep_counters_exact(chunk.modules())
        for balancer in balancers:
            if isinstance(balancer, LayerBalancer):
                balancer.beside = list(balancers)
        self._schedules = 0
        self._installed: list[tuple[str, Callable]] = []  # schedules of megatron.core that are wrapped

    def schedule(self, forward_backward_func: Callable) -> Callable:
        """Wrap a schedule with the balancers. Calls with `forward_only` and calls for other models run unchanged."""

        @functools.wraps(forward_backward_func)
        def run(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("forward_only") or id(_first(kwargs["model"])) not in self._chunks:
                return forward_backward_func(*args, **kwargs)
            if self._before is not None:
                self._before(kwargs)
            with schedule_of(kwargs["num_microbatches"]), self._balancers.may_fail():
                self._balancers.begin_step(self._schedules, get_model_config(_first(kwargs["model"])))
                result = self._balancers.within(forward_backward_func)(*args, **kwargs)
                self._balancers.end_step()
            self._schedules += 1
            return result

        return run

    def after_step(self) -> None:
        """Call this on all ranks after each optimizer step if layers are balanced. Layers may move here."""
        for balancer in self._balancers:
            if isinstance(balancer, LayerBalancer):
                balancer.after_step()

    def install(self) -> None:
        """Wrap the schedules inside `megatron.core`, for a loop whose code you cannot edit. Call it before the loop
        looks up its schedule. Raises ValueError if the balancers are installed already."""
        if self._installed:
            raise ValueError("the balancers are installed already; close() them first")
        for name in _SCHEDULES:
            self._installed.append((name, getattr(schedules, name)))
            setattr(schedules, name, self.schedule(getattr(schedules, name)))

    def will_route(self, loads: Sequence[Any]) -> None:
        """Announce the routing of the next training schedule, as `ExpertBalancer.will_route` does."""
        for balancer in self._balancers:
            if isinstance(balancer, ExpertBalancer):
                balancer.will_route(loads)

    def release(self) -> None:
        """Free the memory of replica slots until `restore`, for example for a rollout. All ranks call it together."""
        for balancer in self._balancers:
            if isinstance(balancer, ExpertBalancer):
                balancer.release()

    def restore(self) -> None:
        """Allocate the slots again. All ranks call it together."""
        for balancer in self._balancers:
            if isinstance(balancer, ExpertBalancer):
                balancer.restore()

    def close(self) -> None:
        """Undo `install` and free the balancers' memory. The model is plain from now on."""
        while self._installed:
            setattr(schedules, *self._installed.pop())
        for balancer in self._balancers:
            if isinstance(balancer, ExpertBalancer | SequenceBalancer | LayerBalancer):
                balancer.close()
            unmark_model(type(balancer).__name__, getattr(balancer, "chunks", ()))


def _first(model: Any) -> torch.nn.Module:
    return model[0] if isinstance(model, list) else model
