"""The default planner: replicas for a predicted load, as many as pay for their transfer.

The true load is split exactly later (`balancing.experts.split.split`), so the placement only has to make a balanced
split possible. Without a cost model all slots are used. Replicas are spread for robustness (`spread`). If slots are so
few that spread replicas cannot balance even the prediction, they are packed for the prediction (`pack`).

With a cost model (`balancing.experts.cost`), the candidate of least cost is chosen. Candidates are

- no replicas,
- spread replicas,
- the most useful packed replicas, anywhere, and inside nodes alone, where links cost least,
- replicas that keep tokens in their node (`near`).

If slots stay empty and the load is expected to drift, the choice is compared with full slots under drifted loads.

Costs are estimated for all candidates at once (`estimate`). With few ranks and experts there is time for more: the best
candidates are then compared by their exact split, and so are variants of the best one with another expert in one slot.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from balancing.experts.cost import ExpertShape, copy_seconds, layer_cost, with_transfers
from balancing.experts.load_history import drifted_loads
from balancing.experts.placement import ReplicaPlacement
from balancing.experts.planners.problem import Problem
from balancing.experts.planners.quota.estimate import CostEstimate
from balancing.experts.planners.quota.near import near_slots
from balancing.experts.planners.quota.pack import pack_replicas
from balancing.experts.planners.quota.spread import fill_slots, spread_counts, spread_slots
from balancing.experts.split.split import traffic

__all__ = ["QuotaPlanner", "plan_quota"]

_PRECISION = 0.01  # costs and loads that differ by less than this fraction count as equal
_THOROUGH = 1024  # largest slots x experts with time for exact splits and for more candidates
_LIKELY = 6  # candidates of least estimate whose costs are then computed better; a third of it above _THOROUGH


def plan_quota(loads: np.ndarray, problem: Problem) -> list[ReplicaPlacement]:
    """The placements of all layers, planned one by one. Every layer but the first uses the window of a later layer."""
    picks = spread_counts(loads.sum(1), problem.home, problem.ranks, problem.slots)
    first = QuotaPlanner(problem.cluster, problem.home, problem.slots, problem.shape, problem.window, problem.drift)
    later = replace(first, window=replace(first.window, first=False))
    return [
        (later if number else first).plan(load, layer_picks)
        for number, (load, layer_picks) in enumerate(zip(loads, picks, strict=True))
    ]


@dataclass(frozen=True)
class QuotaPlanner(Problem):
    """The problem, with the steps to plan one layer."""

    def plan(self, load: np.ndarray, picks: np.ndarray) -> ReplicaPlacement:
        """The placement of one layer. load: float [source_rank, expert], tokens. picks: a row of `spread_counts`."""
        counts, total = np.rint(load).astype(np.int64), load.sum(0)
        spread = fill_slots(self._spread(total, picks), total, self.home)
        if self.shape is None:
            return self._balanced(counts, total, spread)
        costs = _Costs(self, counts, self.shape)
        best = costs.cheapest([self.empty, spread, *self._packed(total), *self._near(counts, total, picks)])
        if self.thorough and self.ranks > self.per_node:
            best = costs.cheapest([best.slot_expert, *self._exchanged(best.slot_expert, total)])
        best = self._with_free_copies(best, total, costs)
        return self._after_drift(best, spread, load) if self.drift and (best.slot_expert < 0).any() else best

    def _balanced(self, counts: np.ndarray, total: np.ndarray, spread: np.ndarray) -> ReplicaPlacement:
        """`spread` if it balances the load. Otherwise the better balanced of `spread` and packed replicas."""
        plan = self.placement(spread)
        fullest = _fullest(counts, plan)
        if fullest <= (1 + _PRECISION) * counts.sum() / self.ranks:
            return plan
        packed = self.placement(fill_slots(self._pack(total)[-1], total, self.home))
        return packed if _fullest(counts, packed) < fullest else plan

    def _packed(self, total: np.ndarray) -> list[np.ndarray]:
        """Packed candidates: the most useful 1, 2, 4, ... and all packed replicas; all of them with every other slot
        filled; and the same 1, 2, 4, ... and all with replicas only inside nodes."""
        packed = self._pack(total)
        filled = fill_slots(packed[-1], total, self.home)
        return [*packed, filled, *(self._pack(total, inside=True) if self.ranks > self.per_node else [])]

    def _near(self, counts: np.ndarray, total: np.ndarray, picks: np.ndarray) -> list[np.ndarray]:
        """Candidates that keep tokens in their node. Empty slots are filled from within the node. [] on one node.

        Some candidates have only such replicas. For balance, the others begin with a fraction of all replicas that are
        spread.
        """
        if self.ranks == self.per_node or self.ranks % self.per_node:
            return []
        parts = (8, 4, 2, 1) if self.thorough else (4, 2, 1)
        numbers = sorted({-(-self.ranks * self.slots // part) for part in parts})
        starts = [self.empty]
        starts += [self._spread(total, picks[:number]) for number in (numbers[:-1] if self.thorough else numbers[:1])]
        near = near_slots(counts, self.home, starts, ranks_per_node=self.per_node, numbers=numbers)
        return [fill_slots(slots, total, self.home, self.per_node) for slots in near]

    def _exchanged(self, slots: np.ndarray, total: np.ndarray) -> np.ndarray:
        """All placements that differ from `slots` in one slot. The slot is empty or has an expert of the busier half of
        all experts: int [placement, rank, slot]."""
        experts = len(self.home)
        held = np.zeros((self.ranks, experts + 1), dtype=bool)  # the last column is for empty slots, -1
        held[self.home, np.arange(experts)] = True
        held[:, np.argsort(total, kind="stable")[: experts // 2]] = True
        held[np.arange(self.ranks)[:, None], slots] = True
        rank, expert = np.nonzero(~held)
        expert[expert == experts] = -1
        exchanged = np.repeat(slots[None], len(rank) * self.slots, axis=0)
        number, slot = np.divmod(np.arange(len(exchanged)), self.slots)
        exchanged[np.arange(len(exchanged)), rank[number], slot] = expert[number]
        return exchanged

    def _with_free_copies(self, plan: ReplicaPlacement, total: np.ndarray, costs: "_Costs") -> ReplicaPlacement:
        """`plan` with empty slots filled, if the added replicas cost less than `_PRECISION` of the layer's time.

        Added replicas are copied within their node. They help if the load differs from its prediction. Nothing is added
        if transfers are exposed or `plan` has no replicas.
        """
        if self.window.hidden_under is None or plan.replicas in (0, plan.slot_expert.size):
            return plan
        filled = self.placement(fill_slots(plan.slot_expert, total, self.home, self.per_node))
        before, after = costs.of([plan, filled])
        return filled if after <= (1 + _PRECISION) * before else plan

    def _after_drift(self, plan: ReplicaPlacement, spread: np.ndarray, load: np.ndarray) -> ReplicaPlacement:
        """`plan`, `plan` with empty slots filled from within the node, or `spread`: what costs least after a drift.

        An even load needs no replicas, but loads that it may become do.
        """
        assert self.shape is not None
        filled = fill_slots(plan.slot_expert, load.sum(0), self.home, self.per_node)
        plans = [plan, self.placement(filled), self.placement(spread)]
        costs = [_Costs(self, drifted, self.shape).of(plans) for drifted in drifted_loads(load, self.drift)]
        return plans[np.sum(costs, axis=0).argmin()]

    def _spread(self, total: np.ndarray, picks: np.ndarray) -> np.ndarray:
        sizes = self.ranks, self.slots
        return spread_slots(total, picks, self.home, *sizes, ranks_per_node=self.per_node)

    def _pack(self, total: np.ndarray, *, inside: bool = False) -> list[np.ndarray]:
        """Packed replicas: the most useful 1, 2, 4, ..., and all."""
        sizes = self.ranks, self.slots
        copies = pack_replicas(total, self.home, *sizes, ranks_per_node=self.per_node, inside=inside)
        slots, used, packed = self.empty, [0] * self.ranks, []
        for number, (expert, rank) in enumerate(copies, 1):
            slots[rank, used[rank]] = expert
            used[rank] += 1
            if number & (number - 1) == 0:
                packed.append(slots.copy())
        return [*packed, slots]

    @cached_property
    def thorough(self) -> bool:
        """Whether the layer is small enough for exact splits and more candidates."""
        return self.ranks * self.slots * len(self.home) <= _THOROUGH


class _Costs:
    """Costs of placements under the load of one layer.

    planner: its cluster and window are used.
    counts: int [source_rank, expert], tokens.
    shape: size of an expert.
    """

    def __init__(self, planner: QuotaPlanner, counts: np.ndarray, shape: ExpertShape) -> None:
        self._planner, self._counts, self._machine = planner, counts, (planner.cluster, shape, planner.window)
        self._estimate = CostEstimate(counts, planner.home, *self._machine)

    def of(self, plans: Sequence[ReplicaPlacement], known: tuple[np.ndarray, np.ndarray] | None = None) -> np.ndarray:
        """Seconds of each placement, float [placement]: exact if the planner is `thorough`, otherwise estimated with
        exact transfer times.

        known: estimated seconds of one all-to-all and of forward compute, if known: float [placement] each.
        """
        cluster, shape, window = self._machine
        if self._planner.thorough:
            return np.array([layer_cost(traffic(self._counts, plan), plan, *self._machine).total for plan in plans])
        if known is None:
            estimate = self._estimate(np.stack([plan.slot_expert for plan in plans]))
            known = np.asarray(estimate.all_to_all), np.asarray(estimate.forward)
        copied = np.array([copy_seconds(plan, cluster) for plan in plans])
        return np.asarray(with_transfers(*known, copied, shape, window).total)

    def cheapest(self, candidates: Sequence[np.ndarray]) -> ReplicaPlacement:
        """The candidate of least cost; among equals the first. candidates: int [rank, slot] each."""
        most = _LIKELY if self._planner.thorough else _LIKELY // 3
        estimate = self._estimate(np.stack(candidates))
        likely = sorted({0, *np.argsort(estimate.total, kind="stable")[:most].tolist()})
        exchange, forward = np.array([estimate.all_to_all, estimate.forward])[:, likely]
        plans = [self._planner.placement(candidates[index]) for index in likely]
        return plans[self.of(plans, (exchange, forward)).argmin()]


def _fullest(counts: np.ndarray, plan: ReplicaPlacement) -> int:
    """Tokens of the busiest rank. counts: int [source_rank, expert]."""
    return int(traffic(counts, plan).sum(0).max())
