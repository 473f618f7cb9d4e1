"""Memory of stages: the state of their layers, buffers, and the activations of every micro-batch in flight.

A plan must fit the devices, even if it balances seconds. In 1F1B, early stages hold more micro-batches than late ones
(stage s of P holds P - s), so the same layers need more memory there. A partition that ignores this runs out of memory
on stage 0. With several chunks a stage, the chunks have their most micro-batches in flight at different times, so the
peak is taken over all points in time of the schedule.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancing.pipeline.fixed_parts import add_fixed
from balancing.pipeline.schedule import MEGATRON_DEFAULTS, Schedule
from balancing.pipeline.stage_plan import StagePlan

__all__ = ["LayerMemory", "in_flight", "stage_memory"]

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LayerMemory:
    """Bytes of the parts of a model on one rank.

    static: float array [layer], bytes of weights, gradients and optimizer state.
    activation: float array [layer] or one number for all layers, bytes that one micro-batch keeps until its backward;
        0 for a frozen layer.
    embedding, head, tail: static bytes of the parts that no plan moves (`balancing.pipeline.fixed_parts`).
    embedding_activation, head_activation: bytes that one micro-batch keeps of embedding and head until its backward.
    buffers: bytes that every rank holds with any layers, such as shared slots of expert replicas, and keys and values
        received from other ranks.

    Raises ValueError for bytes that are negative or not finite, and arrays of different lengths.
    """

    static: FloatArray
    activation: FloatArray | float = 0.0
    embedding: float = 0.0
    head: float = 0.0
    embedding_activation: float = 0.0
    head_activation: float = 0.0
    tail: float = 0.0
    buffers: float = 0.0

    def __post_init__(self) -> None:
        static = np.asarray(self.static, dtype=float)
        if static.ndim != 1 or not len(static):
            raise ValueError(f"static bytes have shape {static.shape}; give one number a layer")
        activation = np.asarray(self.activation, dtype=float)
        if activation.shape not in ((), static.shape):
            raise ValueError(f"activation bytes have shape {activation.shape}, static bytes {static.shape}")
        object.__setattr__(self, "static", static)
        object.__setattr__(self, "activation", activation)
        fixed = ("embedding", "head", "embedding_activation", "head_activation", "tail", "buffers")
        for name in ("static", "activation", *fixed):
            given = np.asarray(getattr(self, name), dtype=float)
            if not (np.isfinite(given) & (given >= 0)).all():
                raise ValueError(f"{name} bytes have {given.min()} among them; bytes must be finite and at least 0")

    @cached_property
    def activation_of_layers(self) -> FloatArray:
        """`activation` as an array [layer]."""
        return np.broadcast_to(np.asarray(self.activation), self.static.shape)

    @property
    def fixed(self) -> tuple[float, float, float]:
        """[part]: static bytes of the parts that no plan moves."""
        return self.embedding, self.head, self.tail

    @property
    def fixed_activation(self) -> tuple[float, float, float]:
        """[part]: bytes that one micro-batch keeps of the parts that no plan moves, until its backward."""
        return self.embedding_activation, self.head_activation, 0.0


@lru_cache(maxsize=64)
def in_flight(
    stages: int,
    virtual: int = 1,
    micro_batches: int | None = None,
    schedule: Schedule = MEGATRON_DEFAULTS,
) -> NDArray[np.int64]:
    """Numbers of micro-batches in flight of each chunk, at the points in time when a stage may hold the most bytes.

    stages, virtual: pipeline size, and chunks a stage.
    micro_batches: number of micro-batches of a step; None if there are enough to fill the pipeline.
    schedule: the schedule if there are several chunks. A larger group keeps the activations of more micro-batches.

    Returns an int array [stage, moment, chunk]. It contains only moments that can have the most bytes for some sizes of
    activations. Stages with fewer such moments repeat the last one. With deferred weight gradients (`weight_share`),
    every stage may hold as many micro-batches as the first stage, which holds the most without them.
    """
    if schedule.weight_share:
        first = in_flight(stages, virtual, micro_batches, replace(schedule, weight_share=0.0))[:1]
        return np.broadcast_to(first, (stages, *first.shape[1:]))
    if virtual == 1:
        most = micro_batches or stages
        return np.minimum(np.arange(stages, 0, -1), most)[:, None, None]
    group = schedule.group or stages
    count = min(micro_batches or 4 * group, 4 * group)
    chunk = np.array([c for first in range(0, count, group) for c in range(virtual)
                      for _ in range(min(group, count - first))])  # fmt: skip
    forwards = np.zeros((len(chunk) + 1, virtual), dtype=np.int64)  # [operations done, chunk]
    forwards[1:] = np.cumsum(chunk[:, None] == np.arange(virtual), axis=0)
    backwards = forwards[:, ::-1]
    moments = []
    for stage in range(stages):
        warm_up = min(2 * (stages - stage - 1) + (virtual - 1) * group + schedule.in_parts, len(chunk) - 1)
        held = forwards[warm_up + 1 :] - backwards[: len(chunk) - warm_up]
        moments.append(_extreme(held))
    most = max(len(rows) for rows in moments)
    return np.stack([np.concatenate([rows, np.repeat(rows[-1:], most - len(rows), axis=0)]) for rows in moments])


def _extreme(held: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows of `held` [moment, chunk] that can have the most bytes for some sizes of activations.

    Left out are rows between the ends of a straight run, and rows that another row equals or exceeds in every chunk.
    """
    step = np.diff(held, axis=0)
    turns = np.concatenate([[True], (step[1:] != step[:-1]).any(1), [True]]) if len(held) > 1 else np.array([True])
    rows = np.unique(held[turns], axis=0)
    exceeded = [((rows >= row).all(1) & (rows > row).any(1)).any() for row in rows]
    return rows[~np.array(exceeded)]


def stage_memory(
    plan: StagePlan,
    memory: LayerMemory,
    micro_batches: int | None = None,
    schedule: Schedule = MEGATRON_DEFAULTS,
) -> FloatArray:
    """Float array [stage]: the peak bytes of a rank of each stage under `plan`.

    micro_batches, schedule: as in `in_flight`. With deferred weight gradients, every stage may keep as many bytes of
    activations as the stage with the most.
    """
    resting, fixed, kept = (np.zeros(plan.stages) for _ in range(3))
    add_fixed(memory.fixed, fixed, plan.behind)
    moments = in_flight(plan.stages, plan.virtual, micro_batches, schedule)
    activation = np.array([memory.activation_of_layers[list(chunk)].sum() for chunk in plan.order])
    add_fixed(memory.fixed_activation, activation, plan.behind)
    held = np.ascontiguousarray(activation.reshape(plan.virtual, plan.stages).T)
    for stage, chunks in enumerate(plan.chunks):
        static = memory.buffers + float(sum(memory.static[list(chunk)].sum() for chunk in chunks))
        resting[stage], kept[stage] = static + fixed[stage], (moments[stage] @ held[stage]).max()
    return resting + (kept.max() if schedule.weight_share else kept)


def as_memory(memory: "LayerMemory | ArrayLike") -> LayerMemory:
    """Convert an array [layer] of static bytes to LayerMemory."""
    return memory if isinstance(memory, LayerMemory) else LayerMemory(np.asarray(memory, dtype=float))
