"""StagePlan: the assignment of layers to pipeline stages.

Layers keep their order along the pipeline. With `virtual` chunks a stage, chunk v of stage s follows chunk v of stage
s - 1, and chunk v of stage 0 follows chunk v - 1 of the last stage, as in Megatron's interleaved schedule.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

__all__ = ["StagePlan"]


@dataclass(frozen=True)
class StagePlan:
    """The layers of every stage.

    chunks: [stage][chunk] -> global layer numbers from 0, ascending.
    method: the planner that made the plan.
    tail_layers: number of layers of the tail (`balancing.pipeline.fixed_parts`), which come after all others.
    tail_chunk: the chunk of the tail, counted along the pipeline; None for the last chunk.

    Raises ValueError unless the layers along the pipeline are 0, 1, 2, ... without gaps, all stages have the same
    number of chunks, and no layer comes after the tail.
    """

    chunks: tuple[tuple[tuple[int, ...], ...], ...]
    method: str = "given"
    tail_layers: int = 0
    tail_chunk: int | None = None

    def __post_init__(self) -> None:
        if not self.chunks or not self.chunks[0]:
            raise ValueError("a plan needs at least one stage with at least one chunk")
        if len({len(stage) for stage in self.chunks}) > 1:
            raise ValueError(f"stages have {[len(stage) for stage in self.chunks]} chunks; all need the same number")
        along = [layer for chunk in self.order for layer in chunk]
        for expected, layer in enumerate(along):
            if layer != expected:
                raise ValueError(f"layer {layer} is in the place of layer {expected}; layers must keep their order")
        if any(self.order[len(self.order) - self.behind :]):
            raise ValueError(f"layer {self.layers - 1} is on a chunk after that of the tail")

    @classmethod
    def from_counts(cls, counts: tuple[tuple[int, ...], ...]) -> "StagePlan":
        """The plan with counts[stage][chunk] layers in each chunk."""
        stages, virtual = len(counts), len(counts[0])
        chunks: list[list[tuple[int, ...]]] = [[] for _ in range(stages)]
        first = 0
        for v in range(virtual):
            for s in range(stages):
                chunks[s].append(tuple(range(first, first + counts[s][v])))
                first += counts[s][v]
        return cls(tuple(tuple(stage) for stage in chunks))

    @classmethod
    def from_bounds(cls, bounds: Sequence[int], stages: int, method: str = "given") -> "StagePlan":
        """The plan whose chunks, along the pipeline, begin at `bounds`. The last bound is the number of layers."""
        order = [tuple(range(first, last)) for first, last in pairwise(bounds)]
        return cls(tuple(tuple(order[stage::stages]) for stage in range(stages)), method)

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.chunks)

    @property
    def virtual(self) -> int:
        """Number of chunks of a stage."""
        return len(self.chunks[0])

    @property
    def behind(self) -> int:
        """Number of chunks after that of the tail, at the end of the pipeline. They have no layers."""
        if not self.tail_layers or self.tail_chunk is None:
            return 0
        return self.stages * self.virtual - 1 - self.tail_chunk

    def with_tail_of(self, other: "StagePlan") -> "StagePlan":
        """This plan, with the tail on its chunk of `other`."""
        return replace(self, tail_layers=other.tail_layers, tail_chunk=other.tail_chunk)

    @property
    def layers(self) -> int:
        """Number of layers of the model."""
        return sum(len(chunk) for chunk in self.order)

    @property
    def bounds(self) -> tuple[int, ...]:
        """The first layer of each chunk along the pipeline, followed by the number of layers."""
        return (0, *accumulate(len(chunk) for chunk in self.order))

    @property
    def counts(self) -> tuple[tuple[int, ...], ...]:
        """The number of layers in each chunk, [stage][chunk]."""
        return tuple(tuple(len(chunk) for chunk in stage) for stage in self.chunks)

    @property
    def order(self) -> tuple[tuple[int, ...], ...]:
        """The layers of all chunks, in the order of the pipeline."""
        return tuple(stage[v] for v in range(self.virtual) for stage in self.chunks)

    @cached_property
    def stage_of(self) -> tuple[int, ...]:
        """The stage that computes each layer."""
        stages = {layer: s for s, stage in enumerate(self.chunks) for chunk in stage for layer in chunk}
        return tuple(stages[layer] for layer in range(len(stages)))
