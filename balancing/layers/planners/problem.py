"""The problem that planners of stages solve."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from balancing.layers.memory import LayerMemory, in_flight
from balancing.layers.planners.linear_partition import Room
from balancing.pipeline.fixed_parts import add_fixed
from balancing.pipeline.schedule import MEGATRON_DEFAULTS, Schedule

__all__ = ["Problem", "by_chunk", "room_of", "uniform_bounds"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Problem:
    """The checked input of a planner.

    cost: [layer], seconds.
    stages, virtual: pipeline size, and chunks a stage.
    fixed: [part], seconds of the parts that no plan moves (`balancing.pipeline.fixed_parts`).
    memory: bytes of layers; None if memory does not matter.
    limit: [stage], bytes that a rank may use; None for no limit.
    home: [layer], the stage that holds each layer now, -1 for none.
    weight: [layer], bytes that a move of the layer sends.
    least: fewest layers of a chunk.
    micro_batches: number of micro-batches of a step; None if there are enough to fill the pipeline.
    schedule: as in `in_flight`.
    start: boundaries of the plan in force, or of equal numbers of layers.
    behind: number of chunks without layers at the end of the pipeline (`StagePlan.behind`).
    """

    cost: FloatArray
    stages: int
    virtual: int
    fixed: FloatArray
    memory: LayerMemory | None
    limit: FloatArray | None
    home: NDArray[np.int64]
    weight: FloatArray
    least: int
    start: list[int]
    micro_batches: int | None = None
    behind: int = 0
    schedule: Schedule = MEGATRON_DEFAULTS

    @property
    def layers(self) -> int:
        return len(self.cost)

    def fixed_load(self) -> FloatArray:
        """Float array [stage]: seconds of the parts that no plan moves."""
        load = np.zeros(self.stages)
        add_fixed(self.fixed, load, self.behind)
        return load

    def in_flight(self) -> IntArray:
        """Micro-batches in flight, [stage, moment, chunk]."""
        return in_flight(self.stages, self.virtual, self.micro_batches, self.schedule)

    def filled(self, group: int) -> int:
        """The number of stages whose chunk in `group` may have layers."""
        return self.stages - (self.behind if group == self.virtual - 1 else 0)


def by_chunk(values: FloatArray, problem: Problem, bounds: Sequence[int]) -> FloatArray:
    """The sums of `values` [layer] over chunks, [chunk, stage]; bounds: [virtual * stages + 1], along the pipeline."""
    prefix = np.concatenate([[0.0], np.cumsum(values)])
    return np.diff(prefix[np.asarray(bounds)]).reshape(problem.virtual, problem.stages)


def room_of(problem: Problem, bounds: Sequence[int], group: int) -> Room | None:
    """The memory limits for chunk `group` of each stage, if the other chunks of the stage are those of `bounds`."""
    memory, limit, virtual = problem.memory, problem.limit, problem.virtual
    if memory is None or limit is None:
        return None
    moments = problem.in_flight()
    others = np.arange(virtual) != group
    static = by_chunk(memory.static, problem, bounds)[others].sum(0)
    held = by_chunk(memory.activation_of_layers, problem, bounds) * others[:, None]
    static += memory.buffers
    add_fixed(memory.fixed, static, problem.behind)
    add_fixed(memory.fixed_activation, held.reshape(-1), problem.behind)
    part = slice(bounds[group * problem.stages], bounds[(group + 1) * problem.stages])
    base = static[:, None] + np.einsum("smv,vs->sm", moments, held)
    return Room(memory.static[part], memory.activation_of_layers[part], base, moments[:, :, group].astype(float), limit)


def uniform_bounds(layers: int, chunks: int, behind: int = 0) -> list[int]:
    """Boundaries [chunks + 1] of chunks with equal numbers of layers. The last `behind` chunks have none.

    If `layers` is no multiple of the other chunks, which Megatron refuses, the first chunks have one layer more.
    """
    size, more = divmod(layers, chunks - behind)
    return [min(chunk * size + min(chunk, more), layers) for chunk in range(chunks + 1)]
