"""Callbacks of a training run: around each step, around the schedule inside it, and when layers move.

Megatron-LM has no callbacks. Its `train_step` is the one function that knows the iteration, the model, the optimizer
and the schedule while no micro-batch is in flight, so one row of the patch table replaces it by `with_callbacks`. The
report and the balancers are callbacks; users pass theirs to `megatron.balanced.trainer.train.train`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron.core.transformer.moe.paged_stash import PagedStashRunner

__all__ = [
    "Callbacks",
    "HeldBytes",
    "StepCallback",
    "Trained",
    "registered",
    "trained",
    "use_schedule",
    "with_callbacks",
]


class HeldBytes(NamedTuple):
    """Device memory in bytes that a callback needs on this rank, in addition to the model.

    layers: layer number (from 0) -> bytes that move with this layer.
    buffers: bytes that a rank needs whichever layers it has.
    """

    layers: Mapping[int, float] = MappingProxyType({})
    buffers: float = 0.0


def _no_report(event: dict[str, Any]) -> None:
    """Drop an event of a run without a report."""


class StepCallback:
    """Base class of all callbacks. Every method does nothing; override those you need.

    Every rank has its own instance. All methods but `layer_arrived` and `head_arrived` are called on all ranks of the
    job, so they may communicate. Callbacks are called in the order of registration; `end_schedule` and `end_step` in
    reverse order. An exception in a callback ends the run.

    report: adds an event (`balancing.report.event`) to the report of the step in progress, if there is a report.
    trial_name: what it is called in trials (`balancing.trials`), if a step can leave it out without changing a number.
    left_out: whether the step in progress leaves it out. Trials set it before `begin_step`.
    """

    report: Callable[[dict[str, Any]], None] = staticmethod(_no_report)
    trial_name: str | None = None
    left_out = False

    def attach(self, chunks: list[Any]) -> None:
        """The model has been built; the optimizer has not. `chunks`: this rank's model chunks, wrapped for data
        parallelism. The list and the wrappers stay the same for the whole run. Do not replace modules from now on:
        data parallelism refers to them."""

    def begin_step(self, iteration: int, config: Any) -> None:
        """Before iteration `iteration` (from 0). `config` is the model's config, which the schedule reads."""

    def begin_schedule(self) -> None:
        """Before the first forward pass. The schedule may begin and end twice within a step: Megatron-LM runs it again
        if a loss looks wrong, or if a rank got more tokens than --moe-expert-rank-capacity-factor allows."""

    def end_schedule(self) -> None:
        """After the last backward pass and gradient reduction, before the optimizer's step."""

    def end_step(self) -> None:
        """After the optimizer's step."""

    def abandon_schedule(self) -> None:
        """The schedule, or a callback around it, has raised an exception that the loop may catch. Undo on this rank
        what `begin_step` and `begin_schedule` have done, if they were called. Do not communicate: other ranks may be
        elsewhere. Not called in Megatron-LM's loop, where an exception ends the run."""

    def layer_arrived(self, layer: Any, chunk: int) -> None:
        """`layer` has moved to model chunk `chunk` of this rank as it was, with its optimizer state. It is new.
        Hooks and attributes of balancers and callbacks have been left out: set yours again."""

    def layers_moved(self) -> None:
        """Layers have moved, perhaps not to or from this rank. Gradient buffers, buckets and optimizer have been
        rebuilt on every rank. The job may have fewer ranks than before. Called after `layer_arrived` and
        `head_arrived`, before the step goes on."""

    def flush(self) -> None:
        """Write what has been measured. Ranks are about to leave the job, and get no further call."""

    def head_arrived(self, model: Any) -> None:
        """`model`, a chunk of this rank, has received the final norm and the head from a rank that has left."""

    def use_cluster(self, cluster: Any) -> None:
        """Plan for this `Cluster` of the whole job from now on. Called between steps, with the same on all ranks."""

    def held(self) -> HeldBytes:
        """The memory that this callback needs, for planners of the free memory. Called between steps and at
        `attach`."""
        return HeldBytes()

    def end_training(self) -> None:
        """After the last step, also when Megatron-LM ends the run early, for instance at --exit-interval. Not called
        when an exception ends it."""


class Callbacks(list[Any]):
    """The callbacks of one loop, in the order of registration. All calls to them go through here, in Megatron-LM's loop
    and in others (`megatron.balanced.loop.Balancers`).

    Until the model is there, a function from the model chunks to a callback may stand for one that takes a finished
    model. If the callback takes the optimizer and its scheduler as well, which are built later, this function returns
    another one, from these two to the callback.
    """

    def attach(self, chunks: list[Any]) -> list[Any]:
        """The model has been built. Returns `chunks`, as Megatron's model hooks must."""
        for number, callback in enumerate(self):
            if isinstance(callback, StepCallback):
                callback.attach(chunks)
            else:
                self[number] = callback(chunks)
        return chunks

    def complete(self, optimizer: Any, scheduler: Any) -> None:
        """The optimizer has been built. Called before each step, of which the first one counts."""
        for number, callback in enumerate(self):
            if not isinstance(callback, StepCallback):
                self[number] = callback(optimizer, scheduler)

    def begin_step(self, iteration: int, config: Any) -> None:
        for callback in self:
            callback.begin_step(iteration, config)

    def end_step(self) -> None:
        for callback in reversed(self):
            callback.end_step()

    def begin_schedule(self) -> None:
        for callback in self:
            callback.begin_schedule()

    def end_schedule(self) -> None:
        for callback in reversed(self):
            callback.end_schedule()

    def within(self, schedule: Callable) -> Callable:
        """`schedule` between `begin_schedule` and `end_schedule`."""

        @functools.wraps(schedule)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.begin_schedule()
            result = schedule(*args, **kwargs)
            self.end_schedule()
            return result

        return run

    @contextlib.contextmanager
    def may_fail(self) -> Iterator[None]:
        """A context of a schedule. If it raises an exception, the loop may catch that and go on with another one."""
        try:
            yield
        except BaseException:
            for callback in reversed(self):
                callback.abandon_schedule()
            raise

    def end_training(self) -> None:
        for callback in self:
            if isinstance(callback, StepCallback):  # else there was no step
                callback.end_training()


class Trained(NamedTuple):
    """Objects of the training loop: model chunks, optimizer, learning-rate scheduler, data iterator (a list with one
    for each model chunk if there are several), and the schedule, in Megatron-LM's wrappers. `losses`: those that
    Megatron-LM logs, by name, on the last stage at the end of the step."""

    model: Any
    optimizer: Any
    scheduler: Any
    data: Any
    schedule: Any
    losses: Mapping[str, Any] = MappingProxyType({})


registered = Callbacks()  # of the run in progress
_trained: list[Trained] = []
_schedule: list[Callable] = []


def use_schedule(schedule: Callable | None) -> None:
    """Run `schedule` in later steps instead of the training loop's own; None restores the loop's own."""
    _schedule[:] = [schedule] if schedule is not None else []


def trained() -> Trained:
    """The model, optimizer and scheduler of the step in progress. Valid only within a step."""
    return _trained[-1]


def _run_again(runner: PagedStashRunner, is_training: bool = True) -> None:
    """Replaces `runner.prepare_for_rerun`, which Megatron-LM calls between two runs of the schedule in one step."""
    registered.end_schedule()
    PagedStashRunner.prepare_for_rerun(runner, is_training)
    registered.begin_schedule()


def with_callbacks(original: Callable) -> Callable:
    """Megatron's `train_step` with all registered callbacks around it."""

    @functools.wraps(original)
    def train_step(
        forward_step_func: Callable,
        data_iterator: Any,
        model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        config: Any,
        forward_backward_func: Callable,
        iteration: int | None = None,
        **groups: Any,
    ) -> Any:
        if isinstance(forward_backward_func, PagedStashRunner):
            forward_backward_func.prepare_for_rerun = functools.partial(_run_again, forward_backward_func)
        _trained[:] = [Trained(model, optimizer, opt_param_scheduler, data_iterator, forward_backward_func)]
        registered.complete(optimizer, opt_param_scheduler)
        registered.begin_step(iteration or 0, config)
        schedule = registered.within((_schedule or [forward_backward_func])[0])
        result = original(
            forward_step_func,
            data_iterator,
            model,
            optimizer,
            opt_param_scheduler,
            config,
            schedule,
            iteration=iteration,
            **groups,
        )
        _trained[:] = [_trained[-1]._replace(losses=result[0])]
        registered.end_step()
        _trained.clear()
        return result

    return train_step
