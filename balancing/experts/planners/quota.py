"""The default planner: replicas for a predicted load, as many as pay for their transfer.

The true load is split exactly later (`balancing.experts.split.split`), so the placement only has to make a balanced
split possible. Without a cost model all slots are used: spread for robustness (`balancing.experts.planners.spread`),
or, where slots are so few that this cannot balance even the prediction, packed for the prediction
(`balancing.experts.planners.pack`). With a cost model the placement of least cost is taken of several: those two, parts
of the packed one down to no replica, those that keep tokens in their node (`balancing.experts.planners.near`), and
those with another expert in one slot. Exposed transfers delay a layer, hidden ones delay its all-to-alls.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from balancing.cluster import Cluster
from balancing.experts.cost import (
    ExpertShape,
    MoELayerCost,
    TransferWindow,
    break_even_tokens,
    layer_cost,
    with_transfers,
)
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
_EXCHANGES = 4  # placements with another expert in one slot that are split
_MOST_EXCHANGES = 1024  # such placements, up to which there is time to bound them all
_FEW_SLOTS = 64  # of all ranks, up to which there is time to look at more placements that keep tokens in their node

_Copies = list[tuple[int, int]]  # (expert, rank) of each replica, most useful first


@dataclass(frozen=True)
class QuotaPlanner:
    """Plans layer by layer.

    cluster: compute and link speeds.
    home: int [expert], home ranks.
    slots: maximal number of replicas on a rank.
    shape: size of an expert; None plans without a cost model.
    window: what transfers are hidden under, for the first of the layers; later ones are not the first MoE layer.
    """

    cluster: Cluster
    home: np.ndarray
    slots: int
    shape: ExpertShape | None = None
    window: TransferWindow = field(default_factory=TransferWindow)

    def __call__(self, loads: np.ndarray) -> list[ReplicaPlacement]:
        """One placement a layer. loads: float [layer, source_rank, expert]."""
        picks = spread_counts(loads.sum(1), self.home, self.ranks, self.slots)
        later = replace(self, window=replace(self.window, first=False))
        return [
            (later if number else self)._plan(_Candidates(self, load, of_layer))
            for number, (load, of_layer) in enumerate(zip(loads, picks, strict=True))
        ]

    def _plan(self, candidates: "_Candidates") -> ReplicaPlacement:
        if self.shape is None:
            return candidates.in_all_slots()[0]
        costs = _Costs(self, candidates.counts, self.shape)
        plan = self._with_free_copies(costs.cheapest(self._of_all_sizes(candidates, costs)), candidates, costs)
        if self.window.hidden_under is None:
            return plan
        plan = costs.cheapest([plan, *self._nearer(plan, candidates, costs)])
        return costs.cheapest([plan, *self._exchanged(plan, costs)])

    def _nearer(self, plan: ReplicaPlacement, candidates: "_Candidates", costs: "_Costs") -> list[ReplicaPlacement]:
        """Placements that may cost less than `plan` since they keep more tokens in their node."""
        cost = costs.of(plan)
        found = candidates.near() if 4 * cost.all_to_all > (1 - _WORTH) * cost.total else []
        least = costs.bounds.without_transfers([*found]) if found else []
        return [
            candidates.filled(slots, self.per_node)
            for slots, seconds in zip(found, least, strict=True)
            if seconds <= _WORTH * cost.total
        ]

    def _exchanged(self, plan: ReplicaPlacement, costs: "_Costs") -> list[ReplicaPlacement]:
        """Placements with another expert, or none, in one slot of `plan`: those of least bound, where tokens leave
        their node and there is time to look at all."""
        slots, experts = plan.slot_expert, len(self.home)
        if self.ranks == self.per_node or slots.size * experts > _MOST_EXCHANGES:
            return []
        held = np.zeros((self.ranks, experts + 1), dtype=bool)  # the last column is for empty slots, -1
        held[self.home, np.arange(experts)] = True
        held[np.arange(self.ranks)[:, None], slots] = True
        rank, expert = np.nonzero(~held)
        expert[expert == experts] = -1
        found = np.repeat(slots[None], len(rank) * self.slots, axis=0)
        number, slot = np.divmod(np.arange(len(found)), self.slots)
        found[np.arange(len(found)), rank[number], slot] = expert[number]
        least = np.argsort(costs.bounds.without_transfers([*found]), kind="stable")[:_EXCHANGES]
        return [self.placement(found[at]) for at in least]

    def _of_all_sizes(self, candidates: "_Candidates", costs: "_Costs") -> list[ReplicaPlacement]:
        """Placements with many replicas and with few, down to none."""
        assert self.shape is not None
        plans, copies = [candidates.spread], candidates.packed[0]
        choices: list[_Copies] = [[]]
        if self.window.hidden_under is None or costs.bounds(plans)[0].exposed:
            # The 1, 2, 4, ... most useful replicas, as many as are hidden, all, and those that pay even when exposed.
            choices += [copies[: 1 << power] for power in range(len(copies).bit_length())]
            choices += [copies, candidates.worth(self._break_even(self.shape, 1.0))]
            if self.window.hidden_under is not None:
                choices.append(copies[: self._hidden(candidates, costs)])
        else:
            plans = candidates.in_all_slots()
            cost = costs.of(plans[0])
            if cost.slowed:
                choices.append(candidates.worth(self._break_even(self.shape, cost.slowed / (cost.trans + cost.agg))))
        return plans + [self.place(copies) for copies in dict.fromkeys(map(tuple, choices))]

    def _hidden(self, candidates: "_Candidates", costs: "_Costs") -> int:
        """How many of the packed replicas have their transfers hidden, if each more takes no less time to send."""
        copies = candidates.packed[0]
        hidden, exposed, at = 0, len(copies) + 1, len(copies)
        while exposed - hidden > 1:
            (cost,) = costs.bounds([self.place(copies[:at])])
            if not cost.exposed:
                hidden, at = at, (at + exposed) // 2
                continue
            room = min(1 - cost.trans_exposed / cost.trans, 1 - cost.agg_exposed / cost.agg)
            exposed, at = at, max(hidden + 1, math.floor(at * room))  # as if each took as long as the others
            at = min(at, exposed - 1)
        return hidden

    def _break_even(self, shape: ExpertShape, price: float) -> tuple[float, float]:
        """Tokens from which a replica pays, within a node and between nodes.

        price: cost of a transfer over its cost when exposed.
        """
        count = self.window.micro_batches
        sends = 1 if count > 1 else 2  # shared slots are filled twice
        inside, across = (
            price * break_even_tokens(self.cluster, shape, same_node=same, sends=sends, micro_batches=count)
            for same in (True, False)
        )
        return inside, across

    def _with_free_copies(self, plan: ReplicaPlacement, candidates: "_Candidates", costs: "_Costs") -> ReplicaPlacement:
        """`plan` with more replicas in empty slots if they cost next to nothing.

        They stay within their node, and help where the load differs from its prediction.
        """
        if self.window.hidden_under is None or not plan.replicas or plan.replicas == plan.slot_expert.size:
            return plan
        filled = candidates.filled(plan.slot_expert, self.per_node)
        cost = costs.of(plan)
        then = costs.with_transfers(cost.all_to_all, cost.forward, filled)  # a split cannot get worse
        return filled if then.total <= cost.total * _FREE else plan

    def place(self, copies: Iterable[tuple[int, int]]) -> ReplicaPlacement:
        """The placement with these replicas, (expert, rank) each."""
        slots, used = [-1] * (self.ranks * self.slots), [0] * self.ranks
        for expert, rank in copies:
            slots[rank * self.slots + used[rank]] = expert
            used[rank] += 1
        return self.placement(np.array(slots).reshape(self.ranks, self.slots))

    def placement(self, slots: np.ndarray) -> ReplicaPlacement:
        """The placement of int [rank, slot], -1 in empty slots."""
        return ReplicaPlacement(self.home, slots, "level", self.per_node, self.cluster.nics_per_node)

    @cached_property
    def ranks(self) -> int:
        """Number of ranks."""
        return int(self.home.max()) + 1

    @property
    def per_node(self) -> int:
        """Ranks of a node."""
        return min(self.ranks, self.cluster.ranks_per_node)


class _Candidates:
    """Placements for the load of one layer, whatever they cost.

    planner: has the homes, slots and nodes.
    load: float [source_rank, expert], tokens.
    picks: a row of `spread_counts`.
    """

    def __init__(self, planner: QuotaPlanner, load: np.ndarray, picks: np.ndarray) -> None:
        self._planner, self._picks = planner, picks
        self.counts = np.rint(load).astype(np.int64)
        self._total = load.sum(0)

    @cached_property
    def spread(self) -> ReplicaPlacement:
        """All slots, spread for robustness."""
        return self.filled(self._spread(len(self._picks)))

    @cached_property
    def packed(self) -> tuple[_Copies, float]:
        """Replicas that balance this load, and the tokens of the busiest rank with all of them."""
        return self._pack((0.0, 0.0))

    def worth(self, least: tuple[float, float]) -> _Copies:
        """Replicas that serve at least so many tokens each, within a node and between nodes."""
        return self._pack(least)[0]

    def in_all_slots(self) -> list[ReplicaPlacement]:
        """Placements that use all slots, the best balanced one first."""
        fullest, mean = _fullest(self.counts, self.spread), self._total.sum() / self._planner.ranks
        if fullest <= _BALANCED * mean:
            return [self.spread]
        copies, fullest_packed = self.packed
        packed = self.filled(self._planner.place(copies).slot_expert)
        better = fullest_packed < fullest or _fullest(self.counts, packed) < fullest
        return [packed, self.spread] if better else [self.spread, packed]

    def near(self) -> list[np.ndarray]:
        """Slots [rank, slot] of placements that keep tokens in their node, to be filled from within the node. Some have
        such replicas alone, others a few that were spread first, for balance. None on one node."""
        planner, all_slots = self._planner, self._planner.ranks * self._planner.slots
        if planner.ranks == planner.per_node or planner.ranks % planner.per_node:
            return []
        few = all_slots <= _FEW_SLOTS
        numbers = sorted({-(-all_slots // part) for part in ((8, 4, 2, 1) if few else (4, 2, 1))})
        starts = [np.full((planner.ranks, planner.slots), -1)]
        starts += map(self._spread, numbers[:-1] if few else numbers[:1])
        return near_slots(self.counts, planner.home, starts, ranks_per_node=planner.per_node, numbers=numbers)

    def filled(self, slots: np.ndarray, ranks_per_node: int | None = None) -> ReplicaPlacement:
        """The placement of int [rank, slot] with further replicas in empty slots, as `fill_slots` has them."""
        return self._planner.placement(fill_slots(slots, self._total, self._planner.home, ranks_per_node))

    def _spread(self, number: int) -> np.ndarray:
        """So many replicas, spread: int64 [rank, slot]."""
        planner = self._planner
        picks = self._picks[:number]
        sizes = planner.ranks, planner.slots
        return spread_slots(self._total, picks, planner.home, *sizes, ranks_per_node=planner.per_node)

    def _pack(self, least: tuple[float, float]) -> tuple[_Copies, float]:
        planner = self._planner
        sizes = planner.ranks, planner.slots
        return pack_replicas(self._total, planner.home, *sizes, ranks_per_node=planner.per_node, least=least)


class _Costs:
    """Costs of placements under the load of one layer.

    planner: has the machine and what transfers hide under.
    counts: int [source_rank, expert], tokens.
    shape: size of an expert.
    """

    def __init__(self, planner: QuotaPlanner, counts: np.ndarray, shape: ExpertShape) -> None:
        self._counts, self._machine = counts, (planner.cluster, shape, planner.window)
        self.bounds = CostLowerBound(counts, planner.home, *self._machine)
        self._known: dict[ReplicaPlacement, MoELayerCost] = {}

    def of(self, plan: ReplicaPlacement) -> MoELayerCost:
        """The cost of `plan`, by its split."""
        if plan not in self._known:
            moved = traffic(self._counts, plan)
            self._known[plan] = layer_cost(moved, plan, *self._machine)
        return self._known[plan]

    def with_transfers(self, all_to_all: float, forward: float, plan: ReplicaPlacement) -> MoELayerCost:
        """The cost of `plan` if its exchanges of tokens and its compute take these seconds."""
        return with_transfers(all_to_all, forward, plan, *self._machine)

    def cheapest(self, plans: Sequence[ReplicaPlacement]) -> ReplicaPlacement:
        """The placement of least cost; of equal ones that without replicas, then the first.

        Those whose lower bound is not worth it are not split.
        """
        least = [cost.total for cost in self.bounds(plans)]
        best = math.inf, False, 0
        for at in sorted(range(len(plans)), key=lambda at: (plans[at] not in self._known, least[at])):
            if plans[at] in self._known or least[at] <= best[0] * _WORTH:
                best = min(best, (self.of(plans[at]).total, plans[at].replicas > 0, at))
        return plans[best[2]]


def _fullest(counts: np.ndarray, plan: ReplicaPlacement) -> int:
    """Tokens of the busiest rank. counts: int [source_rank, expert]."""
    return int(traffic(counts, plan).sum(0).max())
