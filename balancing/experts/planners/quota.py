"""Our planner: replicas for a load that is only predicted, as many as pay.

Tokens are split exactly on the true load later (`balancing.experts.split.split`), so the placement only has to make a
level split possible. Where costs are not known, all slots are used: spread for robustness
(`balancing.experts.planners.spread`), or, where slots are so few that this cannot even level the prediction, packed for
the prediction (`balancing.experts.planners.pack`). Where they are, numbers of the most useful replicas are tried too,
none included, and the plan that takes least time by the cost model is the one: copies nothing hides delay a layer,
hidden ones hold up tokens.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

import numpy as np

from balancing.cluster import Cluster
from balancing.experts.cost import ExpertShape, MoELayerCost, break_even_tokens, layer_cost, with_transfers
from balancing.experts.placement import ReplicaPlacement
from balancing.experts.planners.lower_bound import CostLowerBound
from balancing.experts.planners.pack import pack_replicas
from balancing.experts.planners.spread import fill_slots, spread_counts, spread_slots
from balancing.experts.split.split import traffic

__all__ = ["QuotaPlanner"]

_LEVEL = 1.01  # largest over mean of a prediction that counts as level
_WORTH = 0.99  # a plan is looked at only if it may take less than this part of the time of the best one so far
_FREE = 1.01  # times the seconds of a plan: more replicas that take no longer are worth their use
_LOOSE = 0.01  # of its bound: how much more a plan with all slots in use takes; others less, as they use fewer

_Moved = Callable[[ReplicaPlacement], np.ndarray]
_Fewest = Callable[[tuple[float, float]], tuple[list[tuple[int, int]], float]]


@dataclass(frozen=True)
class QuotaPlanner:
    """Plans layer by layer.

    home: int [expert]. slots: most replicas a rank may host. shape: size of an expert; None if balance alone counts.
    hidden_under, first, micro_batches: as in `balancing.experts.cost.layer_cost`; of several layers, only the first one
    can be first.
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
        moved, fewest = cache(partial(traffic, counts)), cache(partial(self._fewest, total))
        slots = spread_slots(total, picks, self.home, self._ranks, self.slots, ranks_per_node=self._per_node)
        spread = self._placement(fill_slots(slots, total, self.home))
        if self.shape is None:
            return self._all_slots(spread, total, moved, fewest)[0]
        least_costs = CostLowerBound(
            counts,
            self.home,
            self.cluster,
            self.shape,
            hidden_under=self.hidden_under,
            first=self.first,
            micro_batches=self.micro_batches,
        )
        plans: list[ReplicaPlacement] = [spread]
        choices: list[list[tuple[int, int]]] = [[]]
        if self.hidden_under is None or least_costs(plans)[0].exposed:
            # The 1, 4, 16, ... most useful replicas, all, and those that pay even if every copy is exposed.
            copies, _ = fewest((0.0, 0.0))
            choices += [copies[: 1 << power] for power in range(0, len(copies).bit_length(), 2)]
            choices += [copies, fewest(self._break_even(self.shape, 1.0))[0]]
        else:
            plans = self._all_slots(spread, total, moved, fewest)
            cost = self._cost(moved(plans[0]), plans[0], self.shape)
            if cost.slowed:
                price = cost.slowed / (cost.trans + cost.agg)
                choices += [fewest(self._break_even(self.shape, price))[0]]
        plans += [self._place(copies) for copies in dict.fromkeys(map(tuple, choices))]
        least = [cost.total for cost in least_costs(plans)]
        best = math.inf, False, 0  # no replicas rather than some that gain nothing
        costs: dict[int, MoELayerCost] = {}
        looseness = _LOOSE / (self._ranks * self.slots)
        for at in sorted(range(len(plans)), key=lambda at: least[at] * (1 + looseness * plans[at].replicas)):
            if least[at] <= best[0] * _WORTH:
                costs[at] = self._cost(moved(plans[at]), plans[at], self.shape)
                best = min(best, (costs[at].total, plans[at].replicas > 0, at))
        return self._with_free_copies(plans[best[2]], costs[best[2]], total)

    def _with_free_copies(self, plan: ReplicaPlacement, cost: MoELayerCost, total: np.ndarray) -> ReplicaPlacement:
        """`plan`, which has this cost, with more replicas in its empty slots that stay in their node, if bringing them
        costs next to nothing: where the load turns out otherwise than predicted they are of use."""
        if self.hidden_under is None or not plan.replicas or plan.replicas == plan.slot_expert.size:
            return plan
        assert self.shape is not None
        filled = self._placement(fill_slots(plan.slot_expert, total, self.home, self._per_node))
        same = cost.all_to_all, cost.forward, filled, self.cluster, self.shape  # tokens are split no worse
        then = with_transfers(*same, self.hidden_under, self.first, self.micro_batches)
        return filled if then.total <= cost.total * _FREE else plan

    def _all_slots(
        self, spread: ReplicaPlacement, total: np.ndarray, moved: _Moved, fewest: _Fewest
    ) -> list[ReplicaPlacement]:
        """Plans that use every slot whatever it costs, the most level one first."""
        fullest, mean = _fullest(moved(spread)), total.sum() / self._ranks
        if fullest <= _LEVEL * mean:
            return [spread]
        copies, fullest_packed = fewest((0.0, 0.0))
        packed = self._placement(fill_slots(self._place(copies).slot_expert, total, self.home))
        better = fullest_packed < fullest or _fullest(moved(packed)) < fullest
        return [packed, spread] if better else [spread, packed]

    def _break_even(self, shape: ExpertShape, price: float) -> tuple[float, float]:
        """Tokens from which a replica pays, within a node and between nodes, if a copy costs `price` times what it
        would if nothing hid it."""
        sends, count = (1 if self.micro_batches > 1 else 2), self.micro_batches  # shared slots are filled twice
        inside, across = (
            price * break_even_tokens(self.cluster, shape, same_node=same, sends=sends, micro_batches=count)
            for same in (True, False)
        )
        return inside, across

    def _fewest(self, total: np.ndarray, least: tuple[float, float]) -> tuple[list[tuple[int, int]], float]:
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
    """Tokens of the fullest rank."""
    return int(moved.sum(0).max())
