"""What a move from one plan to the next carries, and how long that takes."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from balancing.layers.stage_plan import StagePlan

__all__ = ["Move", "migration_bytes", "migration_seconds", "moves"]


class Move(NamedTuple):
    """A layer that changes stage."""

    layer: int
    source: int
    target: int


def moves(current: StagePlan, plan: StagePlan) -> tuple[Move, ...]:
    """The layers that change stage, ascending. Raises ValueError if the plans are of different models."""
    if current.layers != plan.layers:
        raise ValueError(f"the current plan has {current.layers} layers, the new one {plan.layers}")
    pairs = enumerate(zip(current.stage_of, plan.stage_of, strict=True))
    return tuple(Move(layer, source, target) for layer, (source, target) in pairs if source != target)


def migration_bytes(current: StagePlan, plan: StagePlan, layer_bytes: ArrayLike) -> float:
    """Bytes that leave any stage; layer_bytes: [layer] or one number, what a rank holds of a layer."""
    weight = np.broadcast_to(np.asarray(layer_bytes, dtype=float), (plan.layers,))
    return float(sum(weight[move.layer] for move in moves(current, plan)))


def migration_seconds(
    current: StagePlan, plan: StagePlan, layer_bytes: ArrayLike, bandwidth: float, *, fixed: float = 0.0
) -> float:
    """Seconds training stands still for a move; 0 if nothing moves.

    layer_bytes: [layer] or one number, bytes a rank holds of a layer: weights and optimizer state. bandwidth: bytes/s
    that a rank sends, and receives, at a time. fixed: seconds that every move takes besides, to plan and to rebuild
    buffers and optimizer. The busiest rank, in the busier direction, sets the pace.
    """
    if not bandwidth > 0:
        raise ValueError(f"bandwidth is {bandwidth}; it must be above 0 bytes/s")
    moving = moves(current, plan)
    if not moving:
        return 0.0
    weight = np.broadcast_to(np.asarray(layer_bytes, dtype=float), (plan.layers,))
    traffic = np.zeros((2, max(current.stages, plan.stages)))
    for move in moving:
        traffic[0, move.source] += weight[move.layer]
        traffic[1, move.target] += weight[move.layer]
    return fixed + float(traffic.max()) / bandwidth
