"""Costs of layers in seconds, averaged over ranks and iterations, with detection of sudden changes.

Forward and backward are separate, because freezing removes the backward and does not change the forward. Numbers of
parameters would hardly show any dynamic scheme. The embedding and the head count like layers.

Costs are combined in three ways. Over data-parallel replicas, which process different data, the mean counts. Over
expert-parallel ranks, which wait for each other, the maximum counts, with the messages that they wait for. Over
iterations an average counts, since following the noise of single iterations costs more than it gains.

An average that is long enough to suppress noise is too slow for a model that was just pruned or frozen. `CostAverage`
detects such a jump and restarts.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancing.layers.simulated_fill import SplitPasses, simulate_fill
from balancing.pipeline.fixed_parts import add_fixed
from balancing.pipeline.schedule import MEGATRON_DEFAULTS, Schedule
from balancing.pipeline.stage_plan import StagePlan
from balancing.pipeline.timeline import Timeline, simulate_schedule

__all__ = ["CostAverage", "LayerSeconds", "over_ranks"]

FloatArray = NDArray[np.float64]
_FIXED = ("embedding", "head", "tail")  # the fields of `fixed`


@dataclass(frozen=True, eq=False)
class LayerSeconds:
    """Device seconds of each layer per micro-batch.

    forward: float array [layer].
    backward: float array [layer]; includes recomputation.
    embedding, head, tail: (forward, backward) of the parts that no plan moves (`balancing.pipeline.fixed_parts`).

    Raises ValueError for seconds that are negative or not finite, and arrays of different lengths.
    """

    forward: FloatArray
    backward: FloatArray
    embedding: tuple[float, float] = (0.0, 0.0)
    head: tuple[float, float] = (0.0, 0.0)
    tail: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        layers = np.shape(self.forward)
        if len(layers) != 1 or not layers[0]:
            raise ValueError(f"forward has shape {layers}; give one number a layer")
        for name in ("forward", "backward", *_FIXED):
            given = np.asarray(getattr(self, name), dtype=float)
            shape = (2,) if name in _FIXED else layers
            if given.shape != shape:
                raise ValueError(f"{name} has shape {given.shape}; it has to be {shape}")
            if not (np.isfinite(given) & (given >= 0)).all():
                raise ValueError(f"{name} has {given.min()} among its seconds; they must be finite and at least 0")
            if name not in _FIXED:
                object.__setattr__(self, name, given)

    @property
    def layers(self) -> int:
        return len(self.forward)

    @cached_property
    def total(self) -> FloatArray:
        """Float array [layer]: forward plus backward, the cost for `plan_stages`."""
        return self.forward + self.backward

    @property
    def fixed(self) -> FloatArray:
        """Float array [part, 2]: forward and backward of the parts that no plan moves."""
        return np.array([self.embedding, self.head, self.tail], dtype=float)

    def stage_seconds(self, plan: StagePlan) -> tuple[FloatArray, FloatArray]:
        """Forward and backward seconds of one micro-batch, each [stage, chunk], for `simulate_schedule`."""
        assert plan.layers == self.layers, f"a plan of {plan.layers} layers for costs of {self.layers}"
        forward, backward = self.seconds_of_bounds(np.array([plan.bounds]), plan.stages, plan.behind)
        return forward[0], backward[0]

    def seconds_of_bounds(
        self, bounds: NDArray[np.int64], stages: int, behind: int = 0
    ) -> tuple[FloatArray, FloatArray]:
        """`stage_seconds` of many plans at once, each [plan, stage, chunk].

        bounds: [plan, chunks + 1], the `StagePlan.bounds` of each plan.
        stages: pipeline size.
        behind: chunks without layers at the end, as `StagePlan.behind`.
        """
        both = []
        for seconds, direction in ((self.forward, 0), (self.backward, 1)):
            sums = np.diff(np.concatenate([[0.0], np.cumsum(seconds)])[bounds], axis=1)
            add_fixed(self.fixed[:, direction], sums, behind)
            both.append(
                np.ascontiguousarray(sums.reshape(len(bounds), sums.shape[1] // stages, stages).transpose(0, 2, 1))
            )
        return both[0], both[1]

    def stage_loads(self, plan: StagePlan) -> FloatArray:
        """Float array [stage]: seconds of one micro-batch, forward and backward of all chunks of the stage."""
        forward, backward = self.stage_seconds(plan)
        return np.asarray((forward + backward).sum(axis=1))

    def simulate(
        self,
        plan: StagePlan,
        micro_batches: int,
        *,
        transfer: ArrayLike = 0.0,
        schedule: Schedule = MEGATRON_DEFAULTS,
    ) -> Timeline:
        """Simulate one training step under `plan`. transfer, schedule: as in `simulate_schedule`."""
        forward, backward = self.stage_seconds(plan)
        return simulate_schedule(forward, backward, micro_batches, transfer=transfer, schedule=schedule)

    def step_seconds(
        self,
        plan: StagePlan,
        micro_batches: int,
        *,
        transfer: ArrayLike = 0.0,
        schedule: Schedule = MEGATRON_DEFAULTS,
    ) -> float:
        """Seconds of one training step under `plan`. With `schedule.weight_share`, weight gradients are deferred.

        transfer, schedule: as in `simulate_schedule`.
        """
        if not schedule.weight_share or plan.stages == 1:
            return self.simulate(plan, micro_batches, transfer=transfer, schedule=schedule).step_time
        passes = self.split_passes(plan, schedule.weight_share)
        return simulate_fill(passes, micro_batches, transfer=transfer, schedule=schedule).step_time

    def split_passes(self, plan: StagePlan, weight_share: FloatArray | float) -> SplitPasses:
        """The input of `simulate_fill`. The weight gradient of each layer is one deferred piece.

        The weight gradients of parts that no plan moves are not deferred, since their inputs are larger than all
        others. A layer keeps activations in proportion to its forward seconds, none if it has no backward.

        weight_share: fraction of each layer's backward seconds for its weight gradient, a number or float array
            [layer].
        """
        deferred, nothing = self.backward * weight_share, np.zeros(self.layers)
        forward, backward = self.stage_seconds(plan)
        weights, _ = LayerSeconds(deferred, nothing).stage_seconds(plan)
        kept = np.where(self.backward > 0, self.forward, 0.0)
        activation, pieces = LayerSeconds(kept, np.ones(self.layers)).stage_seconds(plan)
        return SplitPasses(forward, backward - weights, weights, activation, np.maximum(pieces, 1).astype(np.int64))

    def _values(self) -> FloatArray:
        """All values in one array [2 * layers + 2 * parts]."""
        return np.concatenate([self.forward, self.backward, self.fixed.ravel()])

    def _with(self, values: FloatArray) -> "LayerSeconds":
        n = self.layers
        fixed = [(forward, backward) for forward, backward in values[2 * n :].reshape(-1, 2).tolist()]
        return LayerSeconds(values[:n], values[n : 2 * n], *fixed)


def over_ranks(device: ArrayLike, wall: ArrayLike, experts: ArrayLike, *, tells_waiting: bool) -> FloatArray:
    """Combine the measurements of several ranks that hold the same layers.

    device, wall: float arrays [rank, ...], device and wall-clock seconds.
    experts: int array [rank], the number of each rank's expert-parallel group.
    tells_waiting: whether device seconds exclude waits for other ranks. A CPU's do; a GPU's include the kernels that
        wait.

    Ranks of an expert-parallel group wait for each other in every MoE layer. The last rank to arrive waits only for
    messages, so the shortest wall-clock time of the group is the time of the layer, messages included. Longer times
    include waits for ranks that were still computing earlier layers. If device seconds exclude waits, the layer also
    takes at least the device seconds of the slowest rank. A rank alone in its group waits for no other rank. Its device
    seconds count, because wall-clock seconds are longer on a shared machine.

    Returns an array [...], the mean over groups, which are data-parallel replicas with different data. Raises
    ValueError for arrays of different numbers of ranks.
    """
    work, waited, group = np.asarray(device, dtype=float), np.asarray(wall, dtype=float), np.asarray(experts)
    if waited.shape != work.shape or group.shape != work.shape[:1]:
        raise ValueError(f"wall has shape {waited.shape} and experts {group.shape}, for device of shape {work.shape}")
    replicas = []
    for number in np.unique(group):
        busy, shortest = work[group == number], waited[group == number].min(axis=0)
        if len(busy) == 1:
            replicas.append(busy[0])
        else:
            replicas.append(np.maximum(busy.max(axis=0), shortest) if tells_waiting else shortest)
    return np.asarray(np.mean(replicas, axis=0))


# A cost is away from its average if the difference is more than _SIGMAS standard deviations and more than _LEAST times
# the mean cost of a layer. A cost that is away on the same side in _CONFIRM iterations in a row has jumped.
_SIGMAS, _LEAST, _CONFIRM = 5.0, 0.05, 3


@dataclass
class CostAverage:
    """An exponential average of `LayerSeconds` over iterations that restarts when the cost of a layer jumps.

    window: length in iterations. A new iteration has weight 2 / (window + 1), or more while there are fewer iterations.
    """

    window: int = 20
    iterations: int = field(default=0, init=False)  # since the average began
    _mean: FloatArray | None = field(default=None, init=False, repr=False)
    _variance: FloatArray | None = field(default=None, init=False, repr=False)
    _away: FloatArray | None = field(default=None, init=False, repr=False)  # iterations in a row; the sign is the side
    _recent: list[FloatArray] = field(default_factory=list, init=False, repr=False)
    _like: LayerSeconds | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window={self.window} must be at least 1")

    def add(self, cost: LayerSeconds) -> bool:
        """Add one iteration. Returns whether it confirms a jump; then only the last `_CONFIRM` iterations count."""
        values = cost._values()
        if self._mean is None or self._like is None or self._like.layers != cost.layers:
            self._begin(cost, [values])
            return False
        assert self._variance is not None and self._away is not None
        off = values - self._mean
        far = np.maximum(_SIGMAS * np.sqrt(self._variance), _LEAST * float(cost.total.mean()))
        side = np.where(np.abs(off) > far, np.sign(off), 0.0)
        self._away = np.where(side == 0, 0.0, np.where(side * self._away >= 0, self._away + side, side))
        self._recent = [*self._recent, values][-_CONFIRM:]
        if np.abs(self._away).max() >= _CONFIRM and self.iterations >= _CONFIRM:
            self._begin(cost, self._recent)
            return True
        self.iterations += 1
        weight = max(2.0 / (self.window + 1), 1.0 / self.iterations)
        usual = np.abs(self._away) == 0  # outliers must not increase the variance
        self._mean = self._mean + weight * np.where(usual, off, np.clip(off, -far, far))
        self._variance = np.where(usual, (1 - weight) * (self._variance + weight * off**2), self._variance)
        self._like = cost
        return False

    @property
    def cost(self) -> LayerSeconds:
        """The average. Raises ValueError before the first iteration."""
        if self._mean is None or self._like is None:
            raise ValueError("no iteration was measured yet; call add() first")
        return self._like._with(np.maximum(self._mean, 0.0))

    def _begin(self, cost: LayerSeconds, values: list[FloatArray]) -> None:
        self._mean, self._variance = np.mean(values, axis=0), np.var(values, axis=0)
        self._away, self._recent = np.zeros_like(self._mean), list(values)
        self._like, self.iterations = replace(cost), len(values)
