"""Plans of sequences that benchmarks compare: those of training, and Megatron-LM's hybrid context parallelism.

Megatron-LM's own scheduler plans the latter. It runs groups of sequences one after another, each sequence on a power of
two ranks.
"""

import importlib
from collections.abc import Callable, Sequence
from math import ceil, log2
from operator import itemgetter
from typing import Any

from balancing.cluster import Cluster
from balancing.sequences import plan
from balancing.sequences.planners.dealing import even_counts
from balancing.sequences.planners.linear_layout import linear_layout
from balancing.sequences.planners.zones import zigzag
from balancing.sequences.sequence_plan import AttentionShape, SequencePlan, same_exchange

__all__ = ["METHODS", "Scheduler", "hybrid_groups", "plan_sequences"]

METHODS = (*plan.METHODS, "hybrid")

# Takes the most tokens of a rank and an object whose size() is the number of ranks, as BalancedCPScheduler does.
Scheduler = Callable[[int, Any], Any]


def plan_sequences(
    lengths: Sequence[int],
    cluster: Cluster,
    *,
    shape: AttentionShape,
    method: str = "chunks",
    token_capacity: int | None = None,
    scheduler: Scheduler | None = None,
    **options: Any,
) -> SequencePlan:
    """As `balancing.sequences.plan_sequences`, with "hybrid" among the methods.

    token_capacity: for "hybrid" it holds for each of the groups, not for the plan; the mean by default.
    scheduler: for "hybrid", as in `hybrid_groups`, which see for errors.
    options: of the other methods.
    """
    if method != "hybrid":
        return plan.plan_sequences(
            lengths, cluster, shape=shape, method=method, token_capacity=token_capacity, **options
        )
    checked, ranks = plan.checked_lengths(lengths), cluster.world_size
    most = -(-sum(checked) // ranks) if token_capacity is None else token_capacity
    shards = [
        shard
        for group in hybrid_groups(checked, ranks, most, scheduler)
        for sequence, members in sorted(group.items())
        for shard in zigzag(sequence, members, even_counts(checked[sequence], len(members), 0))
    ]
    layout = tuple(sorted(shards, key=itemgetter(3, 0, 1)))  # by rank, sequence and start
    exchange = same_exchange(layout, checked, "ring")
    linear, made_for = linear_layout(layout, cluster), (cluster, shape)
    return SequencePlan(checked, ranks, "hybrid", layout, linear, exchange, None, None, *made_for)


def hybrid_groups(
    lengths: Sequence[int],
    ranks: int,
    max_tokens: int,
    scheduler: Scheduler | None = None,
) -> list[dict[int, tuple[int, ...]]]:
    """The groups in the order in which they run: for each sequence of a group, the ranks that share it.

    lengths: tokens of each sequence.
    ranks: of the context-parallel group.
    max_tokens: most tokens of one sequence on a rank (--max-seqlen-per-dp-cp-rank).
    scheduler: Megatron's BalancedCPScheduler or one with its interface; None takes that of the installed megatron-core.

    Raises ValueError where megatron-core or its scheduler is missing, and where the scheduler finds no plan: it handles
    powers of two only and fails on some batches.
    """
    widest = max(2 ** ceil(log2(max(1.0, length / max_tokens))) for length in lengths)
    if widest > ranks:
        raise ValueError(
            f"Megatron's scheduler wants {widest} ranks for a sequence of {max(lengths)} tokens at {max_tokens} tokens "
            f"a rank, and there are {ranks}; raise the token capacity to {_capacity(max(lengths), ranks)}"
        )
    plan = (scheduler or _installed_scheduler())(max_tokens, _Group(ranks))
    try:
        _, found = plan.get_groups_and_subsamples(list(enumerate(lengths)), None)
    except Exception as error:  # its own asserts, and indices out of range
        raise ValueError(
            f"Megatron's scheduler fails on {len(lengths)} sequences over {ranks} ranks ({type(error).__name__}: "
            f"{error}); take another method, for instance chunks"
        ) from error
    groups = []
    for by_rank in found:
        group: dict[int, tuple[int, ...]] = {}
        for rank, sequences in enumerate(by_rank):
            for sequence in sequences:
                group[sequence] = (*group.get(sequence, ()), rank)
        groups.append(group)
    if sorted(sequence for group in groups for sequence in group) != list(range(len(lengths))):
        raise ValueError(f"Megatron's scheduler lost some of {len(lengths)} sequences; take another method")
    return groups


class _Group:
    """The part of a process group that the scheduler uses."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def size(self) -> int:
        return self._ranks


def _capacity(length: int, ranks: int) -> int:
    return ceil(length / 2 ** int(log2(ranks)))


def _installed_scheduler() -> Scheduler:
    name = "megatron.core.pipeline_parallel.hybrid_cp_schedule"
    try:
        return importlib.import_module(name).BalancedCPScheduler
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"method hybrid needs megatron-core with {name}.BalancedCPScheduler, which does not import: {error}; "
            "install megatron-core, or take another method"
        ) from error
