"""Tells of steps in which no token of any rank counts for the loss, for example because all of it was masked.

Such a step has no gradients. Megatron-LM logs no loss for it, since 0 / 0 is NaN, and counts no NaN iteration.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu

from balancing.report import event
from megatron.balanced.shared.callbacks import StepCallback

__all__ = ["EmptySteps"]

_SAID = "no token of any rank counts for the loss: the step has no gradients, and its loss is 0 / 0"


class EmptySteps(StepCallback):
    """Looks for such steps. Only a loss that is NaN takes a collective. The host waits for no device: it looks at a
    step once it has ended, when the next one ends.

    note: adds an event to the report (`Observer.note`); None without one.
    """

    def __init__(self, note: Callable[[Callable[[], dict[str, Any] | None]], None] | None) -> None:
        self._note = note
        self._counts: list[torch.Tensor] = []  # tokens with a loss of each micro-batch of this rank
        self._waiting: list[_Step] = []
        self._iteration = 0

    def count(self, tokens: torch.Tensor) -> None:
        """A micro-batch of this rank has this many tokens with a loss."""
        self._counts.append(tokens)

    def begin_step(self, iteration: int, config: Any) -> None:
        self._iteration = iteration
        self._counts.clear()

    def begin_schedule(self) -> None:
        self._counts.clear()  # the schedule may run twice

    def end_step(self) -> None:
        losses, *_ = self.run.result  # of Megatron-LM's train_step
        loss = losses.get("lm loss")
        if loss is None or not self._counts:
            return
        step = _Step(self._iteration, loss.to("cpu", non_blocking=True), torch.stack(self._counts).sum())
        if self._note is not None:
            self._note(partial(_event, step))
        self._waiting.append(step)
        while len(self._waiting) > 1:
            self._waiting.pop(0).look()

    def end_training(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        while self._waiting:
            self._waiting.pop(0).look()

    flush = end_training


class _Step:
    """A step that has ended: its loss on the host, and tokens with a loss on this rank."""

    def __init__(self, iteration: int, loss: torch.Tensor, tokens: torch.Tensor) -> None:
        self.iteration, self._loss, self._tokens = iteration, loss, tokens
        self._said: bool | None = None

    def look(self) -> bool:
        """Whether no token had a loss, as this rank has to tell; the first call says so in the log. All ranks of the
        last stage call this together."""
        if self._said is None:
            self._said = False
            if self._loss.isnan():
                dist.all_reduce(self._tokens, group=mpu.get_data_parallel_group(with_context_parallel=True))
                self._said = not int(self._tokens) and dist.get_rank() == dist.get_world_size() - 1
            if self._said:
                print(f"> iteration {self.iteration + 1}: {_SAID}", flush=True)
        return self._said


def _event(step: _Step) -> dict[str, Any] | None:
    """The line of the report about `step`, if there is any."""
    if not step.look():
        return None
    return event(step.iteration + 1, "training", "loss", imbalance_before=1.0, action="no loss", reason=_SAID)
