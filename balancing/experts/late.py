"""Late copies: replicas that are added inside the layer, from the exact load of the micro-batch.

Replicas are placed by past loads. Where the load has changed since, some ranks stay above the mean however their tokens
are split. UltraEP (arXiv 2606.04101) and MoonEP (Megatron-LM's pull request 6274) therefore place all replicas inside
the layer, from exact counts, and expose every copy. Here the planned replicas stay, and each rank has one more slot. It
is filled only if the split over the planned replicas leaves a rank above the goal; then the load is split again. Ranks
with planned replicas of busy experts can pass those tokens on to other instances and take over a late copy's tokens
instead, so few late copies suffice, and none while loads are calm.

Example: the ranks of `balancing.experts`, whose replicas of expert 0 were placed when it was hot. Now expert 1 is.

    load of each rank                   [5, 30, 10]          so experts have 15, 90 and 30 tokens
    tokens of ranks, planned replicas   [15, 90, 30]         rank 1 is above the goal: 1.04 times the mean of 45
    late copies                         [[1], [-1], [1]]     rank 1 sends expert 1 to rank 0, then to rank 2
    tokens of ranks, split again        [45, 45, 45]

All arithmetic is on integers. On a GPU, `balancing.experts.split.late_kernel` computes the same.
"""

import math
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from balancing.cluster import Cluster
from balancing.experts.cost import ExpertShape, break_even_tokens
from balancing.experts.placement import ReplicaPlacement
from balancing.experts.split.split import LATE_ROUNDS, Splitter, check_counts

__all__ = ["LATE_GOAL", "LateCopies", "add_late_copies", "late_tokens"]

LATE_GOAL = 1.04  # busiest rank over the mean; no copies while the planned replicas keep within it


def add_late_copies(
    load: ArrayLike, placement: ReplicaPlacement, *, slots: int = 1, goal: float = LATE_GOAL, least: int = 0
) -> ReplicaPlacement:
    """Add late copies of experts to a placement, for one micro-batch: its `late` slots are filled.

    Returns `placement` itself if it has no late copies and none are worth it. Otherwise the result has `slots` late
    slots, and its busiest rank has at least `least` tokens less than that of the planned replicas, after the split.

    load: int [source_rank, expert], tokens on each rank that chose each expert.
    placement: the planned replicas, with the split rule "level". Late copies that it has are dropped.
    slots: late slots of a rank.
    goal: busiest rank over the mean, at least 1, in steps of 0.001.
    least: tokens that a copy must take off a rank to pay for its transfer (`late_tokens`).

    Raises ValueError for a load that does not fit the placement, another split rule, and values out of range.
    """
    counts = check_counts(load, placement)
    if placement.split != "level":
        raise ValueError(
            f"late copies need the split rule 'level', not {placement.split!r}: they take what is above it"
        )
    if slots < 0 or not goal >= 1 or least < 0:
        raise ValueError(f"slots={slots} and least={least} must be at least 0, and goal={goal} at least 1")
    empty = placement.with_late(np.full((placement.num_ranks, slots), -1))
    with_late = LateCopies(Splitter(empty), round(1000 * goal), least)(counts.sum(0)).placement
    return with_late if with_late.late_copies or placement.late_copies else placement


def late_tokens(cluster: Cluster, shape: ExpertShape, *, same_node: bool = True) -> int:
    """Tokens that a late copy must take off a rank to pay for its transfer: the `least` of `add_late_copies`.

    Its weights are sent before the forward pass and again before the backward pass; its gradients travel hidden. With
    bf16 weights that are 0.67 rate / bandwidth tokens, 1,170 over NVLink 4.

    cluster: compute and link speeds.
    shape: size of an expert.
    same_node: whether copies stay in the node of an instance.
    """
    weights = replace(shape, gradient_bytes=0)
    return math.ceil(break_even_tokens(cluster, weights, same_node=same_node, sends=2))


class _Choice:
    """Chooses late copies from one split. A rank is hot if it is above the goal. The largest instances of hot ranks go
    to the ranks with most room, until the excess over the mean is covered.

    placement: the instances, with late slots.
    quota: int64 [physical], tokens of each instance.
    permille, least: as in `LateCopies`.
    """

    def __init__(self, placement: ReplicaPlacement, quota: np.ndarray, permille: int, least: int) -> None:
        ranks = placement.num_ranks
        self._expert, self._amount = placement.phys2log.reshape(ranks, -1), quota.reshape(ranks, -1).copy()
        self.load = self._amount.sum(1)
        total = int(self.load.sum())
        mean, limit = total // ranks, total * permille // (1000 * ranks)
        self.hot = self.load > max(limit, mean + least)
        self._threshold = max(1, least, (limit - mean) // 2)
        self._held, self.late = placement.log2phys >= 0, placement.late.copy()
        # Tokens of experts with another instance that is not hot can be passed on. Three fifths of them count.
        cool = (self._held & ~self.hot).sum(1) > 1
        passed = np.where((self._expert >= 0) & cool[self._expert], self._amount, 0).sum(1)
        room = np.maximum(mean - self.load, 0) + passed * 3 // 5
        self._room = np.where(self.hot | (self.late >= 0).all(1), -1, room)
        self._excess = np.where(self.hot, self.load - mean, 0)

    def __call__(self) -> np.ndarray:
        """Returns the late slots with those that are added: int64 [rank, late slot]."""
        while (excess := self._excess.max()) >= self._threshold:
            giver = int(self._excess.argmax())
            local = int(self._amount[giver].argmax())
            expert = self._expert[giver, local]
            room = np.where(self._held[expert], -1, self._room)
            taker = int(room.argmax())
            moved = min(excess, self._amount[giver, local], room[taker])
            if moved < self._threshold:
                self._excess[giver] = 0
                continue
            self._excess[giver] -= moved
            self._amount[giver, local] -= moved
            self._held[expert, taker] = True
            slot = int((self.late[taker] >= 0).sum())
            self.late[taker, slot] = expert
            self._room[taker] = room[taker] - moved if slot + 1 < self.late.shape[1] else -1
        return self.late


class LateCopies:
    """Adds late copies to one placement, for each micro-batch.

    splitter: over the planned replicas and late slots, which are empty.
    permille: the goal of `add_late_copies`, in thousandths of the mean.
    least: as in `add_late_copies`.
    """

    def __init__(self, splitter: Splitter, permille: int, least: int) -> None:
        self._splitter, self._permille, self._least = splitter, permille, least

    def __call__(self, totals: np.ndarray) -> Splitter:
        """The splitter over the placement with its late copies. totals: int64 [expert], tokens of each expert."""
        return self._with_quotas(totals)[0]

    def split(self, load: np.ndarray) -> tuple[ReplicaPlacement, np.ndarray]:
        """The placement with its late copies, and the tokens of each source rank that each instance serves: int64
        [source_rank, physical]. load: int [source_rank, expert]."""
        splitter, quota = self._with_quotas(load.sum(0))
        return splitter.placement, splitter(load, quota)

    def _with_quotas(self, totals: np.ndarray) -> tuple[Splitter, np.ndarray]:
        splitter, ranks = self._splitter, self._splitter.placement.num_ranks
        before = quota = splitter.quotas(totals)
        first = busiest = _busiest(quota, ranks)
        if 1000 * ranks * first <= self._permille * int(totals.sum()):
            return splitter, quota
        for _ in range(LATE_ROUNDS):
            late = _Choice(splitter.placement, quota, self._permille, self._least)()
            if np.array_equal(late, splitter.placement.late):
                break
            splitter = self._splitter.with_late(late)
            quota = splitter.quotas(totals)
            busiest = _busiest(quota, ranks)
        return (splitter, quota) if busiest + max(self._least, 1) <= first else (self._splitter, before)


def _busiest(quota: np.ndarray, ranks: int) -> int:
    """Tokens of the busiest rank. quota: int64 [physical]."""
    return int(quota.reshape(ranks, -1).sum(1).max())
