"""What is known of a run from its records: costs of layers, the plan in force, the memory of its stages."""

from dataclasses import dataclass, field

import numpy as np

from balancing.layers.memory import LayerMemory, in_flight, stage_memory
from balancing.layers.plan import Running
from balancing.pipeline.pattern import Pattern

__all__ = ["RecordedRun", "estimate_memory"]


@dataclass(frozen=True)
class RecordedRun(Running):
    """Median costs of a run, and the layout of its last iterations.

    step_seconds: measured median of the step time.
    memory: float array [stage], the most bytes that a rank of each stage held; empty if not measured.
    recomputes: whether backward passes recomputed activations.
    pattern: the pattern of a hybrid model; None for other models.
    """

    step_seconds: float = 0.0
    memory: np.ndarray = field(default_factory=lambda: np.zeros(0))
    recomputes: bool = False
    pattern: Pattern | None = None


def estimate_memory(run: RecordedRun) -> LayerMemory:
    """Estimate the memory of layers from the peaks of the stages. For fewer stages it is an upper estimate.

    State and activations, equal for all layers, are fitted by least squares. They can be told apart because stages have
    different numbers of micro-batches in flight. The excess of the first and the last stage is attributed to embedding
    and head. If the estimate is below the peak of another stage, the state of all layers is raised to that peak. Memory
    outside of layers, such as the CUDA context, is attributed to layers, so stages with more layers are overestimated.

    Raises ValueError if no memory was recorded, as on a CPU.
    """
    plan, peak = run.plan, run.memory
    if len(peak) != plan.stages or not peak.all():
        raise ValueError("the report has no memory of its ranks, so no plan can be fitted to a limit; record on GPUs")
    counts = np.array(plan.counts, dtype=float)
    held = (
        (in_flight(plan.stages, plan.virtual, run.micro_batches, run.schedule) * counts[:, None, :])
        .sum(axis=2)
        .max(axis=1)
    )
    terms = np.stack([counts.sum(axis=1), held], axis=1)
    static, activation = np.maximum(np.linalg.lstsq(terms, peak.astype(float), rcond=None)[0], 0.0)
    ones = np.ones(plan.layers)

    def missing(static: float, activation: float) -> np.ndarray:
        estimate = LayerMemory(static * ones, activation * ones)
        return peak - stage_memory(plan, estimate, run.micro_batches, run.schedule)

    inner = (missing(static, activation) / np.maximum(terms[:, 0], 1.0))[1:-1]
    static += max(float(inner.max(initial=0.0)), 0.0)
    ends = np.maximum(missing(static, activation)[[0, -1]], 0.0)
    return LayerMemory(static * ones, activation * ones, float(ends[0]), float(ends[1]) if plan.stages > 1 else 0.0)
