"""The problem that planners of sequences solve."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from balancing.cluster import Cluster
from balancing.sequences.cost import step_cost
from balancing.sequences.planners.dealing import even_counts
from balancing.sequences.planners.linear_layout import linear_layout
from balancing.sequences.sequence_plan import AttentionShape, KVExchange, SequencePlan, Shard, same_exchange

__all__ = ["Problem", "quickest"]


@dataclass(frozen=True)
class Problem:
    """A batch to plan, checked. Its fields are those of `plan_sequences`."""

    lengths: tuple[int, ...]
    cluster: Cluster
    shape: AttentionShape
    method: str
    capacity: int | None
    chunk: int

    @property
    def quotas(self) -> list[int]:
        """Tokens of each rank, [rank], as equal as they can be."""
        return even_counts(sum(self.lengths), self.cluster.world_size, 0)

    def plan(self, shards: Iterable[Shard], shared: KVExchange, *, remaps: bool = False) -> SequencePlan:
        """The plan with this layout of attention.

        shared: how keys and values of cut sequences are exchanged.
        remaps: whether tokens move for linear layers, which otherwise have the same layout.
        """
        layout = tuple(sorted(shards, key=itemgetter(3, 0, 1)))  # by rank, sequence and start
        exchange, cluster = same_exchange(layout, self.lengths, shared), self.cluster
        linear, ranks = linear_layout(layout, cluster) if remaps else layout, cluster.world_size
        made_for = self.capacity, None, cluster, self.shape
        return SequencePlan(self.lengths, ranks, self.method, layout, linear, exchange, *made_for)


def quickest(plans: Sequence[SequencePlan], cluster: Cluster, shape: AttentionShape) -> SequencePlan:
    """The plan of least cost, the first among equals. With measured rates, the host may take longest in all of them;
    then the one that takes the device least."""

    def cost(plan: SequencePlan) -> tuple[float, float]:
        seconds = step_cost(plan, cluster, shape)
        return seconds.total, seconds.device if cluster.rates is not None else 0.0

    return min(plans, key=cost) if len(plans) > 1 else plans[0]
