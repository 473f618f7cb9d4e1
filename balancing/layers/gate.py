"""The gate: the decision whether a better plan is worth its moves, and the seconds that moves take.

A move stops training while layers are transferred, and its gain is only predicted. A plan therefore passes the gate
only if

- it saves at least the fraction `min_gain` of the predicted step, by costs averaged over an interval,
- it saves more than twice the standard error of that, by the costs of single iterations,
- its gain until the horizon exceeds the cost of the move: (old - new) x horizon > migration,
- the last move is at least `interval` iterations ago.

After a move the gate watches the measured step for `watch` iterations. If the step is slower than it would be under the
old plan, the gate rolls the move back and doubles the interval until a move has succeeded. The step time of the old
plan is its measured time before the move, times the ratio of its predictions after and before the move. So a model that
has become slower in the meantime causes no rollback.

A gate is immutable: `check` and `measured` return the next gate. Ranks with equal inputs make equal decisions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median, stdev
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from balancing.pipeline.stage_plan import StagePlan

__all__ = [
    "Decision",
    "Gate",
    "GateConfig",
    "LayerMove",
    "Predicted",
    "layer_moves",
    "migration_seconds",
    "noise_of_gain",
]


@dataclass(frozen=True)
class GateConfig:
    """Thresholds of the gate.

    min_gain: least fraction of the step that a move must save, 0 to 1.
    interval: fewest iterations between moves.
    horizon: iterations over which the gain counts. After that, costs are assumed to have changed again.
    watch: iterations measured before and after a move, without the first one, which allocates buffers.
    slower: a move is rolled back if steps are slower than the old plan's by more than this fraction.

    Raises ValueError for a value out of range.
    """

    min_gain: float
    interval: int
    horizon: int = 200
    watch: int = 5
    slower: float = 0.02

    def __post_init__(self) -> None:
        for name, least, most in (("min_gain", 0.0, 1.0), ("slower", 0.0, float("inf"))):
            if not least <= getattr(self, name) < most:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least:g} and below {most:g}")
        for name in ("interval", "horizon", "watch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


class Decision(NamedTuple):
    """Keep the plan in force, move to `plan`, or roll back to `plan`. reason: text for the log."""

    action: Literal["keep", "move", "rollback"]
    plan: StagePlan
    reason: str


class Predicted(NamedTuple):
    """Predicted seconds of a step, by present costs.

    now, then: under the plan in force, and under the candidate.
    previous: under the plan before the move under watch (`Gate.watching`).
    noise: standard error of now - then (`noise_of_gain`).
    """

    now: float
    then: float
    previous: float | None = None
    noise: float = 0.0


def noise_of_gain(gains: Sequence[float]) -> float:
    """The standard error of the mean of gains, one for the costs of each measured iteration; 0 for a single one."""
    return stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0.0


@dataclass(frozen=True)
class Gate:
    """The state of the gate.

    plan: the plan in force.
    moved_at: iteration of the last move.
    patience: factor on the interval, doubled by each rollback.
    steps: measured seconds of the latest steps under `plan`.
    fresh: number of steps measured since the last check. The next check's prediction uses costs of the same iterations.
    ratios: measured over predicted seconds of the steps up to the last check. Each step is compared with the prediction
        from its own interval, because costs drift.
    previous: the plan before the move under watch, its measured seconds, and its predicted seconds at the time of the
        move; None if no move is under watch.
    """

    config: GateConfig
    plan: StagePlan
    moved_at: int | None = None
    patience: int = 1
    steps: tuple[float, ...] = ()
    fresh: int = 0
    ratios: tuple[float, ...] = ()
    previous: tuple[StagePlan, float, float] | None = field(default=None)

    def measured(self, iteration: int, seconds: float) -> "Gate":
        """Add the measured seconds of an iteration under `plan`."""
        if self.moved_at is not None and iteration <= self.moved_at:
            return self  # the first iteration after a move allocates buffers
        steps = (*self.steps, seconds)[-self.config.watch :]
        return replace(self, steps=steps, fresh=min(self.fresh + 1, len(steps)))

    @property
    def watching(self) -> StagePlan | None:
        """The plan before the move under watch; None if there is none. `check` needs its predicted seconds."""
        return self.previous[0] if self.previous else None

    def check(
        self,
        iteration: int,
        candidate: StagePlan,
        predicted: Predicted,
        migration: float,
        *,
        left: int | None = None,
    ) -> tuple["Gate", Decision]:
        """Decide before `iteration`. Returns the next gate, with the plan from `iteration` on, and the decision.

        candidate: the best plan by present costs.
        predicted: seconds of a step; with `previous` if `watching` is not None.
        migration: seconds that the move takes.
        left: iterations until training ends.
        """
        config, (now, then, previous_now, noise) = self.config, predicted
        latest = self.steps[len(self.steps) - self.fresh :] if now > 0 else ()
        ratios = (*self.ratios, *(seconds / now for seconds in latest))[-config.watch :]
        self = replace(self, fresh=0, ratios=ratios)
        if self.previous is not None:
            if len(self.steps) < config.watch:
                return self, Decision("keep", self.plan, f"watching the last move, {len(self.steps)} of {config.watch}")
            plan, before, at_move = self.previous
            expected = before * (previous_now / at_move if previous_now is not None and at_move > 0 else 1.0)
            after = median(ratios or (0.0,)) * now
            if before > 0 and after > (1 + config.slower) * expected:
                back = replace(
                    self, plan=plan, moved_at=iteration, patience=2 * self.patience, steps=(), ratios=(), previous=None
                )
                why = f"steps take {after:.4g} s, the plan before would take {expected:.4g} s"
                return back, Decision("rollback", plan, why)
            self = replace(self, previous=None, patience=1)

        def keep(why: str) -> tuple["Gate", Decision]:
            return self, Decision("keep", self.plan, why)

        gain = now - then
        if candidate.chunks == self.plan.chunks:
            return keep("the plan in force is the best one")
        if gain < config.min_gain * now or gain <= 0:
            return keep(f"gains {gain / now if now > 0 else 0:.1%} of a step, less than {config.min_gain:.1%}")
        if gain <= 2 * noise:
            return keep(f"gains {gain / now:.1%} of a step, measured to no more than {2 * noise / now:.1%}")
        horizon = config.horizon if left is None else min(config.horizon, left)
        if gain * horizon <= migration:
            return keep(f"gains {gain * horizon:.4g} s in {horizon} iterations, the move takes {migration:.4g} s")
        wait = config.interval * self.patience
        if self.moved_at is not None and iteration - self.moved_at < wait:
            return keep(f"the last move was {iteration - self.moved_at} iterations ago, less than {wait}")
        watched = (self.plan, median(ratios) * now, now) if ratios else None
        moved = replace(self, plan=candidate, moved_at=iteration, steps=(), ratios=(), previous=watched)
        return moved, Decision("move", candidate, f"gains {gain / now:.1%} of a step, moving takes {migration:.4g} s")


class LayerMove(NamedTuple):
    """A layer that changes stage."""

    layer: int
    source: int
    target: int


def layer_moves(current: StagePlan, plan: StagePlan) -> tuple[LayerMove, ...]:
    """The layers that change stage, ascending. Raises ValueError if the plans are of different models."""
    if current.layers != plan.layers:
        raise ValueError(f"the current plan has {current.layers} layers, the new one {plan.layers}")
    pairs = enumerate(zip(current.stage_of, plan.stage_of, strict=True))
    return tuple(LayerMove(layer, source, target) for layer, (source, target) in pairs if source != target)


def migration_seconds(
    current: StagePlan, plan: StagePlan, layer_bytes: ArrayLike, bandwidth: float, *, fixed: float
) -> float:
    """Seconds for which a move stops training; 0 if no layer moves.

    current, plan: plans before and after the move.
    layer_bytes: [layer] or one number, bytes of a layer on a rank: weights and optimizer state.
    bandwidth: bytes/s that a rank sends, and at the same time receives.
    fixed: additional seconds of every move, to plan and to rebuild buffers and optimizer.

    The busiest rank, in its busier direction, determines the time. Raises ValueError for a bandwidth that is not
    above 0.
    """
    if not bandwidth > 0:
        raise ValueError(f"bandwidth is {bandwidth}; it must be above 0 bytes/s")
    moving = layer_moves(current, plan)
    if not moving:
        return 0.0
    weight = np.broadcast_to(np.asarray(layer_bytes, dtype=float), (plan.layers,))
    traffic = np.zeros((2, max(current.stages, plan.stages)))
    for move in moving:
        traffic[0, move.source] += weight[move.layer]
        traffic[1, move.target] += weight[move.layer]
    return fixed + float(traffic.max()) / bandwidth
