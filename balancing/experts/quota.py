"""Our planner: replicas for a load that is only predicted, as many as pay.

Tokens are split exactly on the true load later (`balancing.experts.split`), so the placement only has to make a level
split possible. Where costs are not known, all slots are used: spread for robustness (`balancing.experts.spread`), or,
where slots are so few that this cannot even level the prediction, packed for the prediction
(`balancing.experts.fewest`). Where they are, numbers of the most useful replicas are tried too, none included, and the
plan that takes least time by the cost model is the one: copies nothing hides delay a layer, hidden ones hold up tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from balancing.cluster import Cluster
from balancing.experts.cost import ExpertShape, LayerCost, break_even_tokens, layer_cost
from balancing.experts.fewest import fewest_copies
from balancing.experts.placement import ReplicaPlacement
from balancing.experts.split import traffic
from balancing.experts.spread import fill_slots, spread_counts, spread_slots

__all__ = ["QuotaPlanner"]

_LEVEL = 1.01  # largest over mean of a prediction that counts as level


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
        total, moved = load.sum(0), cache(partial(traffic, np.rint(load).astype(np.int64)))
        best = self._all_slots(total, moved, picks)
        if self.shape is None:
            return best
        cost = self._cost(moved(best), best, self.shape)
        seconds, candidates = cost.total, [self._place([])]
        if cost.exposed:
            candidates += self._few(total, self.shape)
        elif cost.slowed:
            candidates.append(self._worth(total, self.shape, cost.slowed / (cost.trans + cost.agg)))
        for candidate in candidates:
            other = self._cost(moved(candidate), candidate, self.shape).total
            # No replicas rather than some that gain nothing.
            if other < seconds or (other == seconds and not candidate.replicas):
                best, seconds = candidate, other
        return best

    def _all_slots(
        self, total: np.ndarray, moved: Callable[[ReplicaPlacement], np.ndarray], picks: np.ndarray
    ) -> ReplicaPlacement:
        """Every slot used, whatever it costs."""
        slots = spread_slots(total, picks, self.home, self._ranks, self.slots, ranks_per_node=self._per_node)
        spread = self._placement(fill_slots(slots, total, self.home))
        fullest, mean = _fullest(moved(spread)), total.sum() / self._ranks
        if fullest <= _LEVEL * mean:
            return spread
        copies, fullest_packed = self._fewest(total)
        packed = self._placement(fill_slots(self._place(copies).slot_expert, total, self.home))
        return packed if fullest_packed < fullest or _fullest(moved(packed)) < fullest else spread

    def _few(self, total: np.ndarray, shape: ExpertShape) -> Iterator[ReplicaPlacement]:
        """The 1, 4, 16, ... most useful replicas, and those that pay even if every copy is exposed."""
        copies, _ = self._fewest(total)
        for power in range(0, len(copies).bit_length(), 2):
            yield self._place(copies[: 1 << power])
        yield self._place(copies)
        yield self._worth(total, shape, 1.0)

    def _worth(self, total: np.ndarray, shape: ExpertShape, price: float) -> ReplicaPlacement:
        """The replicas that pay when a copy costs `price` times what it would if nothing hid it."""
        sends, count = (1 if self.micro_batches > 1 else 2), self.micro_batches  # shared slots are filled twice
        inside, across = (
            price * break_even_tokens(self.cluster, shape, same_node=same, sends=sends, micro_batches=count)
            for same in (True, False)
        )
        return self._place(self._fewest(total, (inside, across))[0])

    def _fewest(
        self, total: np.ndarray, least: tuple[float, float] = (0.0, 0.0)
    ) -> tuple[list[tuple[int, int]], float]:
        return fewest_copies(total, self.home, self._ranks, self.slots, ranks_per_node=self._per_node, least=least)

    def _cost(self, moved: np.ndarray, plan: ReplicaPlacement, shape: ExpertShape) -> LayerCost:
        return layer_cost(
            moved, plan, self.cluster, shape, hidden_under=self.hidden_under, micro_batches=self.micro_batches
        )

    def _place(self, copies: list[tuple[int, int]]) -> ReplicaPlacement:
        slots, used = np.full((self._ranks, self.slots), -1), [0] * self._ranks
        for expert, rank in copies:
            slots[rank, used[rank]] = expert
            used[rank] += 1
        return self._placement(slots)

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
