"""Plans made ahead of the step that needs them, where the batch is made: in a data loader's worker.

A plan follows from the lengths of a batch alone, so every rank that reads the batch makes the same one without talking,
while the steps before it run.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from balancing.cluster import Cluster
from balancing.sequences.layout import SequencePlan

__all__ = ["Planned", "PlanningAhead", "zone_shares"]

_KEPT = 256  # plans; a few hundred kilobytes each at most


class Planned(NamedTuple):
    """A plan, and the milliseconds it took to make: 0 when it was known."""

    plan: SequencePlan
    milliseconds: float


class PlanningAhead:
    """Makes and remembers plans. `make`: lengths [sequence] -> plan, deterministic. Copies travel into workers."""

    def __init__(self, make: Callable[[tuple[int, ...]], SequencePlan]) -> None:
        self._make = make
        self._known: OrderedDict[tuple[int, ...], SequencePlan] = OrderedDict()

    def __call__(self, lengths: Sequence[int]) -> Planned:
        """The plan of a batch with sequences of `lengths` tokens, each at least 1."""
        key = tuple(lengths)
        if key in self._known:
            self._known.move_to_end(key)
            return Planned(self._known[key], 0.0)
        begin = time.perf_counter()
        plan = self._make(key)
        milliseconds = (time.perf_counter() - begin) * 1e3
        self._known[key] = plan
        if len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return Planned(plan, milliseconds)


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
