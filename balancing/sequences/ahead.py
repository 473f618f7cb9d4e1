"""Plans and programs made in a data loader's worker, ahead of the step that needs them.

A plan depends only on the lengths of a batch, so every rank that reads the batch makes the same plan without
communication, while earlier steps run. The worker also compiles the plan for its rank, since with routes between many
nodes compiling takes longer than planning.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from balancing.cluster import Cluster
from balancing.sequences.sequence_plan import SequencePlan

__all__ = ["Planned", "PlanningAhead", "zone_shares"]

_KEPT = 64  # plans, mostly below a megabyte each; a few megabytes where many ranks gather


class Planned(NamedTuple):
    """A plan, its compiled program for one rank, and the milliseconds that both took to make: 0 if they were kept."""

    plan: SequencePlan
    program: Any
    milliseconds: float


class PlanningAhead:
    """Makes plans and programs and keeps the latest 64. It is pickled into the workers of a data loader.

    plan: makes a plan from lengths [sequence], deterministically.
    compile: makes this rank's program from a plan, or a program for each kind of layers. Its result can be pickled.
    """

    def __init__(
        self,
        plan: Callable[[tuple[int, ...]], SequencePlan],
        compile: Callable[[SequencePlan], Any],
    ) -> None:
        self._plan, self._compile = plan, compile
        self._known: OrderedDict[tuple[int, ...], tuple[SequencePlan, Any]] = OrderedDict()

    def __call__(self, lengths: Sequence[int]) -> Planned:
        """The plan and program of a batch. lengths: tokens of each sequence, at least 1."""
        key, begin = tuple(lengths), time.perf_counter()
        if key not in self._known:
            plan = self._plan(key)
            self._known[key] = plan, self._compile(plan)
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
            return Planned(*self._known[key], (time.perf_counter() - begin) * 1e3)
        self._known.move_to_end(key)
        return Planned(*self._known[key], 0.0)


def zone_shares(plans: Sequence[SequencePlan], cluster: Cluster) -> dict[str, float]:
    """Shares, from 0 to 1, of all tokens by where their sequence lies.

    Keys: "local_share" (one rank), "intra_node_share" (ranks of one node), "inter_node_share" (several nodes).
    """
    tokens = dict.fromkeys(("local", "intra_node", "inter_node"), 0)
    for plan in plans:
        for sequence, length in enumerate(plan.lengths):
            ranks = plan.ring(sequence)
            nodes = {cluster.node(rank) for rank in ranks}
            tokens["inter_node" if len(nodes) > 1 else "intra_node" if len(ranks) > 1 else "local"] += length
    total = max(sum(tokens.values()), 1)
    return {f"{zone}_share": number / total for zone, number in tokens.items()}
