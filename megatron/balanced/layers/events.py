"""Events of the report about decisions to move layers, and about a pipeline that got shorter."""

from collections.abc import Callable
from typing import Any

from balancing.layers import LayerSeconds, StagePlan
from balancing.layers.config import LayerConfig
from balancing.report import event, imbalance
from megatron.balanced.layers.mover import Moved
from megatron.balanced.layers.planning import Choice

__all__ = ["decision_event", "release_event"]


def decision_event(
    iteration: int,
    config: LayerConfig,
    choice: Choice,
    before: StagePlan,
    moved: Moved | None,
    shown: Callable[[StagePlan], str],
) -> dict[str, Any]:
    """The event of one decision.

    iteration: from 0, the one that follows the decision.
    config: settings of layer balancing.
    choice: the decision.
    before: the plan in force until then.
    moved: bytes and times of the move, None if no layer moved.
    shown: plan -> its string in Megatron-LM's format.
    """
    loads = [choice.cost.stage_loads(plan) for plan in (before, choice.plan)]
    took = {} if moved is None else {"move_ms": moved.move_ms, "rebuild_ms": moved.rebuild_ms}
    memory = {} if moved is None else {"peak_bytes": moved.peak_bytes}
    return event(
        iteration + 1,
        "layers",
        "stage",
        imbalance_before=imbalance(loads[0]),
        imbalance_after=imbalance(loads[1]),
        plan_ms=choice.profile_ms + choice.plan_ms,
        apply_ms=sum(took.values()),
        moved_bytes=0 if moved is None else moved.moved_bytes,
        action=choice.action,
        reason=choice.reason,
        planner=config.planner,
        layout_before=shown(before),
        layout_after=shown(choice.plan),
        stage_cost_before=loads[0],
        stage_cost_after=loads[1],
        predicted_step_before=choice.predicted[0],
        predicted_step_after=choice.predicted[1],
        **took,
        **memory,
    )


def release_event(
    iteration: int,
    reason: str,
    before: StagePlan,
    plan: StagePlan,
    cost: LayerSeconds | None,
    moved: Moved,
    ranks_freed: int,
    shown: Callable[[StagePlan], str],
) -> dict[str, Any]:
    """The event of a pipeline that got shorter.

    iteration: from 0, the one that follows.
    before, plan: the plans before and after.
    cost: the cost of the layers; None if nothing was measured yet. Stages then count as equal.
    moved: bytes and times of the move.
    shown: plan -> its string in Megatron-LM's format.
    """
    loads = [[1.0] if cost is None else cost.stage_loads(either) for either in (before, plan)]
    return event(
        iteration + 1,
        "layers",
        "stage",
        imbalance_before=imbalance(loads[0]),
        imbalance_after=imbalance(loads[1]),
        plan_ms=0.0,
        apply_ms=moved.move_ms + moved.rebuild_ms,
        moved_bytes=moved.moved_bytes,
        action="release",
        reason=reason,
        layout_before=shown(before),
        layout_after=shown(plan),
        stages_left=plan.stages,
        move_ms=moved.move_ms,
        rebuild_ms=moved.rebuild_ms,
        peak_bytes=moved.peak_bytes,
        ranks_freed=ranks_freed,
    )
