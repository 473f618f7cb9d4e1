"""What a plan of sequences costs in seconds and bytes, and the least that its batch can cost.

Attention costs query-key pairs, in tiles of 128 x 128 as flash attention computes them, so a shard of ten tokens costs a
tile for every 128 keys. Linear layers cost tokens. Keys and values travel under attention's compute, tokens that are
remapped do not. A link is as busy as the sum of what it carries; ranks of a node talk over one kind of link, nodes over
NICs, which ranks may share. Where routing helps, what a node sends is spread over all its NICs (Zeppelin,
arXiv 2509.21841, section 3.3).

Forward and backward of one micro-batch, recompute not counted. Backward computes attention 2.5 times (flash attention
computes scores again) and linear layers twice; keys and values travel again, and their gradients travel home.
Latency of messages and of kernels is not in the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from balancing.cluster import Cluster
from balancing.experts.cost import exchange_seconds
from balancing.sequences.layout import AttentionShape, SequencePlan, Shard
from balancing.sequences.load import causal_area

__all__ = [
    "StepCost",
    "attention_seconds",
    "hidden_seconds",
    "hidden_tokens",
    "kv_bytes",
    "kv_traffic",
    "limit_seconds",
    "linear_seconds",
    "remap_traffic",
    "step_cost",
    "tile_area",
]

TILE = 128
_BYTES = 2  # of bf16
_ATTENTION_ACHIEVED = 0.6  # flash attention's FLOP/s over those of large matrix products: 0.57 on H200, 0.72 on A800
_ATTENTION_BACKWARD, _LINEAR_BACKWARD, _KV_BACKWARD = 2.5, 2.0, 2.0  # over forward


@dataclass(frozen=True)
class StepCost:
    """Seconds of forward and backward of one micro-batch through all layers, on the rank or link that takes longest.

    attention: compute. exchange: keys and values, and their gradients. exposed: what of the exchange attention's
    compute does not hide. linear: compute of all other layers. remap: tokens between the two layouts.
    """

    attention: float
    exchange: float
    exposed: float
    linear: float
    remap: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.attention + self.exposed + self.linear + self.remap


def step_cost(
    plan: SequencePlan, cluster: Cluster, shape: AttentionShape, *, routed: bool | None = None, remapped: bool = True
) -> StepCost:
    """The cost of one micro-batch.

    routed: whether what leaves a node is spread over all its NICs; None for whichever is quicker. remapped: whether
    linear layers use the plan's linear layout; otherwise they use attention's, and nothing is remapped. Raises
    ValueError where the plan has more ranks than the cluster.
    """
    exchange = _seconds(kv_traffic(plan) * kv_bytes(shape), cluster, routed)
    compute = hidden_seconds(float(tile_area(plan).max(initial=0.0)), cluster, shape)
    exposed = max(0.0, exchange - compute)
    exposed += max(0.0, _KV_BACKWARD * exchange - _ATTENTION_BACKWARD * compute)
    remap = 0.0
    if remapped and plan.remapped:
        moved = remap_traffic(plan)
        there, back = (shape.heads + 2 * shape.kv_heads), shape.heads  # q, k and v to attention; its output back
        size = shape.head_size * _BYTES
        remap = _seconds(moved * (there * size), cluster, routed) + _seconds(moved.T * (back * size), cluster, routed)
    tokens = (plan.linear_tokens if remapped else plan.tokens).max(initial=0)
    return StepCost(
        attention=shape.layers * (1 + _ATTENTION_BACKWARD) * compute,
        exchange=shape.layers * (1 + _KV_BACKWARD) * exchange,
        exposed=shape.layers * exposed,
        linear=linear_seconds(int(tokens), cluster, shape),
        remap=shape.layers * 2 * remap,
    )


def limit_seconds(lengths: Sequence[int], cluster: Cluster, shape: AttentionShape) -> float:
    """The physical limit of a batch: its exact FLOPs spread evenly over all ranks, and every transfer hidden."""
    attention = attention_seconds(causal_area(lengths), cluster, shape)
    return (attention + linear_seconds(sum(lengths), cluster, shape)) / cluster.world_size


def attention_seconds(pairs: float, cluster: Cluster, shape: AttentionShape) -> float:
    """Seconds one rank computes so many query-key pairs in all layers, forward and backward."""
    return shape.layers * (1 + _ATTENTION_BACKWARD) * hidden_seconds(pairs, cluster, shape)


def hidden_seconds(pairs: float, cluster: Cluster, shape: AttentionShape) -> float:
    """Seconds one rank computes so many query-key pairs in one layer, forward: as much transfer is hidden under it."""
    return pairs * _pair_flops(shape) / (cluster.flops * _ATTENTION_ACHIEVED)


def kv_bytes(shape: AttentionShape) -> int:
    """Bytes of one token's keys and values in one layer, in bf16. Grouped queries make them fewer."""
    return 2 * shape.kv_heads * shape.head_size * _BYTES


def linear_seconds(tokens: float, cluster: Cluster, shape: AttentionShape) -> float:
    """Seconds one rank computes the linear layers of so many tokens, forward and backward; the MLP is a gated one."""
    width, kv_width = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    parameters = shape.hidden * (2 * width + 2 * kv_width + 3 * shape.ffn_hidden)
    return shape.layers * (1 + _LINEAR_BACKWARD) * 2 * parameters * tokens / cluster.flops


def hidden_tokens(cluster: Cluster, shape: AttentionShape, bandwidth: float) -> float:
    """Tokens a rank of a ring must hold so that computing a round takes as long as sending the next, forward.

    The crossing of quadratic compute and linear communication: a round of a causal zig-zag ring with c tokens a rank
    computes 2 c^2 heads x head_size FLOPs and sends 2 c kv_heads x head_size numbers. bandwidth: bytes/s of its slowest
    link. 0 for a link of infinite speed.
    """
    flops = cluster.flops * _ATTENTION_ACHIEVED
    return 2 * _BYTES * shape.kv_heads * shape.head_size / bandwidth / (_pair_flops(shape) / 2 / flops)


def tile_area(plan: SequencePlan) -> np.ndarray:
    """float [rank]: query-key pairs a rank computes in attention, in whole tiles.

    Where a sequence goes round a ring, every round's keys are tiles of their own, which short sequences do not fill.
    """
    sequence, start, stop, rank = _columns(plan.attention)
    rows = -(-(stop - start) // TILE)
    # Rows of tiles end at start + 128, start + 256 and so on, the last one at stop, and reach back to key 0.
    tiles = (rows - 1) * -(-start // TILE) + rows * (rows - 1) // 2 + -(-stop // TILE)
    whole = ~_on_ring(plan)[sequence]
    area = np.bincount(rank[whole], tiles[whole], minlength=plan.ranks)
    held = _held_on_rings(plan)
    members = np.bincount(held.sequence, minlength=len(plan.lengths))
    keys = np.array(plan.lengths) / np.maximum(2 * members, 1)  # half of what a rank holds: what it sees in a round
    rows = np.ceil(held.tokens / TILE)
    rounds = (members - 1)[held.sequence] * np.ceil(keys[held.sequence] / TILE)
    area = area + np.bincount(held.rank, rows * (rows + 1) / 2 + rounds * rows, minlength=plan.ranks)
    return area * float(TILE**2)


def kv_traffic(plan: SequencePlan) -> np.ndarray:
    """int64 [source_rank, rank]: tokens whose keys and values go from rank to rank, forward, in one layer.

    On a ring each rank hands on to the next all but what the next one holds itself. Otherwise each rank receives, of
    every token that its last query sees and it does not hold, the keys and values from the rank that holds them.
    """
    traffic = np.zeros((plan.ranks, plan.ranks), dtype=np.int64)
    held = _held_on_rings(plan)
    if len(held.rank):
        ends = np.append(held.sequence[1:] != held.sequence[:-1], True)
        begins = np.flatnonzero(np.append(True, ends[:-1]))
        following = np.arange(1, len(held.rank) + 1)
        following[ends] = begins
        handed = np.array(plan.lengths)[held.sequence] - held.tokens[following]
        np.add.at(traffic, (held.rank, held.rank[following]), handed)
    sequence, start, stop, rank = _columns(sorted(plan.attention))
    first = np.searchsorted(sequence, np.arange(len(plan.lengths) + 1))
    for number, exchange in enumerate(plan.exchange):
        if exchange == "gather":
            own = slice(first[number], first[number + 1])
            holders, begin, end = rank[own], start[own], stop[own]
            needs, last = np.unique(holders[::-1], return_index=True)
            sees = end[::-1][last]  # shards are in order, so a rank's last one ends last
            seen = np.clip(np.minimum(end[:, None], sees) - begin[:, None], 0, None)
            np.add.at(traffic, (holders[:, None], needs[None, :]), seen)
    np.fill_diagonal(traffic, 0)
    return traffic


class _Held(NamedTuple):
    """int64 [member of a ring], by sequence, then in the order of its ring."""

    sequence: np.ndarray
    rank: np.ndarray
    tokens: np.ndarray


def _held_on_rings(plan: SequencePlan) -> _Held:
    sequence, start, stop, rank = _columns(plan.attention)
    chosen = _on_ring(plan)[sequence]
    key = sequence[chosen] * plan.ranks + rank[chosen]
    member, first, which = np.unique(key, return_index=True, return_inverse=True)
    tokens = np.bincount(which, (stop - start)[chosen], minlength=len(member)).astype(np.int64)
    order = np.lexsort((first, member // plan.ranks))
    member = member[order]
    return _Held(member // plan.ranks, member % plan.ranks, tokens[order])


def _on_ring(plan: SequencePlan) -> np.ndarray:
    return np.array([exchange == "ring" for exchange in plan.exchange], dtype=bool)


def remap_traffic(plan: SequencePlan) -> np.ndarray:
    """int64 [source_rank, rank]: tokens that go from the linear layout to that of attention, in one layer."""
    traffic = np.zeros((plan.ranks, plan.ranks), dtype=np.int64)
    offset = np.cumsum([0, *plan.lengths])
    owners, cuts = [], []
    for layout in (plan.linear, plan.attention):
        sequence, start, _, rank = _columns(sorted(layout))
        cuts.append(offset[sequence] + start)
        owners.append(rank)
    begin = np.union1d(*cuts)
    tokens = np.diff(np.append(begin, offset[-1]))
    source, target = (
        owner[np.searchsorted(cut, begin, side="right") - 1] for owner, cut in zip(owners, cuts, strict=True)
    )
    np.add.at(traffic, (source, target), tokens)
    np.fill_diagonal(traffic, 0)
    return traffic


def _seconds(table: np.ndarray, cluster: Cluster, routed: bool | None) -> float:
    """Seconds until a table of bytes [source_rank, rank] has arrived."""
    alone = exchange_seconds(table, cluster)
    if routed is False or cluster.nodes == 1:
        return alone
    node = np.arange(len(table)) // cluster.ranks_per_node
    far = np.where(node[:, None] == node[None, :], 0.0, table)
    near = table - far
    dealt = 1 - 1 / cluster.nics_per_node  # of what a rank sends far, the part that other ranks of its node take out
    busiest = max((near.sum(axis) + dealt * far.sum(axis)).max() for axis in (0, 1))
    by_node = np.zeros((cluster.nodes, cluster.nodes))
    np.add.at(by_node, (node[:, None], node[None, :]), far)
    crossing = max(by_node.sum(0).max(), by_node.sum(1).max()) / cluster.nics_per_node
    spread = float(max(busiest / cluster.intra_node_bandwidth, crossing / cluster.nic_bandwidth))
    return spread if routed else min(alone, spread)


def _pair_flops(shape: AttentionShape) -> float:
    """FLOPs of one query-key pair in one layer, forward: scores and values."""
    return 4.0 * shape.heads * shape.head_size


def _columns(shards: Sequence[Shard]) -> np.ndarray:
    return np.array(shards, dtype=np.int64).reshape(-1, 4).T
