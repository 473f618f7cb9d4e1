"""Layouts of other systems, as baselines.

- ring: every sequence is cut zig-zag over all ranks, and keys and values go round, as in Transformer Engine's p2p
  context parallelism. gather: the same layout, but ranks gather keys and values, as Llama 3 does with an all-gather
  (arXiv 2407.21783, section 3.3.2; it cuts the whole pack rather than each document, which is less balanced).
- hybrid: Megatron-LM's hybrid context parallelism, planned by its own scheduler. It runs groups of sequences one after
  another, each sequence on a power of two ranks.
"""

import importlib
from collections.abc import Callable, Sequence
from math import ceil, log2
from typing import Any

from balancing.sequences.planners.zigzag import even_counts, zigzag
from balancing.sequences.sequence_plan import Shard

__all__ = ["Scheduler", "even_layout", "hybrid_groups", "hybrid_layout"]

# Takes the most tokens of a rank and an object whose size() is the number of ranks, as BalancedCPScheduler does.
Scheduler = Callable[[int, Any], Any]


def even_layout(lengths: Sequence[int], ranks: int) -> list[Shard]:
    """Every sequence over all ranks. Remainders go to ranks in turn, so that ranks differ by one token at most."""
    shards: list[Shard] = []
    first, members = 0, range(ranks)
    for sequence in sorted(range(len(lengths)), key=lambda sequence: (-lengths[sequence], sequence)):
        shards += zigzag(sequence, members, even_counts(lengths[sequence], ranks, first))
        first = (first + lengths[sequence]) % ranks
    return shards


def hybrid_layout(
    lengths: Sequence[int], ranks: int, max_tokens: int, scheduler: Scheduler | None = None
) -> list[Shard]:
    """All groups of `hybrid_groups` in one layout; raises what that raises."""
    shards: list[Shard] = []
    for group in hybrid_groups(lengths, ranks, max_tokens, scheduler):
        for sequence, members in sorted(group.items()):
            shards += zigzag(sequence, members, even_counts(lengths[sequence], len(members), 0))
    return shards


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
