"""What layer balancing takes from Megatron-LM's trainer, beside a run (`megatron.balanced.run`)."""

from dataclasses import dataclass

from megatron.balanced.layers.move_groups import MoveGroups
from megatron.balanced.layers.shrink import Shrinking
from megatron.balanced.observe.observer import Observer

__all__ = ["TrainingLoop"]


@dataclass(frozen=True)
class TrainingLoop:
    """A loop with layers that move.

    observer: measures the steps. It is one of the callbacks of the run, and begins steps before the balancers.
    groups: of moves. The loop may connect them before the model is complete.
    log_interval: iterations between two logs of losses.
    weight_share: fraction of a layer's backward seconds that fills pipeline bubbles; 0 without deferred gradients.
    shrinking: what the loop provides so that its pipeline may get shorter; None if it cannot.
    """

    observer: Observer
    groups: MoveGroups
    log_interval: int = 1
    weight_share: float = 0.0
    shrinking: Shrinking | None = None
