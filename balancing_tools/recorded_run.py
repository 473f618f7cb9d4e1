"""Costs of layers and the plan in force, read from the directory of --balance-report."""

import os
from dataclasses import replace
from typing import Any

import numpy as np

from balancing.layers.cost import LayerSeconds
from balancing.layers.recorded import RecordedRun
from balancing.pipeline.fixed_parts import NAMES
from balancing.pipeline.pattern import Pattern
from balancing.pipeline.schedule import MEGATRON_DEFAULTS, Schedule
from balancing.pipeline.stage_plan import StagePlan
from balancing.report import History, read_history, summarize
from balancing.report.summary import LayerCosts

__all__ = ["read_run"]


def read_run(report: History | str | os.PathLike[str]) -> RecordedRun:
    """Medians over the iterations under the last layout, without warm-up iterations, from `balancing.report`.

    report: the result of `read_history`, or the directory of --balance-report.

    Parts that no plan moves, such as the head, cost nothing if they were not timed. Raises ValueError, one line, if
    there is no run, or if layers were not timed or are incomplete.
    """
    history = report if isinstance(report, History) else read_history(report)
    summary, directory = summarize(history), history.directory
    costs = summary.layers
    if costs is None or not costs.numbered.any():
        raise history.lacks(
            "layers", "layer", f"{directory} has no timed layers; train some more iterations with --balance-report"
        )
    if not summary.ranks or summary.step_seconds is None:
        raise history.lacks("layers", "stage", f"{directory} has no timed stages; train with --balance-report")
    numbered = costs.numbered
    numbers = [name for name in costs.names if isinstance(name, int)]
    if numbers != list(range(len(numbers))):
        missing = sorted(set(range(max(numbers) + 1)) - set(numbers))
        raise ValueError(f"{directory} lacks layer {missing[0]}; a plan needs the cost of every layer")
    odd = [name for name in costs.names if isinstance(name, str) and name not in NAMES]
    if odd:
        raise ValueError(f"{directory} has costs of {odd[0]!r}, a part that plans do not know; they know numbered "
                         f"layers, {', '.join(NAMES)}")  # fmt: skip
    stage, chunk = costs.stage[numbered], costs.chunk[numbered]
    stages, virtual = summary.stage_count, 1 + int(chunk.max())
    if stages * virtual > len(stage) + len(NAMES):  # each fixed part may have a chunk of its own
        raise ValueError(
            f"{directory} has {len(stage)} layers, too few for its {stages} stages of {virtual} chunks; record the run "
            "again"
        )
    counts = np.zeros((stages, virtual), dtype=int)
    np.add.at(counts, (stage, chunk), 1)
    plan = StagePlan.from_counts(tuple(tuple(row) for row in counts.tolist()))
    if plan.stage_of != tuple(stage.tolist()):
        raise ValueError(f"{directory} has layers on stages {stage.tolist()}, out of the pipeline's order")
    if NAMES[-1] in costs.names:
        place = costs.names.index(NAMES[-1])
        plan = replace(plan, tail_layers=1, tail_chunk=int(costs.chunk[place]) * stages + int(costs.stage[place]))
    lines = [history.stages[i] for i in summary.timed if i in history.stages]
    if not lines or not lines[-1]["micro_batches"]:
        raise ValueError(f"{directory} does not say how many micro-batches a step has; train with a newer version")

    def ends(name: str) -> tuple[float, float]:
        if name not in costs.names:
            return 0.0, 0.0
        place = costs.names.index(name)
        return float(costs.forward[place]), float(costs.backward[place] + costs.recompute[place])

    ranks = summary.ranks
    memory = ranks.memory
    if len(memory):
        memory = np.array([memory[ranks.stage == each].max() for each in range(stages)])
    return RecordedRun(
        cost=LayerSeconds(
            costs.forward[numbered],
            (costs.backward + costs.recompute)[numbered],
            *map(ends, NAMES),
        ),
        plan=plan,
        micro_batches=int(lines[-1]["micro_batches"]),
        ranks_per_stage=len(ranks.rank) // stages,
        ranks_per_node=int(np.bincount(ranks.node).max()),
        step_seconds=summary.step_seconds,
        memory=memory,
        recomputes=bool(costs.recompute[numbered].any()),
        schedule=_schedule(lines[-1]),
        pattern=_pattern(costs) if costs.hybrid else None,
    )


def _pattern(costs: LayerCosts) -> Pattern | None:
    return Pattern.from_kinds([kind for kind, known in zip(costs.kinds, costs.numbered, strict=True) if known])


def _schedule(line: dict[str, Any]) -> Schedule:
    """The schedule of a line of the log. Lines of one chunk a stage, and of older versions, do not have it."""
    if "microbatch_group_size" not in line:
        return MEGATRON_DEFAULTS
    in_parts = bool(line.get("overlap_moe_expert_parallel_comm"))
    return Schedule(group=line["microbatch_group_size"], in_parts=in_parts)
