"""Plans of sequences: the rank of each token, from the lengths of a batch.

A plan follows from the lengths, the cluster and the model's shape alone, so every rank makes the same one without
communication. It can also be made ahead, in a data loader's worker (`balancing.sequences.ahead`).
"""

import difflib
import numbers
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Literal, get_args

import numpy as np

from balancing.cluster import Cluster
from balancing.sequences.cost import step_cost
from balancing.sequences.planners.chunks import balanced_chunks
from balancing.sequences.planners.kv_exchange import choose_exchange
from balancing.sequences.planners.linear_layout import linear_layout
from balancing.sequences.planners.stay import shed_tails
from balancing.sequences.planners.zones import even_counts, even_layout, zone_layout
from balancing.sequences.sequence_plan import AttentionShape, SequencePlan, Shard, same_exchange

__all__ = ["DEFAULT_CHUNK", "METHODS", "Method", "plan_attention", "plan_sequences"]

Method = Literal["auto", "chunks", "zones", "ring", "gather"]
METHODS: tuple[str, ...] = get_args(Method)
DEFAULT_CHUNK = 512

# Most tokens of a rank in attention over the mean, for zones without a capacity.
_ZONES_ROOM = 1.5
# Of plans whose cost is within 2 % of the best, auto takes one with few launches a layer, forward: what the model does
# not know, the driver and other processes on the host, costs them less.
_AS_GOOD, _MANY_LAUNCHES = 1.02, 40
# Most shards of ring and gather that auto considers: a ring over all ranks pays for few, long sequences only.
_MOST_RING_SHARDS = 2048


def plan_sequences(
    lengths: Sequence[int] | np.ndarray,
    cluster: Cluster,
    *,
    shape: AttentionShape,
    method: str = "auto",
    token_capacity: int | None = None,
    chunk: int | None = None,
    routed: bool | None = None,
) -> SequencePlan:
    """The rank of every token of a batch, in attention and in linear layers.

    lengths: tokens of each sequence, at least one.
    cluster: the ranks to plan for, usually those of a context-parallel group.
    shape: the model, for costs.
    method: see below.
    token_capacity: most tokens of a rank in attention; None for no limit.
    chunk: granularity at which "chunks" cuts long sequences, in tokens; 512 by default, less where balance needs it.
    routed: for costs, whether what leaves a node is spread over its NICs; None for whichever is quicker.

    Methods:
    - "chunks": one layout, balanced in tokens and in area, that of layers without a window. Keys and values of a cut
      sequence are gathered, or go round a ring between nodes where gathering is not hidden and takes longer.
    - "zones": Zeppelin's, balanced in area, with tokens remapped for linear layers. Without a capacity a rank holds at
      most 1.5 times the mean in attention. If sequences do not pack into a tight capacity, all are cut over all ranks.
    - "ring", "gather": every sequence over all ranks.
    - "auto": the cheapest of chunks, zones and, for few sequences, ring and gather, by `cost.step_cost`, or one within
      2 % of it if that has at most 40 launches a layer. Planning takes as long as all of them together; in training a
      data loader's worker does it ahead of the step.

    Every method gives linear layers the same number of tokens on every rank, up to one. With fewer tokens than ranks
    some ranks are empty. On one rank everything is local.

    Raises ValueError for an unknown method, no lengths, lengths below 1, a capacity below 1, below the mean or too
    small for the longest sequence over all ranks, and a chunk below 1.
    """
    if method not in METHODS:
        close = difflib.get_close_matches(method, METHODS, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"unknown method {method!r}{hint}; known: {', '.join(METHODS)}")
    checked = checked_lengths(lengths)
    ranks = cluster.world_size
    if token_capacity is not None:
        _check_capacity(token_capacity, checked, ranks)
    chunk = DEFAULT_CHUNK if chunk is None else chunk
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1 token")
    if ranks == 1:
        whole = tuple(Shard(sequence, 0, length, 0) for sequence, length in enumerate(checked))
        name = "chunks" if method == "auto" else method
        return SequencePlan(checked, 1, name, whole, whole, same_exchange(whole, checked, "gather"), token_capacity)
    planner = _Planner(checked, cluster, shape, token_capacity, chunk, routed)
    return planner.auto() if method == "auto" else planner.plan(method)


def plan_attention(
    lengths: Sequence[int] | np.ndarray,
    linear: Sequence[Shard],
    cluster: Cluster,
    *,
    shape: AttentionShape,
    method: str = "auto",
) -> SequencePlan:
    """The rank of every token of a batch in attention alone, where linear layers have a given layout.

    linear: that layout; a rank's tokens are in the order of its shards.
    lengths, cluster, shape: as in `plan_sequences`.
    method: one of `plan_sequences`, or "auto": by `cost.step_cost` the cheapest of its plan, of the given layout
        ("given"), and of the nearest to that which is balanced ("stay", `planners.stay`).

    Raises ValueError for a layout that does not hold every token once, and where `plan_sequences` does.
    """
    checked, given = checked_lengths(lengths), tuple(linear)
    plans = [replace(plan_sequences(checked, cluster, shape=shape, method=method), linear=given)]
    if method == "auto":
        for name, shards in (("given", given), ("stay", shed_tails(given, checked, cluster))):
            layout = tuple(sorted(shards, key=itemgetter(3, 0, 1)))
            exchange = choose_exchange(layout, checked, cluster, shape)
            plans.append(SequencePlan(checked, cluster.world_size, name, layout, given, exchange))
    return min(plans, key=lambda plan: step_cost(plan, cluster, shape).total)


class _Planner:
    """Plans one batch by any method."""

    def __init__(
        self,
        lengths: tuple[int, ...],
        cluster: Cluster,
        shape: AttentionShape,
        capacity: int | None,
        chunk: int,
        routed: bool | None,
    ) -> None:
        self.lengths, self.cluster, self.shape = lengths, cluster, shape
        self.capacity, self.chunk, self.routed = capacity, chunk, routed
        self.quotas = even_counts(sum(lengths), cluster.world_size, 0)

    def auto(self) -> SequencePlan:
        methods = ["chunks", "zones"]
        if 2 * len(self.lengths) * self.cluster.world_size <= _MOST_RING_SHARDS:
            methods += ["gather", "ring"]
        plans = [self.plan(method) for method in methods]
        costs = [step_cost(plan, self.cluster, self.shape, routed=self.routed) for plan in plans]
        good = _AS_GOOD * min(cost.total for cost in costs)

        def order(at: int) -> tuple[bool, float]:
            return costs[at].launches > _MANY_LAUNCHES, costs[at].total

        return plans[min((at for at, cost in enumerate(costs) if cost.total <= good), key=order)]

    def plan(self, method: str) -> SequencePlan:
        ranks, capacity = self.cluster.world_size, self.capacity
        if method == "chunks":
            attention = balanced_chunks(self.lengths, self.quotas, self.cluster, chunk=self.chunk)
        elif method == "zones":
            room = int(max(self.quotas) * _ZONES_ROOM) if capacity is None else capacity
            zones = zone_layout(self.lengths, self.cluster, self.shape, room)
            attention = even_layout(self.lengths, ranks) if zones is None else zones
        else:
            attention = even_layout(self.lengths, ranks)
        layout = tuple(sorted(attention, key=itemgetter(3, 0, 1)))  # by rank, sequence and start
        linear = layout
        if method == "zones":
            linear = linear_layout(layout, self.cluster)
        if method == "chunks":
            exchange = choose_exchange(layout, self.lengths, self.cluster, self.shape, routed=self.routed)
        else:
            exchange = same_exchange(layout, self.lengths, "gather" if method == "gather" else "ring")
        return SequencePlan(self.lengths, ranks, method, layout, linear, exchange, capacity)


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
    return tuple(int(length) for length in values)


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
