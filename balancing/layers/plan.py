"""Plans of pipeline stages: the assignment of layers to stages by their costs.

`plan_stages` takes one cost per layer, and `plan_partition` takes `LayerSeconds`. Both call the planner that `method`
names. `plan_pipeline` searches for the plan with the shortest simulated step.

The stages of a dynamic model (DynMo, arXiv 2505.14864) become uneven. Even a static model has an embedding and a head
that cost as much as layers.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from balancing.layers.cost import LayerSeconds
from balancing.layers.memory import LayerMemory, as_memory, stage_memory
from balancing.layers.planners.diffusion import plan_diffusion
from balancing.layers.planners.optimal import plan_optimal
from balancing.layers.planners.problem import Problem, uniform_bounds
from balancing.layers.planners.refine import refine_plan
from balancing.pipeline.layout import to_layout
from balancing.pipeline.schedule import MEGATRON_DEFAULTS, Schedule
from balancing.pipeline.stage_plan import StagePlan

__all__ = [
    "METHODS",
    "ONE_CHUNK",
    "PLANNERS",
    "Pipeline",
    "Planner",
    "Running",
    "check_method",
    "check_movable",
    "plan_partition",
    "plan_pipeline",
    "plan_stages",
]


class Planner(Protocol):
    def __call__(self, problem: Problem) -> list[int]:
        """Boundaries [virtual * stages + 1] of the chunks, along the pipeline. Pure: all ranks get the same."""


PLANNERS: dict[str, Planner] = {
    "optimal": plan_optimal,
    "diffusion": plan_diffusion,
    "uniform": lambda problem: uniform_bounds(problem.layers, problem.stages * problem.virtual, problem.behind),
}
METHODS = tuple(PLANNERS)
ONE_CHUNK = ("diffusion",)  # planners of one chunk a stage, with layers on every stage
_GROUPS = 4  # a search simulates steps of this many micro-batch groups; more take longer and rank plans no better


@dataclass(frozen=True)
class Pipeline:
    """A pipeline to plan for.

    stages: pipeline size.
    micro_batches: number of micro-batches of a step; None if there are enough to fill the pipeline.
    virtual: chunks a stage.
    schedule: the schedule if there are several chunks a stage.
    """

    stages: int
    micro_batches: int | None
    virtual: int = 1
    schedule: Schedule = MEGATRON_DEFAULTS


@dataclass(frozen=True)
class Running:
    """A running pipeline.

    cost: seconds of the layers.
    plan: the plan in force.
    micro_batches: number of micro-batches of a step, per pipeline.
    ranks_per_stage: data x tensor x context parallel size.
    ranks_per_node: ranks of a node; stages fill nodes in order. None if nodes do not matter.
    schedule: the schedule if there are several chunks a stage.
    """

    cost: LayerSeconds
    plan: StagePlan
    micro_batches: int
    ranks_per_stage: int = 1
    ranks_per_node: int | None = None
    schedule: Schedule = MEGATRON_DEFAULTS


def plan_stages(
    cost: ArrayLike,
    stages: int,
    *,
    embedding: float = 0.0,
    head: float = 0.0,
    memory: LayerMemory | ArrayLike | None = None,
    memory_limit: ArrayLike | None = None,
    virtual: int = 1,
    current: StagePlan | None = None,
    method: str = "optimal",
    min_layers: int = 1,
) -> StagePlan:
    """Divide layers among pipeline stages, in order.

    cost: float array [layer], seconds of forward + backward per micro-batch, or numbers of parameters.
    stages: pipeline size.
    embedding, head: cost of the parts that are fixed to the first and the last stage.
    virtual: chunks a stage.
    The other parameters are those of `plan_partition`, with enough micro-batches to fill the pipeline.

    Raises ValueError like `plan_partition`, and for costs that are negative or not finite.
    """
    seconds = _seconds_of(cost, embedding=embedding, head=head)
    whole = LayerSeconds(seconds, np.zeros(len(seconds)), (float(embedding), 0.0), (float(head), 0.0))
    return plan_partition(
        whole, Pipeline(stages, None, virtual), memory=memory, memory_limit=memory_limit, current=current,
        method=method, min_layers=min_layers,
    )  # fmt: skip


def plan_partition(
    cost: LayerSeconds,
    pipeline: Pipeline,
    *,
    memory: LayerMemory | ArrayLike | None = None,
    memory_limit: ArrayLike | None = None,
    current: StagePlan | None = None,
    method: str = "optimal",
    min_layers: int = 1,
) -> StagePlan:
    """Divide layers among the stages of a pipeline, in order, by forward plus backward seconds.

    cost: seconds of the layers. The tail stays on its chunk of `current`; without `current` it is on the last stage.
    pipeline: its micro-batches and schedule determine the activations in flight.
    memory: bytes of each layer, as a LayerMemory or as an array [layer] of static bytes.
    memory_limit: bytes a rank may use, one number or one per stage; a hard limit.
    current: the plan in force. Of equally good plans, the one that moves the fewest bytes from `current` is taken (the
        fewest layers, if `memory` is None). "diffusion" starts from `current`, or from equal numbers of layers.
    method: "optimal" minimizes the time of the slowest stage, exactly if virtual is 1; "diffusion" exchanges boundary
        layers between neighbours (`balancing.layers.planners.diffusion`); "uniform" gives equal numbers of layers. Only
        "optimal" and "diffusion" search for a plan that fits the memory.
    min_layers: fewest layers of a chunk; 0 allows a stage with only the embedding or the head.

    Raises ValueError for sizes below 1, fewer layers than chunks, and a method that cannot plan several chunks a stage.
    Raises it for a memory limit that the plan exceeds; the message has the missing bytes.
    """
    seconds, stages, virtual = cost.total, pipeline.stages, pipeline.virtual
    micro_batches, schedule = pipeline.micro_batches, pipeline.schedule
    behind = _behind(len(seconds), pipeline, current, method, min_layers)
    bytes_of, limit = _memory_of(len(seconds), stages, memory, memory_limit)
    home = np.full(len(seconds), -1) if current is None else np.array(current.stage_of)
    weight = np.ones(len(seconds)) if bytes_of is None or not bytes_of.static.any() else bytes_of.static
    if current is not None and (current.stages, current.virtual) == (stages, virtual):
        start = list(current.bounds)
    else:
        start = uniform_bounds(len(seconds), stages * virtual)
    problem = Problem(seconds, int(stages), int(virtual), cost.fixed.sum(axis=1), bytes_of, limit, home, weight,
                      int(min_layers), start, micro_batches, behind, schedule)  # fmt: skip
    plan = StagePlan.from_bounds(PLANNERS[method](problem), stages, method)
    if current is not None and (current.stages, current.virtual) == (stages, virtual):
        plan = plan.with_tail_of(current)
    assert plan.layers == problem.layers, f"{plan.layers} of {problem.layers} layers are planned"
    if problem.memory is not None and problem.limit is not None:
        excess = stage_memory(plan, problem.memory, micro_batches, schedule) - problem.limit
        stage, over = int(excess.argmax()), float(excess.max())
        if over > 0 and method != "optimal":
            raise ValueError(
                f"the {method} plan does not fit memory_limit {problem.limit[stage]:,.0f} bytes: stage {stage} needs "
                f"{over:,.0f} bytes more; use method 'optimal', which keeps to the limit where that is possible"
            )
        # The planner sums bytes in another order, so the last digit may differ.
        assert over <= 1e-9 * problem.limit.max(), f"the plan is {over} bytes over the limit"
    return plan


def check_method(method: str, virtual: int, behind: int) -> None:
    """Raise ValueError, one line, for a pipeline that a method cannot plan.

    virtual: chunks a stage.
    behind: number of chunks at the end that can have no layers (`StagePlan.behind`).
    """
    if method not in ONE_CHUNK:
        return
    if virtual > 1:
        raise ValueError(f"planner {method} plans one chunk a stage, not {virtual}; use optimal")
    if behind:
        raise ValueError(
            f"planner {method} gives every stage layers, and the last {behind}, after m of the layout, can have none; "
            "use optimal"
        )


def check_movable(plan: StagePlan, method: str) -> None:
    """Raise ValueError, one line, for a plan in force whose layers cannot move as `method` plans."""
    check_method(method, plan.virtual, plan.behind)
    if plan.tail_chunk and plan.tail_chunk % plan.stages == 0:
        raise ValueError(
            f"layers cannot move with --pipeline-model-parallel-layout {to_layout(plan)}: a later chunk of the first "
            "stage has m, which brings an embedding of its own; put m on another stage"
        )


def plan_pipeline(
    cost: LayerSeconds,
    pipeline: Pipeline,
    *,
    memory: LayerMemory | ArrayLike | None = None,
    memory_limit: ArrayLike | None = None,
    current: StagePlan | None = None,
    min_layers: int = 1,
) -> StagePlan:
    """Divide layers among pipeline stages so that the simulated step, without messages, is short.

    The "optimal" plan of `plan_partition` is refined by simulated steps (`refine_plan`). The search also starts from
    `current`.

    cost: seconds of the layers.
    pipeline: its `micro_batches` must not be None.
    The other parameters are those of `plan_partition`.

    Raises ValueError like `plan_partition`, and for a schedule that Megatron refuses.
    """
    stages, micro_batches, schedule = pipeline.stages, pipeline.micro_batches, pipeline.schedule
    assert micro_batches is not None
    even = plan_partition(
        cost, pipeline, memory=memory, memory_limit=memory_limit, current=current, min_layers=min_layers
    )
    if stages == 1:
        return even

    def fits(plan: StagePlan) -> bool:
        if memory is None or memory_limit is None:
            return True
        peak = stage_memory(plan, as_memory(memory), micro_batches, schedule)
        return bool((peak <= np.asarray(memory_limit, dtype=float)).all())

    few = min(micro_batches, _GROUPS * max(schedule.group or stages, stages))
    refined = refine_plan(even, cost, few, schedule=schedule, current=current, min_layers=min_layers, fits=fits)
    return min((even, refined), key=lambda plan: cost.simulate(plan, micro_batches, schedule=schedule).step_time)


def _seconds_of(cost: ArrayLike, **ends: float) -> np.ndarray:
    """`cost` as a float array [layer]. Raises ValueError if `cost` or one of `ends` is negative or not finite."""
    seconds = np.asarray(cost, dtype=float)
    if seconds.ndim != 1 or not len(seconds):
        raise ValueError(f"cost has shape {seconds.shape}; give one number a layer")
    for name, values in (("cost", seconds), *((end, np.asarray(value)) for end, value in ends.items())):
        if not (np.isfinite(values) & (values >= 0)).all():
            raise ValueError(f"{name} has {np.min(values)} among its values; they must be finite and at least 0")
    return seconds


def _behind(layers: int, pipeline: Pipeline, current: StagePlan | None, method: str, min_layers: int) -> int:
    """Check the sizes. Returns the number of chunks without layers at the end (`StagePlan.behind`)."""
    stages, virtual, micro_batches = pipeline.stages, pipeline.virtual, pipeline.micro_batches
    for name, size, least in (("stages", stages, 1), ("virtual", virtual, 1), ("min_layers", min_layers, 0),
                              ("micro_batches", 1 if micro_batches is None else micro_batches, 1)):  # fmt: skip
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < least:
            raise ValueError(f"{name}={size!r} must be a whole number of at least {least}")
    if method not in PLANNERS:
        raise ValueError(f"unknown method {method!r}; known: {', '.join(PLANNERS)}")
    same = current is not None and (current.stages, current.virtual) == (stages, virtual)
    behind = current.behind if current is not None and same else 0
    check_method(method, virtual, behind)
    fewest = max(min_layers, 1) if method == "uniform" else min_layers
    if layers < (stages * virtual - behind) * fewest:
        raise ValueError(
            f"{layers} layers cannot fill {stages} stages of {virtual} chunks with {fewest} each; use at most "
            f"{max(layers // (virtual * fewest), 1)} stages, or fewer chunks"
            + (", or min_layers=0 with method 'optimal'" if min_layers else "")
        )
    if current is not None and current.layers != layers:
        raise ValueError(f"the current plan has {current.layers} layers, cost has {layers}")
    return behind


def _memory_of(
    layers: int, stages: int, memory: LayerMemory | ArrayLike | None, memory_limit: ArrayLike | None
) -> tuple[LayerMemory | None, np.ndarray | None]:
    """Check memory and limit. Returns the bytes of layers and the limit [stage]; each is None if not given."""
    bytes_of = None if memory is None else as_memory(memory)
    if bytes_of is not None and len(bytes_of.static) != layers:
        raise ValueError(f"memory is of {len(bytes_of.static)} layers, cost of {layers}")
    if memory_limit is None:
        return bytes_of, None
    if bytes_of is None:
        raise ValueError("memory_limit needs memory, the bytes of each layer")
    limit = np.asarray(memory_limit, dtype=float)
    if limit.shape not in ((), (stages,)) or not (limit > 0).all():
        raise ValueError(f"memory_limit is {limit.tolist()}; give one number above 0, or one for each stage")
    return bytes_of, np.broadcast_to(limit, (stages,)).copy()
