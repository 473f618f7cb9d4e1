"""What other systems move: collectives over all ranks, which no plan of ours describes, and their modelled seconds.

- All-gather (Llama 3, Megatron-LM's `--cp-comm-type all_gather`): all keys and values to all ranks before attention,
  in either pass, and a reduce-scatter of their gradients; exposed, as Transformer Engine says it is. By NCCL's rings,
  or in two levels, where a key enters a node once, over all of its network cards, and is copied inside.
- a2a+p2p (Transformer Engine's hierarchical context parallelism, `--cp-comm-type a2a+p2p`): ranks of a node exchange
  tokens for heads, act as one rank of a ring between such groups, and exchange back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from balancing.cluster import Cluster
from balancing.sequences import AttentionShape, SequencePlan, plan_sequences, step_cost
from balancing.sequences.cost import attention_seconds, kv_bytes, linear_seconds, tile_area

__all__ = ["HeadsAndRing", "all_gather_seconds", "heads_and_ring"]


def all_gather_seconds(
    lengths: Sequence[int], cluster: Cluster, shape: AttentionShape, plan: SequencePlan, *, two_level: bool = True
) -> float:
    """Seconds of a step. NCCL's rings carry all tokens but a rank's over each cut between nodes; in two levels a node
    receives what it does not hold. plan: the layout, every document over all ranks."""
    ranks, nodes = cluster.world_size, cluster.nodes
    entering = sum(lengths) * ((nodes - 1) / nodes if two_level else (ranks - 1) / ranks)
    network = entering / (cluster.nics_per_node * cluster.nic_bandwidth) if nodes > 1 else 0.0
    inside = sum(lengths) * (ranks - 1) / ranks / cluster.intra_node_bandwidth
    seconds = max(network, inside) * kv_bytes(shape)
    whole = replace(plan, exchange=tuple("gather" if exchange == "ring" else exchange for exchange in plan.exchange))
    compute = attention_seconds(float(tile_area(whole).max()), cluster, shape)
    return compute + linear_seconds(int(plan.linear_tokens.max()), cluster, shape) + shape.layers * 3 * seconds


@dataclass(frozen=True)
class HeadsAndRing:
    """A batch under a2a+p2p.

    together: ranks that exchange heads: those of a node, or as many as there are key-value heads.
    cluster: whose ranks are these groups, each as fast as its ranks together.
    plan: the ring between them.
    exchange: seconds in which a step's layers exchange tokens for heads and back.
    """

    together: int
    cluster: Cluster
    plan: SequencePlan
    exchange: float

    def seconds(self, shape: AttentionShape) -> float:
        """Modelled, of a step; the ring's keys leave a node over all cards of the group."""
        return step_cost(self.plan, self.cluster, shape, gradient_width=1.0).total + self.exchange


def heads_and_ring(lengths: Sequence[int], cluster: Cluster, shape: AttentionShape) -> HeadsAndRing:
    """How a2a+p2p runs a batch."""
    together = min(cluster.ranks_per_node, shape.kv_heads)
    groups = replace(
        cluster,
        ranks_per_node=cluster.ranks_per_node // together,
        intra_node_bandwidth=cluster.intra_node_bandwidth * together,
        flops=cluster.flops * together,
    )
    plan = plan_sequences(lengths, groups, shape=shape, method="ring")
    numbers = 2 * (shape.heads + shape.kv_heads) * (shape.head_size + shape.value_size)  # of q, k, v and the output
    moved = sum(lengths) / cluster.world_size * (together - 1) / together
    exchange = shape.layers * 2 * moved * numbers / cluster.intra_node_bandwidth
    return HeadsAndRing(together, groups, plan, exchange)
