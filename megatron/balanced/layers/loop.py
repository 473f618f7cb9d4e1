"""What layer balancing takes from a loop that calls its callbacks itself, as Megatron-LM's trainer does here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from balancing.layers.repack import Release
from megatron.balanced.layers.groups import MoveGroups
from megatron.balanced.observe.observer import Observer
from megatron.balanced.shared.callbacks import Callbacks

__all__ = ["Departure", "TrainingLoop"]


class Departure(Protocol):
    """A release of ranks in progress. leaves: whether this rank leaves."""

    leaves: bool

    def finish(self) -> None:
        """Called when this rank has sent and received everything. Does not return on ranks that leave."""


@dataclass(frozen=True)
class TrainingLoop:
    """A loop in which the layer balancer is one of several callbacks (`megatron.balanced.shared.callbacks.Callbacks`).

    callbacks: of the loop, told of moves and releases. The loop keeps the list up to date.
    observer: measures the steps. It is one of the callbacks, and begins steps before the layer balancer.
    groups: of moves. The loop may connect them before the model is complete.
    log_interval: iterations between two logs of losses. Ranks may leave only after a log.
    weight_share: fraction of a layer's backward seconds that fills pipeline bubbles; 0 without deferred gradients.
    build: builds the model of this rank's stage, in a shorter pipeline.
    depart: begins a release of ranks. Takes the release, the model chunks of this rank, and a function that gathers
        over all ranks.
    renew_schedule: chooses the schedule of micro-batches again, for the process groups after a release.

    `build`, `depart` and `renew_schedule` are None if the pipeline cannot get shorter.
    """

    callbacks: Callbacks
    observer: Observer
    groups: MoveGroups
    log_interval: int = 1
    weight_share: float = 0.0
    build: Callable[[ProcessGroupCollection], torch.nn.Module] | None = None
    depart: Callable[[Release, list[torch.nn.Module], Callable[[Any], list[Any]]], Departure] | None = None
    renew_schedule: Callable[[], None] | None = None
