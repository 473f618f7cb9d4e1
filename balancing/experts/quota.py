"""Our planner: replicas for a load that is only predicted, as many as pay.

Tokens are split exactly on the true load later (`balancing.experts.split`), so the placement only has to make a level
split possible. Where costs are not known, all slots are used: spread for robustness (`balancing.experts.spread`), or,
where slots are so few that this cannot even level the prediction, packed for the prediction
(`balancing.experts.fewest`). Where they are, numbers of the most useful replicas are tried too, none included, and the
plan that takes least time by the cost model is the one: copies nothing hides delay a layer, hidden ones hold up tokens.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from balancing.cluster import Cluster
from balancing.experts.cost import ExpertShape, LayerCost, LeastCost, break_even_tokens, layer_cost
from balancing.experts.fewest import fewest_copies
from balancing.experts.placement import ReplicaPlacement
from balancing.experts.split import traffic
from balancing.experts.spread import fill_slots, spread_counts, spread_slots

__all__ = ["QuotaPlanner"]

_LEVEL = 1.01  # largest over mean of a prediction that counts as level
_ROUNDING = 1 - 1e-9  # a bound that equals the figure itself may be a little above it

_Moved = Callable[[ReplicaPlacement], np.ndarray]
_Fewest = Callable[[tuple[float, float]], tuple[list[tuple[int, int]], float]]


@dataclass(frozen=True)
class QuotaPlanner:
    """Plans layer by layer.

    home: int [expert]. slots: most replicas a rank may host. shape: size of an expert; None if balance alone counts.
    hidden_under, micro_batches: as in `balancing.experts.cost.layer_cost`.
    """

    cluster: Cluster
    home: np.ndarray
    slots: int
    shape: ExpertShape | None = None
    hidden_under: float | None = None
    micro_batches: int = 1

    def __call__(self, loads: np.ndarray) -> list[ReplicaPlacement]:
        """One placement a layer. loads: float [layer, source_rank, expert]."""
        picks = spread_counts(loads.sum(1), self.home, self._ranks, self.slots)
        return [self._plan(load, own) for load, own in zip(loads, picks, strict=True)]

    def _plan(self, load: np.ndarray, picks: np.ndarray) -> ReplicaPlacement:
        total, counts = load.sum(0), np.rint(load).astype(np.int64)
        moved, fewest = cache(partial(traffic, counts)), cache(partial(self._fewest, total))
        full = self._all_slots(total, moved, fewest, picks)
        if self.shape is None:
            return full
        cost = self._cost(moved(full), full, self.shape)
        choices: list[list[tuple[int, int]]] = [[]]
        if cost.exposed:
            # The 1, 4, 16, ... most useful replicas, all, and those that pay even if every copy is exposed.
            copies, _ = fewest((0.0, 0.0))
            choices += [copies[: 1 << power] for power in range(0, len(copies).bit_length(), 2)]
            choices += [copies, fewest(self._break_even(self.shape, 1.0))[0]]
        elif cost.slowed:
            price = cost.slowed / (cost.trans + cost.agg)
            choices.append(fewest(self._break_even(self.shape, price))[0])
        plans = [self._place(copies) for copies in dict.fromkeys(map(tuple, choices))]
        least_cost = LeastCost(
            counts,
            self.home,
            self.cluster,
            self.shape,
            hidden_under=self.hidden_under,
            micro_batches=self.micro_batches,
        )
        least = [least_cost(plan).total for plan in plans]
        best = cost.total, full.replicas > 0, -1  # no replicas rather than some that gain nothing
        for at in sorted(range(len(plans)), key=lambda at: least[at]):
            if least[at] * _ROUNDING > best[0]:
                break
            seconds = self._cost(moved(plans[at]), plans[at], self.shape).total
            best = min(best, (seconds, plans[at].replicas > 0, at))
        return plans[best[2]] if best[2] >= 0 else full

    def _all_slots(self, total: np.ndarray, moved: _Moved, fewest: _Fewest, picks: np.ndarray) -> ReplicaPlacement:
        """Every slot used, whatever it costs."""
        slots = spread_slots(total, picks, self.home, self._ranks, self.slots, ranks_per_node=self._per_node)
        spread = self._placement(fill_slots(slots, total, self.home))
        fullest, mean = _fullest(moved(spread)), total.sum() / self._ranks
        if fullest <= _LEVEL * mean:
            return spread
        copies, fullest_packed = fewest((0.0, 0.0))
        packed = self._placement(fill_slots(self._place(copies).slot_expert, total, self.home))
        return packed if fullest_packed < fullest or _fullest(moved(packed)) < fullest else spread

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
        return fewest_copies(total, self.home, self._ranks, self.slots, ranks_per_node=self._per_node, least=least)

    def _cost(self, moved: np.ndarray, plan: ReplicaPlacement, shape: ExpertShape) -> LayerCost:
        return layer_cost(
            moved, plan, self.cluster, shape, hidden_under=self.hidden_under, micro_batches=self.micro_batches
        )

    def _place(self, copies: Iterable[tuple[int, int]]) -> ReplicaPlacement:
        held: list[list[int]] = [[] for _ in range(self._ranks)]
        for expert, rank in copies:
            held[rank].append(expert)
        return self._placement(np.array([[*own, *[-1] * (self.slots - len(own))] for own in held]))

    def _placement(self, slots: np.ndarray) -> ReplicaPlacement:
        return ReplicaPlacement(self.home, slots, "level", self._per_node)

    @property
    def _ranks(self) -> int:
        return int(self.home.max()) + 1

    @property
    def _per_node(self) -> int:
        return min(self._ranks, self.cluster.ranks_per_node)


def _fullest(moved: np.ndarray) -> int:
    """Tokens of the fullest rank."""
    return int(moved.sum(0).max())
