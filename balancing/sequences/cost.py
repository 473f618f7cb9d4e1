"""What a plan of sequences costs in seconds and bytes, and the least that its batch can cost.

Attention costs query-key pairs, in tiles of 128 x 128 as flash attention computes them, so a shard of ten tokens costs
a tile for every 128 keys. Linear layers cost tokens. Keys and values travel under attention's compute, but not all the
time: something must have come before there is anything to compute, and the last gradients leave when all is computed.
Tokens that are remapped travel under nothing (`traffic` has the links).

Forward and backward of one micro-batch, recompute not counted. Backward computes attention 2.5 times (flash attention
computes scores again) and linear layers twice; keys and values travel again, and their gradients travel home, on a ring
inside a node as sums in float32.
Latency of messages and of kernels is not in the model.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from balancing.cluster import Cluster
from balancing.sequences.load import causal_area
from balancing.sequences.sequence_plan import AttentionShape, SequencePlan
from balancing.sequences.traffic import Traffic, layout_traffic, remap_traffic, traffic_seconds

__all__ = [
    "StepCost",
    "attention_seconds",
    "hidden_seconds",
    "hidden_tokens",
    "kv_bytes",
    "kv_seconds",
    "limit_seconds",
    "linear_seconds",
    "pair_flops",
    "routing_pays",
    "step_cost",
    "tile_area",
]

TILE = 128
_BYTES = 2  # of bf16
_ATTENTION_ACHIEVED = 0.6  # flash attention's FLOP/s over those of large matrix products: 0.57 on H200, 0.72 on A800
_ATTENTION_BACKWARD, _LINEAR_BACKWARD = 2.5, 2.0  # over forward
# Shares of transfers that nothing hid although there was compute enough, on the emulated cluster
# (benchmarks/log/2026-11-20-sequences-emulated.md).
_NEVER_HIDDEN = {"ring": 0.2, "gather": 0.4}
# Of attention's time. Hops cost something, too: where less was to be saved, nothing was (same file).
_ROUTING_SAVES = 0.2
_SUM_WIDTH = 2.0  # bytes of a key's gradient over those of a key, in float32 as rings sum them inside a node


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
    plan: SequencePlan,
    cluster: Cluster,
    shape: AttentionShape,
    *,
    routed: bool | None = None,
    remapped: bool = True,
    gradient_width: float | None = None,
) -> StepCost:
    """The cost of one micro-batch.

    routed: whether what leaves a node is spread over all its NICs; None for whichever is quicker. remapped: whether
    linear layers use the plan's linear layout; otherwise they use attention's, and nothing is remapped. gradient_width:
    bytes of a key's gradient over those of a key, None for what the engine sends; other systems send mostly bf16, which
    is 1. Raises ValueError where the plan has more ranks than the cluster.
    """
    moved = layout_traffic(plan.table, plan.lengths, plan.exchange, in_step=True)
    exchange = kv_seconds(moved, plan.exchange, kv_bytes(shape), cluster, routed, gradient_width)
    compute = hidden_seconds(float(tile_area(plan).max(initial=0.0)), cluster, shape)
    exposed = _exposed(plan, exchange, compute)
    remap = 0.0
    if remapped and plan.remapped:
        moved = remap_traffic(plan)
        heads = (shape.heads + 2 * shape.kv_heads) + shape.heads  # q, k and v to attention; its output back
        remap = traffic_seconds(moved, heads * shape.head_size * _BYTES, cluster, routed)  # both ways are equally long
    tokens = (plan.linear_tokens if remapped else plan.tokens).max(initial=0)
    return StepCost(
        attention=shape.layers * (1 + _ATTENTION_BACKWARD) * compute,
        exchange=shape.layers * sum(exchange),
        exposed=shape.layers * exposed,
        linear=linear_seconds(int(tokens), cluster, shape),
        remap=shape.layers * 2 * remap,
    )


def kv_seconds(
    moved: Traffic,
    exchange: Collection[str],
    token_bytes: float,
    cluster: Cluster,
    routed: bool | None = None,
    gradient_width: float | None = None,
) -> tuple[float, float]:
    """Seconds that keys and values take in one layer forward, and with their gradients backward.

    moved: tokens whose keys travel forward. exchange: of each sequence, as plans have it; where some are on rings,
    gradients count as those of rings. The other arguments are those of `step_cost` and `traffic.traffic_seconds`.
    """
    forward = traffic_seconds(moved, token_bytes, cluster, routed)
    if gradient_width is not None or "ring" not in exchange:
        return forward, (1 + (gradient_width or 1.0)) * forward
    back = moved._replace(tokens=moved.tokens * np.where(moved.crossing(cluster), 2.0, 1 + _SUM_WIDTH))
    return forward, traffic_seconds(back, token_bytes, cluster, routed)


def routing_pays(
    plan: SequencePlan, cluster: Cluster, *, kv_bytes: int, remap_bytes: int, flops_of_pair: float
) -> bool:
    """Whether to spread what leaves a node over all its NICs saves enough of attention's time.

    kv_bytes: of one token's keys and values in one layer. remap_bytes: of what is remapped of one token, to attention
    and back. flops_of_pair: `pair_flops` of the layer.
    """
    moved = layout_traffic(plan.table, plan.lengths, plan.exchange, in_step=True)
    compute = float(tile_area(plan).max(initial=0.0)) * flops_of_pair / (cluster.flops * _ATTENTION_ACHIEVED)
    waits = []
    for routed in (False, True):
        waits.append(_exposed(plan, kv_seconds(moved, plan.exchange, kv_bytes, cluster, routed), compute))
        if plan.remapped:
            waits[-1] += 2 * traffic_seconds(remap_traffic(plan), remap_bytes, cluster, routed)
    direct, spread = waits
    return direct - spread > _ROUTING_SAVES * ((1 + _ATTENTION_BACKWARD) * compute + direct)


def limit_seconds(lengths: Sequence[int], cluster: Cluster, shape: AttentionShape) -> float:
    """The physical limit of a batch: its exact FLOPs spread evenly over all ranks, and every transfer hidden."""
    attention = attention_seconds(causal_area(lengths), cluster, shape)
    return (attention + linear_seconds(sum(lengths), cluster, shape)) / cluster.world_size


def attention_seconds(pairs: float, cluster: Cluster, shape: AttentionShape) -> float:
    """Seconds one rank computes so many query-key pairs in all layers, forward and backward."""
    return shape.layers * (1 + _ATTENTION_BACKWARD) * hidden_seconds(pairs, cluster, shape)


def hidden_seconds(pairs: float, cluster: Cluster, shape: AttentionShape) -> float:
    """Seconds one rank computes so many query-key pairs in one layer, forward: as much transfer is hidden under it."""
    return pairs * pair_flops(shape.heads, shape.head_size) / (cluster.flops * _ATTENTION_ACHIEVED)


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
    return (
        2
        * _BYTES
        * shape.kv_heads
        * shape.head_size
        / bandwidth
        / (pair_flops(shape.heads, shape.head_size) / 2 / flops)
    )


def tile_area(plan: SequencePlan) -> np.ndarray:
    """float [rank]: query-key pairs a rank computes in attention, in whole tiles.

    Where a sequence goes round a ring, every round's keys are tiles of their own, which short sequences do not fill.
    """
    sequence, start, stop, rank = plan.table.T
    rows = -(-(stop - start) // TILE)
    # Rows of tiles end at start + 128, start + 256 and so on, the last one at stop, and reach back to key 0.
    tiles = (rows - 1) * -(-start // TILE) + rows * (rows - 1) // 2 + -(-stop // TILE)
    members = np.array([len(plan.ring(number)) for number in range(len(plan.lengths))])
    # Of a zig-zag ring's pairs one half is with all keys of a rank, the other with its first half alone; in tiles.
    whole, half = (np.array(plan.lengths) / members / part / TILE for part in (1, 2))
    on_ring = np.array([exchange == "ring" for exchange in plan.exchange], dtype=bool)
    wasted = np.where(on_ring, (np.ceil(whole) / whole + np.ceil(half) / half) / 2, 1.0)
    return np.bincount(rank, tiles * wasted[sequence], plan.ranks) * TILE**2


def _exposed(plan: SequencePlan, exchange: tuple[float, float], compute: float) -> float:
    """Seconds of the exchange in one layer, forward and backward, that compute does not hide. compute: forward."""
    forward, backward = exchange
    beyond = max(0.0, forward - compute) + max(0.0, backward - _ATTENTION_BACKWARD * compute)
    return max(beyond, _never_hidden(plan) * (forward + backward))


def _never_hidden(plan: SequencePlan) -> float:
    """The share of the exchange that is exposed at least. Where both kinds travel one waits for the other."""
    return sum(share for exchange, share in _NEVER_HIDDEN.items() if exchange in plan.exchange)


def pair_flops(heads: int, head_size: int) -> float:
    """FLOPs of one query-key pair in one layer, forward: scores and values."""
    return 4.0 * heads * head_size
