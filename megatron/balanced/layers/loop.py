"""What moves of layers need of the training loop around them, whichever loop that is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.optimizer import OptimizerConfig

from balancing.layers.repack import Release
from megatron.balanced.shared.callbacks import StepCallback

__all__ = ["Departure", "Optimized", "TrainingLoop"]


class Departure(Protocol):
    """The departure of ranks, which began when it was made. leaves: whether this rank is one of them."""

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

    iterations: of the whole training; None where nobody knows.
    log_interval: iterations between two logs of losses, after which ranks may leave.
    timeout_minutes: of collectives.
    gloo_groups: whether optimizers have process groups of hosts.
    optimizer_overrides: gives the overrides of parameter groups that `get_megatron_optimizer` got.
    trained: gives what is trained; called between steps and at their begin.
    callbacks: gives those that are told of moves and releases.
    renew_schedule: takes the schedule of micro-batches for the process groups that there are from now on.
    depart: begins a release of ranks, from the model chunks of this rank and a function that gathers over all ranks.
    weight_share: the part of a layer's backward seconds that fills waits of the pipeline; 0 if nothing does.

    `renew_schedule` and `depart` are None where the pipeline stays as long as it is.
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
