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
from operator import itemgetter
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from balancing.cluster import Cluster
from balancing.kernels.pairs import token_counts
from balancing.sequences.cost import extra_pairs, step_cost
from balancing.sequences.planners.chunks import balanced_chunks, dealt_again
from balancing.sequences.planners.dealing import even_counts
from balancing.sequences.planners.linear_layout import linear_layout
from balancing.sequences.planners.minimal_reshard import shed_tails
from balancing.sequences.planners.zones import even_layout, zone_layout
from balancing.sequences.sequence_plan import (
    AttentionShape,
    KVExchange,
    SequencePlan,
    Shard,
    same_exchange,
)

__all__ = [
    "DEFAULT_CHUNK",
    "METHODS",
    "Method",
    "PlanCache",
    "Planned",
    "plan_attention",
    "plan_sequences",
    "zone_shares",
]

Method = Literal["chunks", "zones", "ring", "gather"]
METHODS: tuple[str, ...] = get_args(Method)
DEFAULT_CHUNK = 512
_KEPT = 64  # plans, mostly below a megabyte each; a few megabytes where many ranks gather

# Of method "zones" without a capacity: the most tokens of a rank in attention over the mean.
_ZONES_ROOM = 1.5
# Of method "chunks" with measured rates. _TRIES: most times that tokens are distributed over the ranks of a node again;
# once with _EVENED_RANKS ranks and never with more, since each takes as long as half a plan. _EVEN: ranks may differ
# from the mean time by this share of it. _MOST_EXTRA: most area, over the mean, that a rank gives up for its rows and
# pieces.
_TRIES, _EVENED_RANKS, _EVEN, _MOST_EXTRA = 2, 64, 0.01, 0.25


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
        local = same_exchange(whole, checked, "gather")
        return SequencePlan(checked, 1, method, whole, whole, local, token_capacity, None, cluster, shape)
    return _plan(checked, cluster, shape, method, token_capacity, chunk)


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
            layout = tuple(sorted(shards, key=itemgetter(3, 0, 1)))
            exchange = same_exchange(layout, checked, "gather")
            plans.append(replace(plans[0], method=name, attention=layout, exchange=exchange))
    return _quickest(plans, cluster, shape)


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


def _plan(
    lengths: tuple[int, ...], cluster: Cluster, shape: AttentionShape, method: str, capacity: int | None, chunk: int
) -> SequencePlan:
    """As `plan_sequences`, of checked arguments."""
    ranks = cluster.world_size
    quotas = even_counts(sum(lengths), ranks, 0)
    if method == "chunks":
        layouts = balanced_chunks(lengths, quotas, cluster, shape, chunk=chunk)
    elif method == "zones":
        room = int(max(quotas) * _ZONES_ROOM) if capacity is None else capacity
        layouts = [zone_layout(lengths, cluster, shape, room) or even_layout(lengths, ranks)]
    else:
        layouts = [even_layout(lengths, ranks)]
    shared: KVExchange = "gather" if method in ("chunks", "gather") else "ring"
    plans = []
    for shards in layouts:
        layout = tuple(sorted(shards, key=itemgetter(3, 0, 1)))  # by rank, sequence and start
        linear = linear_layout(layout, cluster) if method == "zones" else layout
        exchange = same_exchange(layout, lengths, shared)
        plans.append(SequencePlan(lengths, ranks, method, layout, linear, exchange, capacity, None, cluster, shape))
    best = _quickest(plans, cluster, shape)
    return best if method != "chunks" or cluster.rates is None else _evened_in_time(best, quotas, cluster, shape, chunk)


def _evened_in_time(
    plan: SequencePlan, quotas: Sequence[int], cluster: Cluster, shape: AttentionShape, chunk: int
) -> SequencePlan:
    """A plan with as many tokens on each rank and more even seconds of attention, if one is found that is quicker."""
    tried = [plan]
    for _ in range(min(_TRIES, _EVENED_RANKS // plan.ranks)):
        extra = extra_pairs(plan, cluster, shape)
        seconds = plan.area + extra  # in units of a pair
        if seconds.max() <= (1 + _EVEN) * seconds.mean():
            break
        most = _MOST_EXTRA * float(plan.area.mean())
        beside = np.clip(extra - extra.mean(), -most, most).tolist()
        shards = dealt_again(plan.attention, quotas, cluster, beside, chunk=chunk)
        layout = tuple(sorted(shards, key=itemgetter(3, 0, 1)))
        exchange = same_exchange(layout, plan.lengths, "gather")
        plan = replace(plan, attention=layout, linear=layout, exchange=exchange)
        tried.append(plan)
    return _quickest(tried, cluster, shape)


def _quickest(plans: Sequence[SequencePlan], cluster: Cluster, shape: AttentionShape) -> SequencePlan:
    """The plan of least cost, the first among equals. With measured rates, the host may take longest in all of them;
    then the one that takes the device least."""

    def cost(plan: SequencePlan) -> tuple[float, float]:
        seconds = step_cost(plan, cluster, shape)
        return seconds.total, seconds.device if cluster.rates is not None else 0.0

    return min(plans, key=cost) if len(plans) > 1 else plans[0]


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
