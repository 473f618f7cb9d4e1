"""Plans of sequences: the rank of each token, from the lengths of a batch.

A plan depends only on the lengths, the cluster and the model's shape, so every rank makes the same plan without
communication. A data loader's worker can make it before the step that needs it, and compile it (`PlanCache`).
"""

import difflib
import numbers
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from balancing.cluster import Cluster
from balancing.kernels.pairs import token_counts
from balancing.sequences.planners.chunks import plan_chunks
from balancing.sequences.planners.minimal_reshard import shed_tails
from balancing.sequences.planners.problem import Problem, quickest
from balancing.sequences.planners.zones import even_layout, plan_zones
from balancing.sequences.sequence_plan import AttentionShape, SequencePlan, Shard

__all__ = [
    "DEFAULT_CHUNK",
    "METHODS",
    "PLANNERS",
    "PlanCache",
    "Planned",
    "Planner",
    "plan_attention",
    "plan_sequences",
    "zone_shares",
]

DEFAULT_CHUNK = 512
_KEPT = 64  # plans, mostly below a megabyte each; a few megabytes where many ranks gather


class Planner(Protocol):
    def __call__(self, problem: Problem) -> SequencePlan:
        """The plan, as `Problem.plan` makes it from a layout. Pure: all ranks get the same."""


PLANNERS: dict[str, Planner] = {
    "chunks": plan_chunks,
    "zones": plan_zones,
    "ring": lambda problem: problem.plan(even_layout(problem), "ring"),
    "gather": lambda problem: problem.plan(even_layout(problem), "gather"),
}
METHODS = tuple(PLANNERS)


def plan_sequences(
    lengths: Sequence[int] | np.ndarray,
    cluster: Cluster,
    *,
    shape: AttentionShape,
    method: str = "chunks",
    token_capacity: int | None = None,
    chunk: int | None = None,
) -> SequencePlan:
    """The rank of every token of a batch, in attention and in linear layers.

    lengths: tokens of each sequence, at least one.
    cluster: the ranks to plan for, usually those of a context-parallel group.
    shape: the model, for costs.
    method: see below.
    token_capacity: most tokens of a rank in attention; None for no limit.
    chunk: granularity at which "chunks" cuts long sequences, in tokens; 512 by default, less where balance needs it.

    Methods:
    - "chunks": one layout for attention and linear layers, balanced in tokens and in area. The area is that of layers
      that see all tokens. With measured rates (`Cluster.rates`) time is balanced in place of
      area. Keys and values of a cut sequence are gathered, once a node.
    - "zones": Zeppelin's. Attention is balanced in area, and tokens are remapped for linear layers. Without a capacity
      a rank holds at most 1.5 times the mean in attention. If sequences do not pack into the capacity, every sequence
      is cut over all ranks.
    - "ring", "gather": every sequence is cut over all ranks.

    With every method the ranks' tokens in linear layers differ by at most one. With fewer tokens than ranks some ranks
    are empty. On one rank everything is local.

    Raises ValueError for an unknown method, no lengths, lengths below 1, more than `MOST_TOKENS` tokens, a chunk
    below 1, and a capacity below 1, below the mean or too small for the longest sequence over all ranks.
    """
    if method not in PLANNERS:
        close = difflib.get_close_matches(method, PLANNERS, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"unknown method {method!r}{hint}; known: {', '.join(PLANNERS)}")
    checked = checked_lengths(lengths)
    ranks = cluster.world_size
    if token_capacity is not None:
        _check_capacity(token_capacity, checked, ranks)
    chunk = DEFAULT_CHUNK if chunk is None else chunk
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1 token")
    problem = Problem(checked, cluster, shape, method, token_capacity, chunk)
    if ranks == 1:
        return problem.plan((Shard(sequence, 0, length, 0) for sequence, length in enumerate(checked)), "local")
    return PLANNERS[method](problem)


def plan_attention(
    lengths: Sequence[int] | np.ndarray,
    linear: Sequence[Shard],
    cluster: Cluster,
    *,
    shape: AttentionShape,
    method: str = "chunks",
) -> SequencePlan:
    """The rank of every token of a batch in attention, for a given layout of linear layers.

    linear: the given layout; a rank's tokens are in the order of its shards.
    lengths, cluster, shape: as in `plan_sequences`.
    method: of `plan_sequences`. With "chunks" the result is the cheapest of three plans by `cost.step_cost`: the plan
        of "chunks", the given layout ("given"), and the balanced layout nearest to it ("stay",
        `planners.minimal_reshard`).

    Raises ValueError for a layout that does not hold every token once, and where `plan_sequences` does.
    """
    checked, given = checked_lengths(lengths), tuple(linear)
    plans = [replace(plan_sequences(checked, cluster, shape=shape, method=method), linear=given)]
    if method == "chunks":
        for name, shards in (("given", given), ("stay", shed_tails(given, checked, cluster))):
            plan = Problem(checked, cluster, shape, name, None, DEFAULT_CHUNK).plan(shards, "gather")
            plans.append(replace(plan, linear=given))
    return quickest(plans, cluster, shape)


class Planned(NamedTuple):
    """A plan, its compiled program for one rank, and the milliseconds that both took to make: 0 if they were kept."""

    plan: SequencePlan
    program: Any
    milliseconds: float


class PlanCache:
    """Makes plans and programs, and keeps the latest 64. It is pickled into the workers of a data loader, which use it
    while earlier steps run.

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


def checked_lengths(lengths: Sequence[int] | np.ndarray) -> tuple[int, ...]:
    values = lengths.tolist() if isinstance(lengths, np.ndarray) else list(lengths)
    if not values:
        raise ValueError("no sequences to plan; give at least one length")
    for sequence, length in enumerate(values):
        if isinstance(length, bool) or not isinstance(length, numbers.Integral) or length < 1:
            raise ValueError(
                f"sequence {sequence} has length {length!r}; lengths are whole numbers of at least 1 token; leave "
                "empty sequences out"
            )
    checked = tuple(int(length) for length in values)
    token_counts(checked)
    return checked


def _check_capacity(capacity: int, lengths: Sequence[int], ranks: int) -> None:
    if capacity < 1:
        raise ValueError(f"token_capacity={capacity} must be at least 1 token")
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    if lengths[longest] > capacity * ranks:
        raise ValueError(
            f"sequence {longest} has {lengths[longest]} tokens, more than all {ranks} ranks hold at token_capacity="
            f"{capacity} ({capacity * ranks}); it takes {-(-lengths[longest] // ranks)} for this sequence, "
            f"{-(-sum(lengths) // ranks)} for the batch, or more ranks"
        )
    if sum(lengths) > capacity * ranks:
        raise ValueError(
            f"token_capacity={capacity} is below the mean: {sum(lengths)} tokens on {ranks} ranks take "
            f"{-(-sum(lengths) // ranks)} each; raise it, use more ranks, or put fewer sequences into the batch"
        )
