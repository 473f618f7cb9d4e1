"""Exchange of a cut sequence's keys and values: round a ring, or gathered by each rank that needs them.

Gathered, a rank receives only what its queries see, and all NICs of a node work; but every rank of a node fetches the
same tokens from other nodes for itself, and a rank that holds the beginning of a long sequence sends it to many. On a
ring each token enters a node once, and every rank sends as much as it receives; but ranks also receive keys that they
do not need. Inside a node gathering is better; between nodes it is as long as attention hides it.
"""

from collections.abc import Sequence

from balancing.cluster import Cluster
from balancing.sequences.cost import hidden_seconds, kv_bytes, kv_seconds, latent_bytes
from balancing.sequences.load import causal_area
from balancing.sequences.sequence_plan import AttentionShape, KVExchange, Shard, columns, same_exchange
from balancing.sequences.traffic import layout_links

__all__ = ["choose_exchange"]


def choose_exchange(
    shards: Sequence[Shard],
    lengths: Sequence[int],
    cluster: Cluster,
    shape: AttentionShape,
    *,
    routed: bool | None = None,
) -> tuple[KVExchange, ...]:
    """The exchange of each sequence in a layout of equal area.

    shards: the layout of attention.
    lengths: tokens of each sequence.
    cluster: of all ranks of the layout.
    shape: the model, for costs.
    routed: as in `traffic.traffic_seconds`.

    Cut sequences are gathered if attention hides that or if nothing is quicker; otherwise those on several nodes go
    round rings.
    """
    gathered = same_exchange(shards, lengths, "gather")
    nodes: dict[int, int] = {}
    across = {
        shard.sequence
        for shard in shards
        if nodes.setdefault(shard.sequence, shard.rank // cluster.ranks_per_node)
        != shard.rank // cluster.ranks_per_node
    }
    if not across:
        return gathered
    mixed = tuple("ring" if number in across else exchange for number, exchange in enumerate(gathered))

    table = columns(shards)

    def seconds(exchange: tuple[KVExchange, ...]) -> tuple[float, float]:
        moved = layout_links(table, lengths, exchange, cluster, in_step=True)
        token_bytes = kv_bytes(shape) if shape.latent is None else latent_bytes(shape)
        return kv_seconds(moved, exchange, token_bytes, cluster, routed)

    hidden, alone = hidden_seconds(causal_area(lengths) / cluster.world_size, cluster, shape), seconds(gathered)
    return gathered if alone[0] <= hidden or sum(alone) <= sum(seconds(mixed)) else mixed
