"""Which ranks share micro-batches: the context-parallel ranks of one data-parallel rank, or of all.

Alone, a data-parallel rank whose samples have the longest documents keeps the others waiting: at the reduction of
gradients once a step, and where experts exchange tokens in every micro-batch. Ranks that share their micro-batches are
level, but keys and values of the same documents go to more ranks, on more nodes. Both are in the costs of plans
(`cost`), so both domains are planned for a few micro-batches of the training set, and the quicker one is taken.
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

# Least share of a step to save by the wider domain, whose exchange crosses more links than the model was checked on.
WORTH = 0.02
_PLANNED = {"context": 8, "data": 2}  # micro-batches
_MOST_RANKS = 512  # of a group that is planned; a wider one has the same exchange on each rank
_TRIALS = 200  # steps drawn, whose slowest rank is looked for
_MOST_DRAWN = 1_000_000  # numbers in all trials together


@dataclass(frozen=True)
class DrawnSteps:
    """Steps as Megatron-LM draws them.

    samples: [sample], lengths of the documents of samples of the training set, drawn at random.
    micro_batch_size: samples in a micro-batch of one data-parallel rank.
    micro_batches: of a step, on each data-parallel rank.
    waiting: data-parallel ranks that wait for each other in every micro-batch, those of an expert-parallel group.

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
    """The domain to take, and modelled seconds of the micro-batches of a step in each, on the slowest rank, without
    gradients and pipeline."""

    domain: str
    context_seconds: float
    data_seconds: float


def choose_domain(
    steps: DrawnSteps, context: Cluster, domain: Cluster, *, shape: AttentionShape, method: str = "chunks"
) -> DomainChoice:
    """The domain "context" or "data" for a job, the same for the same arguments.

    steps: of the job.
    context: the context-parallel ranks of one data-parallel rank.
    domain: the same of all data-parallel ranks, a multiple of them.
    shape: the model.
    method: of `plan_sequences`.

    Raises ValueError for a domain that is no multiple of the context-parallel ranks.
    """
    samples, micro_batches = steps.samples, steps.micro_batches
    data_ranks, left = divmod(domain.world_size, context.world_size)
    if left:
        raise ValueError(f"{domain.world_size} ranks are no multiple of {context.world_size} context-parallel ranks")
    generator = np.random.default_rng(0)
    alone = np.array([document_seconds(sample, context, shape).sum() for sample in samples])

    def beside_work(cluster: Cluster, batches: int) -> tuple[float, float]:
        """Means of planned micro-batches: the device's seconds beyond those of the same work, level and without
        exchange; the host's."""
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
    if planned % nodes:  # as `cluster_of` of a run has it
        nodes = 1
    narrow = domain.relabel(nodes, planned // nodes)

    def of_step(cluster: Cluster, batches: int, work: float) -> float:
        device, host = beside_work(cluster, batches)
        return max(work + micro_batches * device, micro_batches * host)

    groups = max(1, data_ranks // steps.waiting)
    size = groups, micro_batches, min(steps.waiting, data_ranks), steps.micro_batch_size
    trials = max(1, min(_TRIALS, _MOST_DRAWN // int(np.prod(size))))
    slowest = np.mean([generator.choice(alone, size).sum(3).max(2).sum(1).max() for _ in range(trials)])
    context_seconds = of_step(context, _PLANNED["context"], float(slowest))
    data_seconds = of_step(narrow, _PLANNED["data"], float(alone.mean()) * steps.micro_batch_size * micro_batches)
    worth = data_seconds <= (1 - WORTH) * context_seconds
    return DomainChoice("data" if worth else "context", context_seconds, data_seconds)


def planned_ranks(data_ranks: int, context: int, per_node: int, most: int) -> int:
    """Ranks of a domain that are planned for its cost: those of a group, and of a large one about `most`, whole nodes
    and whole context-parallel groups.

    data_ranks: data-parallel ranks of the domain.
    context: context-parallel ranks of each.
    per_node: ranks of the domain on a node.
    """
    ranks, unit = data_ranks // number_of_groups(data_ranks) * context, math.lcm(per_node, context)
    return min(ranks, max(unit, most // unit * unit))
