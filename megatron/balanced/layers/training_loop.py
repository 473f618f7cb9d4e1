"""What layer balancing takes from a loop that calls its callbacks itself, as Megatron-LM's trainer does here."""

from dataclasses import dataclass

from megatron.balanced.layers.move_groups import MoveGroups
from megatron.balanced.layers.shrink import Shrinking
from megatron.balanced.observe.observer import Observer
from megatron.balanced.shared.callbacks import Callbacks

__all__ = ["TrainingLoop"]


@dataclass(frozen=True)
class TrainingLoop:
    """A loop in which the layer balancer is one of several callbacks (`megatron.balanced.shared.callbacks.Callbacks`).

    callbacks: of the loop, told of moves. The loop keeps the list up to date.
    observer: measures the steps. It is one of the callbacks, and begins steps before the layer balancer.
    groups: of moves. The loop may connect them before the model is complete.
    log_interval: iterations between two logs of losses.
    weight_share: fraction of a layer's backward seconds that fills pipeline bubbles; 0 without deferred gradients.
    shrinking: what the loop provides so that its pipeline may get shorter; None if it cannot.
    """

    callbacks: Callbacks
    observer: Observer
    groups: MoveGroups
    log_interval: int = 1
    weight_share: float = 0.0
    shrinking: Shrinking | None = None
