"""Fewer stages: throughput and GPU-hours of shorter pipelines, the choice among them, and the ranks they release.

A pruned or frozen model may not need all its ranks. DynMo merges stages first-fit while they fit one device's memory
and does not partition again, so one stage ends with most of the layers. Here every pipeline size gets its best
partition within the memory and a simulated step. The user's throughput floor limits the throughput given up for
GPU-hours. Cluster schedulers take back only whole nodes, so sizes that free a node are preferred.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from balancing.layers.config import LayerConfig
from balancing.layers.memory import LayerMemory
from balancing.layers.plan import Pipeline, Running, plan_partition
from balancing.pipeline.stage_plan import StagePlan

__all__ = ["Release", "Repack", "check_repack", "choose_repack", "release_of", "repack_options"]


def check_repack(config: LayerConfig, stages: int, chunks: int) -> str:
    """The setting that lets a pipeline get shorter, as a user gives it; "" if none does.

    stages, chunks: of the pipeline, and of a stage.

    Raises ValueError, one line, if the settings ask for a release of ranks that is impossible or never happens.
    """
    if not config.repacks:
        if config.repack_min_stages > 1:
            raise ValueError(
                f"layers.repack_min_stages {config.repack_min_stages} releases nothing by itself; add "
                "--repack-throughput-floor"
            )
        return ""
    flag = f"layers.repack_memory_limit {config.repack_memory_limit}"
    if config.repack_throughput_floor is not None:
        flag = f"--repack-throughput-floor {config.repack_throughput_floor}"
    if config.once:
        raise ValueError(f"{flag} needs layers that keep moving; use --balance-layers instead of --balance-layers-once")
    if config.repack_min_stages >= stages:
        raise ValueError(
            f"{flag} has nothing to release: --pipeline-model-parallel-size {stages} must be above "
            f"layers.repack_min_stages {config.repack_min_stages}; use more stages, or drop it"
        )
    if chunks > 1:
        raise ValueError(f"{flag} can shrink a pipeline of one chunk a stage, not of {chunks}; use one")
    return flag


@dataclass(frozen=True)
class Repack:
    """One pipeline size.

    plan: the best partition; None if no partition fits. `reason` then says why.
    step_seconds: simulated seconds of a step.
    throughput: ratio to the throughput of the plan in force.
    gpu_time: GPU-seconds of a step, as a ratio to those of the plan in force.
    freed_ranks, freed_nodes: numbers of ranks and whole nodes that are released.
    """

    stages: int
    plan: StagePlan | None
    step_seconds: float
    throughput: float
    gpu_time: float
    freed_ranks: int
    freed_nodes: int
    reason: str = ""


def repack_options(
    run: Running,
    *,
    memory: LayerMemory | None = None,
    memory_limit: ArrayLike | None = None,
    min_stages: int = 1,
    transfer: float = 0.0,
) -> list[Repack]:
    """Every pipeline size from that of `run` down to `min_stages`, largest first, with the same micro-batches.

    run: the running pipeline. In the schedule of a shorter pipeline, a group has as many micro-batches as stages.
    memory, memory_limit: as in `plan_partition`.
    transfer: seconds of a message between stages.

    Raises ValueError for sizes out of range.
    """
    cost, current, micro_batches = run.cost, run.plan, run.micro_batches
    ranks_per_stage, ranks_per_node = run.ranks_per_stage, run.ranks_per_node
    if not 1 <= min_stages <= current.stages:
        raise ValueError(f"min_stages={min_stages} must lie between 1 and the {current.stages} stages there are")
    if ranks_per_stage < 1 or (ranks_per_node is not None and ranks_per_node < 1):
        raise ValueError(f"ranks_per_stage={ranks_per_stage} and ranks_per_node={ranks_per_node} must be at least 1")
    now = cost.simulate(current, micro_batches, transfer=transfer, schedule=run.schedule).step_time
    options = []
    for stages in range(current.stages, min_stages - 1, -1):
        freed = (current.stages - stages) * ranks_per_stage
        nodes = 0 if ranks_per_node is None else _nodes(current.stages * ranks_per_stage, ranks_per_node)
        nodes -= 0 if ranks_per_node is None else _nodes(stages * ranks_per_stage, ranks_per_node)
        virtual = current.virtual if stages > 1 else 1
        schedule = run.schedule if stages == current.stages else replace(run.schedule, group=None)
        try:
            pipeline = Pipeline(stages, micro_batches, virtual, schedule)
            plan = plan_partition(cost, pipeline, memory=memory, memory_limit=memory_limit, current=current)
            seconds = cost.simulate(plan, micro_batches, transfer=transfer, schedule=schedule).step_time
        except ValueError as error:
            options.append(Repack(stages, None, np.inf, 0.0, np.inf, freed, nodes, str(error)))
            continue
        slower = seconds / now if now > 0 else 1.0
        options.append(
            Repack(stages, plan, seconds, 1 / slower if slower > 0 else 1.0, slower * stages / current.stages,
                   freed, nodes)
        )  # fmt: skip
    return options


def _nodes(ranks: int, per_node: int) -> int:
    return -(-ranks // per_node)


def choose_repack(options: Iterable[Repack], throughput_floor: float) -> Repack | None:
    """The size with the fewest GPU-hours that keeps at least `throughput_floor` of the throughput of the plan in force.

    Sizes that free a whole node are preferred, since cluster schedulers take back only whole nodes.

    Returns None if no smaller size qualifies. Raises ValueError for a floor that is not above 0.
    """
    if not throughput_floor > 0:
        raise ValueError(f"the throughput floor is {throughput_floor}; give a fraction above 0, such as 0.9")
    able = [size for size in options if size.plan and size.freed_ranks and size.throughput >= throughput_floor]
    able = [size for size in able if size.freed_nodes] or able
    return min(able, key=lambda size: (size.gpu_time, size.stages), default=None)


@dataclass(frozen=True)
class Release:
    """The ranks that leave a job when its pipeline gets shorter.

    stages: number of stages that remain.
    ranks: the ranks that leave.
    nodes: numbers, within the job, of the nodes whose ranks all leave.
    nodes_left: number of nodes that keep a rank.
    """

    stages: int
    ranks: range
    nodes: range
    nodes_left: int

    @property
    def stay(self) -> int:
        """The number of ranks that stay, from rank 0 on."""
        return self.ranks.start


def release_of(world_size: int, stages_before: int, stages: int, ranks_per_node: int) -> Release:
    """The ranks that leave when a pipeline of `stages_before` stages shrinks to `stages`.

    world_size, ranks_per_node: sizes of the job before.

    Ranks are numbered stage after stage and node after node. The ranks of the last stages therefore free whole nodes,
    and the ranks that stay keep their numbers. Raises ValueError unless 1 <= stages < stages_before, and if the ranks
    do not form equal stages.
    """
    if not 1 <= stages < stages_before:
        raise ValueError(f"there is nothing to release: {stages} of {stages_before} stages are to remain")
    if world_size % stages_before:
        raise ValueError(f"{world_size} ranks cannot form {stages_before} equal stages")
    stay = world_size // stages_before * stages
    left = _nodes(stay, ranks_per_node)
    return Release(stages, range(stay, world_size), range(left, _nodes(world_size, ranks_per_node)), left)
