"""Plans of micro-batches: the micro-batch of each document of a step, from the documents' lengths.

A pipeline stage runs its micro-batches one after another, and all stages wait for the slowest micro-batch. Sequences
packed to the same number of tokens have equal work in linear layers and very unequal work in attention, so the
documents of a step are redistributed over its micro-batches. WLB-LLM (OSDI 2025) does the same, but also moves
documents to later steps.

The plan depends only on the lengths, the cluster and the model's shape, as a plan of sequences does (`plan`). So every
rank makes the same plan without communication, ahead of the step.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from balancing.cluster import Cluster
from balancing.kernels.pairs import token_counts
from balancing.sequences.cost import linear_seconds, whole_seconds
from balancing.sequences.plan import checked_lengths
from balancing.sequences.planners.groups import deal_areas
from balancing.sequences.planners.micro_batch_packing import balanced_deal, hill_order, whole_costs
from balancing.sequences.planners.slopes import slope_targets
from balancing.sequences.sequence_plan import AttentionShape

__all__ = ["MICRO_BATCH_ROOM", "MicroBatchPlan", "deal_whole", "document_seconds", "plan_micro_batches"]

MICRO_BATCH_ROOM = 1.25  # most tokens of a micro-batch over the mean, without a capacity


@dataclass(frozen=True)
class MicroBatchPlan:
    """The micro-batch of each document of a step.

    lengths: tokens of each document.
    seconds: seconds of each document in all layers, forward and backward, with its work spread evenly over the ranks.
    micro_batch: of each document, from 0.
    micro_batches: number of micro-batches of the step.
    method: the planner that made the plan.
    capacity: most tokens of a micro-batch, over all ranks; None for no limit.

    Raises ValueError unless each document is in exactly one micro-batch of the step, each micro-batch has a document,
    and none has more tokens than the capacity.
    """

    lengths: tuple[int, ...]
    seconds: tuple[float, ...]
    micro_batch: tuple[int, ...]
    micro_batches: int
    method: str
    capacity: int | None = None

    def __post_init__(self) -> None:
        if not len(self.lengths) == len(self.seconds) == len(self.micro_batch):
            raise ValueError(
                f"{len(self.micro_batch)} micro-batches and {len(self.seconds)} costs of {len(self.lengths)} documents"
            )
        number = np.array(self.micro_batch, dtype=np.int64)
        if (wrong := np.flatnonzero((number < 0) | (number >= self.micro_batches))).size:
            raise ValueError(f"document {wrong[0]} is in micro-batch {number[wrong[0]]} of {self.micro_batches}")
        if (empty := np.flatnonzero(np.bincount(number, minlength=self.micro_batches) == 0)).size:
            raise ValueError(f"micro-batch {empty[0]} of {self.micro_batches} has no document")
        if self.capacity is not None and int(self.tokens.max()) > self.capacity:
            fullest = int(self.tokens.argmax())
            raise ValueError(
                f"micro-batch {fullest} has {self.tokens[fullest]} tokens, over its capacity of {self.capacity}"
            )

    @cached_property
    def tokens(self) -> np.ndarray:
        """int64 [micro-batch], tokens of its documents."""
        total = np.zeros(self.micro_batches, dtype=np.int64)
        np.add.at(total, list(self.micro_batch), self.lengths)
        return total

    @cached_property
    def cost(self) -> np.ndarray:
        """float64 [micro-batch], seconds of its documents together."""
        return np.bincount(self.micro_batch, self.seconds, self.micro_batches)

    @property
    def imbalance(self) -> float:
        """Cost of the most expensive micro-batch over the mean cost."""
        return float(self.cost.max() / self.cost.mean())


def document_seconds(lengths: Sequence[int] | np.ndarray, cluster: Cluster, shape: AttentionShape) -> np.ndarray:
    """float64 [document], seconds of forward and backward in all layers, the work spread evenly over the ranks.

    lengths: tokens of each document. Attention is costed as in `cost.whole_seconds`.
    """
    linear = token_counts(lengths) * linear_seconds(1.0, cluster, shape)
    return np.asarray((whole_seconds(lengths, cluster, shape) + linear) / cluster.world_size)


def plan_micro_batches(
    lengths: Sequence[int] | np.ndarray,
    micro_batches: int,
    cluster: Cluster,
    *,
    shape: AttentionShape,
    token_capacity: int | None = None,
    drawn: Sequence[int] | np.ndarray | None = None,
    step: Callable[[np.ndarray], float] | None = None,
) -> MicroBatchPlan:
    """The micro-batch of every document of a step: equal cost within a capacity.

    Micro-batches are numbered so that cheap ones run first and last. With `step`, the plan is the quickest of three:
    micro-batches of equal cost, micro-batches that are cheaper in warm-up and cool-down (`planners.slopes`), and the
    drawn micro-batches, reordered with cheap ones first and last.

    lengths: tokens of each document, at least one.
    micro_batches: number of micro-batches of the step, at most as many as documents.
    cluster: the ranks over which each micro-batch is spread, usually those of a context-parallel group.
    shape: the model, for costs.
    token_capacity: most tokens of a micro-batch on each of these ranks. None: all ranks together hold 1.25 times the
        mean, or the longest document or the fullest drawn micro-batch if that is more; if documents do not fit so, the
        mean plus the longest document.
    drawn: micro-batch of each document as it was drawn, within the capacity. It is kept if no other plan costs less.
    step: a function from costs of micro-batches, float64 [micro-batch], to seconds of a step.

    Raises ValueError for fewer documents than micro-batches, lengths below 1, a capacity below 1, below the mean
    or below the longest document, and documents for which no plan within the capacity is found.
    """
    checked = checked_lengths(lengths)
    if not 1 <= micro_batches <= len(checked):
        raise ValueError(f"{len(checked)} documents do not fill {micro_batches} micro-batches; each takes at least one")
    tokens = np.array(checked, dtype=np.int64)
    seconds = document_seconds(tokens, cluster, shape)
    start = None if drawn is None else np.asarray(drawn, dtype=np.int64)
    costs = whole_costs(seconds)
    limit = _capacity(tokens, micro_batches, cluster.world_size, token_capacity, start)
    try:
        deal = balanced_deal(costs, tokens, micro_batches, limit, start)
    except ValueError:
        if token_capacity is not None:
            raise
        # The least full micro-batch has at most the mean, so it always has room for one more document.
        limit = -(-int(tokens.sum()) // micro_batches) + int(tokens.max())
        deal = balanced_deal(costs, tokens, micro_batches, limit, start)
    deal = _as_hill(deal, costs, micro_batches)
    if step is not None:
        able = [deal] if start is None else [deal, _as_hill(start, costs, micro_batches)]
        most = limit * micro_batches / int(tokens.sum())
        sloped = _on_slopes(costs, tokens, micro_batches, limit, most, step)
        able += [] if sloped is None else [sloped]
        deal = min(able, key=lambda candidate: step(np.bincount(candidate, seconds, micro_batches)))
    return MicroBatchPlan(checked, tuple(seconds.tolist()), tuple(deal.tolist()), micro_batches, "balanced", limit)


def deal_whole(
    seconds: np.ndarray, micro_batches: int, step: Callable[[np.ndarray], float] | None = None
) -> np.ndarray:
    """int64 [part], the micro-batch of each part of a step: equally many parts in each micro-batch, costs as equal as
    that allows, and cheap micro-batches first and last.

    seconds: [part], costs of parts in the order in which they were drawn. All parts have the same number of tokens.
    micro_batches: number of micro-batches of the step.
    step: as in `plan_micro_batches`. With it, micro-batches of warm-up and cool-down are cheaper where that is quicker.

    Raises ValueError if the number of parts is not a multiple of `micro_batches`.
    """
    costs, ones = whole_costs(seconds), np.ones(len(seconds), dtype=np.int64)
    deal = _as_hill(deal_areas(costs, micro_batches), costs, micro_batches)
    if step is None:
        return deal
    sloped = _on_slopes(costs, ones, micro_batches, len(seconds) // micro_batches, MICRO_BATCH_ROOM, step)
    able = [deal] if sloped is None else [deal, sloped]
    return min(able, key=lambda candidate: step(np.bincount(candidate, seconds, micro_batches)))


def _as_hill(deal: np.ndarray, costs: np.ndarray, micro_batches: int) -> np.ndarray:
    """The deal with micro-batches renumbered so that cheap ones run first and last."""
    place = np.empty(micro_batches, dtype=np.int64)
    place[hill_order(np.bincount(deal, costs, micro_batches))] = np.arange(micro_batches)
    return place[deal]


def _on_slopes(
    costs: np.ndarray,
    tokens: np.ndarray,
    micro_batches: int,
    capacity: int,
    most: float,
    step: Callable[[np.ndarray], float],
) -> np.ndarray | None:
    """A deal whose costs rise in warm-up to at most `most` times the mean, stay equal, and fall in cool-down.

    None if that is no quicker or no such deal is found. step: as in `plan_micro_batches`. The other parameters are
    those of `balanced_deal`.
    """
    targets = slope_targets(micro_batches, step, math.floor(most * 50) / 50)  # rounded, so that few searches are made
    if targets.max() == 1.0:
        return None
    before = np.rint((targets.max() - targets) * (costs.sum() / micro_batches)).astype(np.int64)
    try:
        return balanced_deal(costs, tokens, micro_batches, capacity, before=before)
    except ValueError:
        return None


def _capacity(tokens: np.ndarray, micro_batches: int, ranks: int, given: int | None, drawn: np.ndarray | None) -> int:
    """Most tokens of a micro-batch, over all ranks."""
    longest, total = int(tokens.max()), int(tokens.sum())
    if given is None:
        fullest = 0 if drawn is None else int(np.bincount(drawn, tokens, micro_batches).max())
        return max(int(MICRO_BATCH_ROOM * total / micro_batches), longest, fullest)
    if given < 1:
        raise ValueError(f"token_capacity={given} must be at least 1 token")
    capacity = given * ranks
    if longest > capacity or total > capacity * micro_batches:
        need = max(longest, -(-total // micro_batches))
        raise ValueError(
            f"token_capacity={given} on {ranks} ranks is too small: {total} tokens in {micro_batches} micro-batches, "
            f"the longest document of {longest}, take {-(-need // ranks)}"
        )
    return capacity
