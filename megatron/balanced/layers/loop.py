"""The interface between layer moves and the training loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.optimizer import OptimizerConfig

from balancing.layers.repack import Release
from megatron.balanced.shared.callbacks import StepCallback

__all__ = ["Departure", "Optimized", "TrainingLoop"]


class Departure(Protocol):
    """A release of ranks in progress. leaves: whether this rank leaves."""

    leaves: bool

    def finish(self) -> None:
        """Called when this rank has sent and received everything. Does not return on ranks that leave."""


class Optimized(Protocol):
    """The optimizer of the model, and the scheduler of its learning rate."""

    optimizer: Any
    scheduler: Any


@dataclass(frozen=True)
class TrainingLoop:
    """A loop that trains with `megatron.core`.

    iterations: of the whole training; None if unknown.
    log_interval: iterations between two logs of losses. Ranks may leave only after a log.
    timeout_minutes: of collectives.
    gloo_groups: whether optimizers have gloo process groups.
    optimizer_overrides: optimizer config -> the `config_overrides` passed to `get_megatron_optimizer`.
    trained: returns the optimizer and its scheduler. Called between steps and when a step begins.
    callbacks: returns the callbacks to tell of moves and releases.
    renew_schedule: chooses the schedule of micro-batches again, for the new process groups.
    depart: begins a release of ranks. Takes the release, the model chunks of this rank, and a function that gathers
        over all ranks.
    weight_share: fraction of a layer's backward seconds that fills pipeline bubbles; 0 without deferred gradients.

    `renew_schedule` and `depart` are None if the pipeline cannot get shorter.
    """

    iterations: int | None
    log_interval: int
    timeout_minutes: float
    gloo_groups: bool
    optimizer_overrides: Callable[[OptimizerConfig], Any]
    trained: Callable[[], Optimized]
    callbacks: Callable[[], Sequence[StepCallback]]
    renew_schedule: Callable[[], None] | None = None
    depart: Callable[[Release, list[torch.nn.Module], Callable[[Any], list[Any]]], Departure] | None = None
    weight_share: float = 0.0
