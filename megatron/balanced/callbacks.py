"""What happens around each training step, and around the schedule inside it.

Megatron-LM has no callbacks. `train_step` is the one place that knows the iteration, the model, the optimizer and the
schedule at a moment when no micro-batch is in flight, so whoever watches or moves something registers here. One row of
the patch table puts `with_callbacks` in its place.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

__all__ = ["StepCallback", "Trained", "callbacks", "trained", "use_schedule", "with_callbacks"]


class StepCallback(Protocol):
    """Called on every rank, in the order of registration; the end in reverse order."""

    def begin_step(self, iteration: int, config: Any) -> None:
        """Before iteration `iteration` (from 0). `config` is the model's config, which the schedule reads."""

    def begin_schedule(self) -> None:
        """Before the first forward pass. When a loss looks wrong, Megatron runs the iteration's schedule a second time
        to see whether it was the machine; then the schedule begins and ends twice within the step."""

    def end_schedule(self) -> None:
        """After the last backward pass and gradient reduction, before the optimizer's step."""

    def end_step(self) -> None:
        """After the optimizer's step."""


class Trained(NamedTuple):
    """What the training loop holds: model chunks, their optimizer, and the scheduler of its learning rate."""

    model: Any
    optimizer: Any
    scheduler: Any


callbacks: list[StepCallback] = []
_trained: list[Trained] = []
_schedule: list[Callable] = []


def use_schedule(schedule: Callable | None) -> None:
    """Have steps run `schedule` from now on, instead of the one that the training loop chose; None for that one."""
    _schedule[:] = [schedule] if schedule is not None else []


def trained() -> Trained:
    """What the step at hand trains. To be asked within a step."""
    return _trained[-1]


def with_callbacks(original: Callable) -> Callable:
    """Megatron's `train_step` with all registered callbacks around it. An error in a callback ends the run."""

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
        def schedule(*args: Any, **kwargs: Any) -> Any:
            for callback in callbacks:
                callback.begin_schedule()
            losses = (_schedule or [forward_backward_func])[0](*args, **kwargs)
            for callback in reversed(callbacks):
                callback.end_schedule()
            return losses

        _trained[:] = [Trained(model, optimizer, opt_param_scheduler)]
        for callback in callbacks:
            callback.begin_step(iteration or 0, config)
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
        for callback in reversed(callbacks):
            callback.end_step()
        _trained.clear()
        return result

    return train_step
