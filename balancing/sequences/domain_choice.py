"""Choice of the domain, the ranks that share micro-batches: context-parallel ranks of one data-parallel rank or of all.

With domain "context", the data-parallel rank with the longest documents keeps the others waiting: once a step at the
reduction of gradients, and in every micro-batch at the all-to-all of experts. With domain "data" all ranks are
balanced, but keys and values of a document go to more ranks, on more nodes. The cost model (`cost`) has both effects,
so both domains are planned for a few micro-batches of the training set, and the quicker domain is taken.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from balancing.cluster import Cluster
from balancing.sequences.cost import step_cost
from balancing.sequences.micro_batches import document_seconds
from balancing.sequences.plan import plan_sequences
from balancing.sequences.planners.groups import number_of_groups
from balancing.sequences.sequence_plan import AttentionShape

__all__ = ["WORTH", "DomainChoice", "DrawnSteps", "choose_domain", "planned_ranks"]

# Least share of a step that domain "data" must save: its exchange crosses more links than the model was checked on.
WORTH = 0.02
_PLANNED = {"context": 8, "data": 2}  # micro-batches
_MOST_RANKS = 512  # that are planned; each rank of a wider group has the same exchange
_TRIALS = 200  # steps drawn to find the mean time of the slowest rank
_MOST_DRAWN = 1_000_000  # samples in all trials together


@dataclass(frozen=True)
class DrawnSteps:
    """Steps as Megatron-LM draws them.

    samples: [sample], document lengths in tokens of random samples of the training set.
    micro_batch_size: samples in a micro-batch of one data-parallel rank.
    micro_batches: number of micro-batches of a step, on each data-parallel rank.
    waiting: data-parallel ranks of one expert-parallel group, which wait for each other in every micro-batch.

    Raises ValueError for no samples.
    """

    samples: Sequence[Sequence[int]]
    micro_batch_size: int = 1
    micro_batches: int = 1
    waiting: int = 1

    def __post_init__(self) -> None:
        if not self.samples:
            raise ValueError("no samples to choose a domain by; give the lengths of at least one")


@dataclass(frozen=True)
class DomainChoice:
    """The domain to take, and the modelled seconds of a step with either domain.

    The seconds are those of all micro-batches on the slowest rank, without gradient reduction and pipeline.
    """

    domain: str
    context_seconds: float
    data_seconds: float


def choose_domain(
    steps: DrawnSteps, context: Cluster, domain: Cluster, *, shape: AttentionShape, method: str = "chunks"
) -> DomainChoice:
    """The domain "context" or "data" for a job; deterministic.

    steps: number of steps of the job.
    context: the context-parallel ranks of one data-parallel rank.
    domain: the context-parallel ranks of all data-parallel ranks.
    shape: the model.
    method: of `plan_sequences`.

    Raises ValueError if the ranks of `domain` are not a multiple of those of `context`.
    """
    samples, micro_batches = steps.samples, steps.micro_batches
    data_ranks, left = divmod(domain.world_size, context.world_size)
    if left:
        raise ValueError(f"{domain.world_size} ranks are no multiple of {context.world_size} context-parallel ranks")
    generator = np.random.default_rng(0)
    alone = np.array([document_seconds(sample, context, shape).sum() for sample in samples])

    def beside_work(cluster: Cluster, batches: int) -> tuple[float, float]:
        """Mean seconds of planned micro-batches: of the device beyond the same work perfectly balanced and without
        exchange, and of the host."""
        ranks = cluster.world_size // context.world_size
        drawn = generator.integers(len(samples), size=(batches, ranks * steps.micro_batch_size))
        device = host = 0.0
        for batch in drawn:
            lengths = [length for number in batch for length in samples[number]]
            cost = step_cost(plan_sequences(lengths, cluster, shape=shape, method=method), cluster, shape)
            device, host = device + cost.device, host + cost.host
        return (device - float(alone[drawn].sum() / ranks)) / batches, host / batches

    planned = planned_ranks(data_ranks, context.world_size, domain.ranks_per_node, _MOST_RANKS)
    nodes = -(-planned // domain.ranks_per_node)
    if planned % nodes:  # as `cluster_of` does in a run
        nodes = 1
    narrow = domain.relabel(nodes, planned // nodes)

    def step_seconds(cluster: Cluster, batches: int, work: float) -> float:
        device, host = beside_work(cluster, batches)
        return max(work + micro_batches * device, micro_batches * host)

    groups = max(1, data_ranks // steps.waiting)
    size = groups, micro_batches, min(steps.waiting, data_ranks), steps.micro_batch_size
    trials = max(1, min(_TRIALS, _MOST_DRAWN // int(np.prod(size))))
    slowest = np.mean([generator.choice(alone, size).sum(3).max(2).sum(1).max() for _ in range(trials)])
    context_seconds = step_seconds(context, _PLANNED["context"], float(slowest))
    data_seconds = step_seconds(narrow, _PLANNED["data"], float(alone.mean()) * steps.micro_batch_size * micro_batches)
    worth = data_seconds <= (1 - WORTH) * context_seconds
    return DomainChoice("data" if worth else "context", context_seconds, data_seconds)


def planned_ranks(data_ranks: int, context: int, per_node: int, most: int) -> int:
    """Number of ranks of a domain to plan for its cost: one group of the domain (`planners.groups`), at most about
    `most` ranks, in whole nodes and whole context-parallel groups.

    data_ranks: data-parallel ranks of the domain.
    context: context-parallel ranks of each data-parallel rank.
    per_node: ranks of the domain on a node.
    """
    ranks, unit = data_ranks // number_of_groups(data_ranks) * context, math.lcm(per_node, context)
    return min(ranks, max(unit, most // unit * unit))
