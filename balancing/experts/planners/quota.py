"""The default planner: replicas for a predicted load, as many as pay for their transfer.

The true load is split exactly later (`balancing.experts.split.split`), so the placement only has to make a balanced
split possible. Without a cost model all slots are used: spread for robustness (`balancing.experts.planners.spread`),
or, where slots are so few that this cannot balance even the prediction, packed for the prediction
(`balancing.experts.planners.pack`). With a cost model, placements with fewer replicas are tried, too, down to none, and
the one with the least cost is chosen: exposed transfers delay a layer, hidden ones delay its all-to-alls. Where they
are hidden and ranks are on several nodes, placements that keep tokens in their node (`balancing.experts.planners.near`)
are compared with it, and taken if they cost less.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

import numpy as np

from balancing.cluster import Cluster
from balancing.experts.cost import ExpertShape, MoELayerCost, break_even_tokens, layer_cost, with_transfers
from balancing.experts.placement import ReplicaPlacement
from balancing.experts.planners.lower_bound import CostLowerBound
from balancing.experts.planners.near import near_slots
from balancing.experts.planners.pack import pack_replicas
from balancing.experts.planners.spread import fill_slots, spread_counts, spread_slots
from balancing.experts.split.split import traffic

__all__ = ["QuotaPlanner"]

_BALANCED = 1.01  # imbalance up to which the predicted load counts as balanced
_WORTH = 0.99  # a placement is split only if its lower bound is below this part of the best cost so far
_FREE = 1.01  # cost ratio up to which more replicas are taken for robustness
_NEAR = 0.02  # part of the cost that all-to-alls must have for placements that make them shorter
_FEW_SLOTS = 64  # of all ranks, up to which more of these are looked at
_LOOSE = 0.01  # expected excess of the cost over its bound with all slots in use; with fewer, in proportion

_Moved = Callable[[ReplicaPlacement], np.ndarray]
_Costs = Callable[[ReplicaPlacement], MoELayerCost]
_Pack = Callable[[tuple[float, float]], tuple[list[tuple[int, int]], float]]


@dataclass(frozen=True)
class QuotaPlanner:
    """Plans layer by layer.

    cluster: compute and link speeds.
    home: int [expert], home ranks.
    slots: maximal number of replicas on a rank.
    shape: size of an expert; None plans without a cost model.
    hidden_under: as in `balancing.experts.cost.layer_cost`.
    first: whether the first of the layers is the first MoE layer.
    micro_batches: number of micro-batches that one transfer serves.
    """

    cluster: Cluster
    home: np.ndarray
    slots: int
    shape: ExpertShape | None = None
    hidden_under: float | None = None
    first: bool = False
    micro_batches: int = 1

    def __call__(self, loads: np.ndarray) -> list[ReplicaPlacement]:
        """One placement a layer. loads: float [layer, source_rank, expert]."""
        picks = spread_counts(loads.sum(1), self.home, self._ranks, self.slots)
        later = replace(self, first=False)
        return [
            (later if number else self)._plan(load, own)
            for number, (load, own) in enumerate(zip(loads, picks, strict=True))
        ]

    def _plan(self, load: np.ndarray, picks: np.ndarray) -> ReplicaPlacement:
        total, counts = load.sum(0), np.rint(load).astype(np.int64)
        moved, pack = cache(partial(traffic, counts)), cache(partial(self._pack, total))
        slots = spread_slots(total, picks, self.home, self._ranks, self.slots, ranks_per_node=self._per_node)
        spread = self._placement(fill_slots(slots, total, self.home))
        if self.shape is None:
            return self._all_slots(spread, total, moved, pack)[0]
        least_costs = CostLowerBound(
            counts,
            self.home,
            self.cluster,
            self.shape,
            hidden_under=self.hidden_under,
            first=self.first,
            micro_batches=self.micro_batches,
        )
        shape = self.shape
        costs = cache(lambda plan: self._cost(moved(plan), plan, shape))
        plans: list[ReplicaPlacement] = [spread]
        choices: list[list[tuple[int, int]]] = [[]]
        if self.hidden_under is None or least_costs(plans)[0].exposed:
            # The 1, 2, 4, ... most useful replicas, as many as are hidden, all, and those that pay even when exposed.
            copies, _ = pack((0.0, 0.0))
            choices += [copies[: 1 << power] for power in range(len(copies).bit_length())]
            choices += [copies, pack(self._break_even(self.shape, 1.0))[0]]
            if self.hidden_under is not None:
                choices.append(copies[: self._hidden(copies, least_costs)])
        else:
            plans = self._all_slots(spread, total, moved, pack)
            cost = costs(plans[0])
            if cost.slowed:
                price = cost.slowed / (cost.trans + cost.agg)
                choices += [pack(self._break_even(self.shape, price))[0]]
        plans += [self._place(copies) for copies in dict.fromkeys(map(tuple, choices))]
        least = [cost.total for cost in least_costs(plans)]
        best = math.inf, False, 0  # among equal costs, the placement without replicas
        looseness = _LOOSE / (self._ranks * self.slots)
        for at in sorted(range(len(plans)), key=lambda at: least[at] * (1 + looseness * plans[at].replicas)):
            if least[at] <= best[0] * _WORTH:
                best = min(best, (costs(plans[at]).total, plans[at].replicas > 0, at))
        plan = self._with_free_copies(plans[best[2]], costs(plans[best[2]]), total)
        return plan if self.hidden_under is None else self._or_nearer(plan, counts, picks, costs, least_costs)

    def _hidden(self, copies: list[tuple[int, int]], least_costs: CostLowerBound) -> int:
        """How many of the first copies have their transfers hidden, if each more takes no less time to send."""
        return bisect_left(
            range(1, len(copies) + 1), True, key=lambda n: least_costs([self._place(copies[:n])])[0].exposed > 0
        )

    def _or_nearer(
        self, plan: ReplicaPlacement, counts: np.ndarray, picks: np.ndarray, costs: _Costs, least_costs: CostLowerBound
    ) -> ReplicaPlacement:
        """`plan`, or a placement of less cost that keeps more tokens in their node.

        counts: int [source_rank, expert], tokens.
        picks: a row of `spread_counts`.
        costs, least_costs: of placements under this load, and bounds of them.

        Some placements have such replicas alone, others a few that were spread first, for balance. What they leave
        empty is filled from within the node, as in `_with_free_copies`.
        """
        per_node, all_slots = self._per_node, self._ranks * self.slots
        if self._ranks == per_node or self._ranks % per_node:
            return plan
        cost = costs(plan)
        if 4 * cost.all_to_all <= _NEAR * cost.total:
            return plan
        total, few = counts.sum(0).astype(float), all_slots <= _FEW_SLOTS
        numbers = sorted({-(-all_slots // part) for part in ((8, 4, 2, 1) if few else (4, 2, 1))})
        starts = [np.full((self._ranks, self.slots), -1)] + [
            spread_slots(total, picks[:number], self.home, self._ranks, self.slots, ranks_per_node=per_node)
            for number in (numbers[:-1] if few else numbers[:1])
        ]
        found = near_slots(counts, self.home, starts, ranks_per_node=per_node, numbers=numbers)
        if not found:
            return plan
        best, lowest = plan, cost.total
        bounds = least_costs.without_transfers(found)
        found = [slots for slots, bound in zip(found, bounds, strict=True) if bound <= lowest * _WORTH]
        least = [bound.total for bound in least_costs([self._placement(slots) for slots in found])] if found else []
        for at in sorted(range(len(found)), key=least.__getitem__):
            if least[at] > lowest * _WORTH:
                break
            other = self._placement(fill_slots(found[at], total, self.home, per_node))
            then = costs(other).total
            if then < lowest:
                best, lowest = other, then
        return best

    def _with_free_copies(self, plan: ReplicaPlacement, cost: MoELayerCost, total: np.ndarray) -> ReplicaPlacement:
        """`plan`, of this cost, with more replicas in empty slots if they cost next to nothing.

        They stay within their node, and help where the load differs from its prediction.
        """
        if self.hidden_under is None or not plan.replicas or plan.replicas == plan.slot_expert.size:
            return plan
        assert self.shape is not None
        filled = self._placement(fill_slots(plan.slot_expert, total, self.home, self._per_node))
        same = cost.all_to_all, cost.forward, filled, self.cluster, self.shape  # a split cannot get worse
        then = with_transfers(*same, self.hidden_under, self.first, self.micro_batches)
        return filled if then.total <= cost.total * _FREE else plan

    def _all_slots(
        self, spread: ReplicaPlacement, total: np.ndarray, moved: _Moved, pack: _Pack
    ) -> list[ReplicaPlacement]:
        """Placements that use all slots whatever they cost, the best balanced one first."""
        fullest, mean = _fullest(moved(spread)), total.sum() / self._ranks
        if fullest <= _BALANCED * mean:
            return [spread]
        copies, fullest_packed = pack((0.0, 0.0))
        packed = self._placement(fill_slots(self._place(copies).slot_expert, total, self.home))
        better = fullest_packed < fullest or _fullest(moved(packed)) < fullest
        return [packed, spread] if better else [spread, packed]

    def _break_even(self, shape: ExpertShape, price: float) -> tuple[float, float]:
        """Tokens from which a replica pays, within a node and between nodes.

        price: cost of a transfer over its cost when exposed.
        """
        sends, count = (1 if self.micro_batches > 1 else 2), self.micro_batches  # shared slots are filled twice
        inside, across = (
            price * break_even_tokens(self.cluster, shape, same_node=same, sends=sends, micro_batches=count)
            for same in (True, False)
        )
        return inside, across

    def _pack(self, total: np.ndarray, least: tuple[float, float]) -> tuple[list[tuple[int, int]], float]:
        return pack_replicas(total, self.home, self._ranks, self.slots, ranks_per_node=self._per_node, least=least)

    def _cost(self, moved: np.ndarray, plan: ReplicaPlacement, shape: ExpertShape) -> MoELayerCost:
        return layer_cost(
            moved,
            plan,
            self.cluster,
            shape,
            hidden_under=self.hidden_under,
            first=self.first,
            micro_batches=self.micro_batches,
        )

    def _place(self, copies: Iterable[tuple[int, int]]) -> ReplicaPlacement:
        slots, used = [-1] * (self._ranks * self.slots), [0] * self._ranks
        for expert, rank in copies:
            slots[rank * self.slots + used[rank]] = expert
            used[rank] += 1
        return self._placement(np.array(slots).reshape(self._ranks, self.slots))

    def _placement(self, slots: np.ndarray) -> ReplicaPlacement:
        return ReplicaPlacement(self.home, slots, "level", self._per_node, self.cluster.nics_per_node)

    @cached_property
    def _ranks(self) -> int:
        return int(self.home.max()) + 1

    @property
    def _per_node(self) -> int:
        return min(self._ranks, self.cluster.ranks_per_node)


def _fullest(moved: np.ndarray) -> int:
    """Tokens of the busiest rank. moved: int [source_rank, rank]."""
    return int(moved.sum(0).max())
