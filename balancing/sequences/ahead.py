"""Plans made ahead of the step that needs them, where the batch is made: in a data loader's worker.

A plan follows from the lengths of a batch alone, so every rank that reads the batch makes the same one without talking,
while the steps before it run. What a rank does under the plan, its way, is worked out there as well: with routes
between many nodes that takes longer than the plan.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from balancing.cluster import Cluster
from balancing.sequences.engine.rank_program import Way
from balancing.sequences.sequence_plan import SequencePlan

__all__ = ["Planned", "PlanningAhead", "zone_shares"]

_KEPT = 64  # plans; a megabyte each at most


class Planned(NamedTuple):
    """A plan, the way of one rank, and the milliseconds it took to make both: 0 when they were known."""

    plan: SequencePlan
    way: Way
    milliseconds: float


class PlanningAhead:
    """Makes and remembers plans. Copies of it travel into workers.

    make: lengths [sequence] -> plan, deterministic. find: plan -> way of this rank.
    """

    def __init__(self, make: Callable[[tuple[int, ...]], SequencePlan], find: Callable[[SequencePlan], Way]) -> None:
        self._make, self._find = make, find
        self._known: OrderedDict[tuple[int, ...], tuple[SequencePlan, Way]] = OrderedDict()

    def __call__(self, lengths: Sequence[int]) -> Planned:
        """For a batch with sequences of `lengths` tokens, each at least 1."""
        key, begin = tuple(lengths), time.perf_counter()
        if key not in self._known:
            plan = self._make(key)
            self._known[key] = plan, self._find(plan)
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
            return Planned(*self._known[key], (time.perf_counter() - begin) * 1e3)
        self._known.move_to_end(key)
        return Planned(*self._known[key], 0.0)


def zone_shares(plans: Sequence[SequencePlan], cluster: Cluster) -> dict[str, float]:
    """Shares of all tokens: of sequences that stay on one rank, in one node, and that cross nodes."""
    tokens = dict.fromkeys(("local", "intra_node", "inter_node"), 0)
    for plan in plans:
        for sequence, length in enumerate(plan.lengths):
            ranks = plan.ring(sequence)
            nodes = {cluster.node(rank) for rank in ranks}
            tokens["inter_node" if len(nodes) > 1 else "intra_node" if len(ranks) > 1 else "local"] += length
    total = max(sum(tokens.values()), 1)
    return {f"{zone}_share": held / total for zone, held in tokens.items()}
