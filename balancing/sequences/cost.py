"""Cost of a plan of sequences in seconds and bytes, and the least cost of its batch.

Times are of forward and backward of one micro-batch, without activation recomputation.

- The cost of attention is query-key pairs in tiles of 128 x 128, as flash attention computes them, so a shard of ten
  tokens costs a tile for every 128 keys. With measured rates (`Cluster.rates`), a call also costs time for each row of
  128 queries and for each piece, so every round in which queries meet further keys costs their rows again. Without
  rates, 0.6 of the FLOP/s of large products count for pieces of any length, and backward costs 2.5 times forward, since
  flash attention recomputes scores.
- The cost of linear layers is proportional to tokens. Backward costs twice forward.
- Transfers of keys and values overlap with attention's compute, except the first and the last: compute starts once
  some keys have arrived, and the last gradients leave after it has ended. Backward sends keys and values again, and
  their gradients back; on a ring inside a node the gradients are float32 sums. Gathered keys enter a node once and are
  copied inside it; their gradients leave it once. Link times are those of `traffic`.
- Remapping of tokens overlaps with nothing.
- Multi-latent attention sends a token's latent in place of its keys and values, in layers that see all tokens. Every
  rank that receives a latent projects it, in forward and again in backward. The gradients of the projection cost twice
  a projection.
- Each kind of layers follows a plan of its own (`layer_kinds`). Tiles that no query sees are neither computed nor sent.
- Every kernel costs the device a launch, every round of keys costs the latency of a message, and the host needs time to
  start each operation of a layer (`rounds`; `Cluster.launch_seconds`, `message_seconds`, `host_seconds`; with measured
  rates, operations and messages of attention cost the host `Rates.operation_seconds` and `post_seconds`). If the host
  needs longer than the device, the step takes the host's time.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from balancing.cluster import Cluster
from balancing.cluster.rates import ONE_RATE
from balancing.kernels.pairs import pair_flops, token_counts
from balancing.sequences.rounds import MOST_TURNS, TurnTokens, host_seconds, plan_rounds, turn_tokens, what_is_asked
from balancing.sequences.sequence_plan import TILE, AttentionShape, SequencePlan, layer_kinds
from balancing.sequences.traffic import LinkTokens, link_tokens_seconds, plan_links, remap_traffic, traffic_seconds

__all__ = [
    "REST",
    "TILE",
    "AttentionWork",
    "StepCost",
    "attention_rank_seconds",
    "attention_seconds",
    "attention_work",
    "exposed_seconds",
    "extra_pairs",
    "hidden_seconds",
    "hidden_tokens",
    "kv_bytes",
    "kv_seconds",
    "latent_bytes",
    "least_turn",
    "limit_seconds",
    "linear_seconds",
    "routing_pays",
    "step_cost",
    "tile_area",
    "token_bytes",
    "whole_seconds",
    "whole_work",
]

_ATTENTION_BACKWARD, _LINEAR_BACKWARD = 2.5, 2.0  # over forward
# Gathering only. _NEVER_HIDDEN: share of transfers that is exposed even with enough compute (the first keys, the last
# gradients). _HIDES: share of compute that hides transfers, since turns wait for each other. With both, the modelled
# step is within 4 % of the simulated programs (`benchmarks.sequences.simulated` at commit 9e10f0b).
_NEVER_HIDDEN, _HIDES = 0.15, 0.85
# Least share of attention's time that routing must save. Hops have a cost: below this share, routing saved nothing on
# the emulated cluster (benchmarks/log/sequences-emulated.md).
_ROUTING_SAVES = 0.2
REST = 75  # operations of a dense layer outside attention, about 25 forward and 50 backward
_PROJECTION = 10  # operations of a round to project keys from latents, 3 forward and 7 backward
_RING_ROWS = 0.75  # of a rank's queries that a round of a zig-zag ring computes: all, or the later half
_SUM_WIDTH = 2.0  # bytes of a key's gradient (float32, as rings sum them inside a node) over those of a key


_SUMS = ("attention", "exchange", "exposed", "remap", "launch", "host")  # over layers


@dataclass(frozen=True)
class StepCost:
    """Seconds of forward and backward of one micro-batch through all layers, on the slowest rank or link.

    attention: compute of attention, and of projecting received latents.
    exchange: transfers of keys, values and their gradients.
    exposed: the part of `exchange` that compute of attention does not hide.
    linear: compute of all other layers.
    remap: transfers between the two layouts.
    launch: launches of the kernels of attention, on the device.
    host: time of the host to start all operations of all layers.
    launches: number of launches of attention in one layer, forward: calls, merges, copies and conversions. Of the kinds
        of layers the one with more.
    """

    attention: float
    exchange: float
    exposed: float
    linear: float
    remap: float
    launch: float = 0.0
    host: float = 0.0
    launches: int = 0

    @property
    def device(self) -> float:
        """Seconds of the slowest rank's device if the host keeps up."""
        return self.attention + self.exposed + self.linear + self.remap + self.launch

    @property
    def total(self) -> float:
        """Seconds of the step: those of the device or of the host, whichever takes longer."""
        return max(self.device, self.host)


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

    plan: the plan of the batch.
    cluster: the cluster of at least the plan's ranks.
    shape: the model.
    routed: whether traffic that leaves a node is spread over all NICs of the node; None where `routing_pays`.
    remapped: whether linear layers use the plan's linear layout; otherwise they use the layout of attention.
    gradient_width: bytes of a key's gradient over those of a key; None for what our engine sends. 1 is bf16, as most
        other systems send.

    Raises ValueError for a plan with more ranks than the cluster.
    """
    if not remapped:
        plan = replace(plan, linear=plan.attention)
    kinds = layer_kinds(plan, shape)
    parts = [_layers_cost(own, layers, cluster, shape, routed, gradient_width) for own, layers in kinds if layers]
    sums = {name: sum(getattr(part, name) for part in parts) for name in _SUMS}
    linear = linear_seconds(int(plan.linear_tokens.max(initial=0)), cluster, shape)
    return StepCost(**sums, linear=linear, launches=max(part.launches for part in parts))


def _projection_seconds(moved: LinkTokens, cluster: Cluster, shape: AttentionShape) -> float:
    """Seconds of projecting received latents in one layer, forward and backward, on the rank that receives most."""
    assert shape.latent is not None
    most = moved.needed.max(initial=0.0)
    numbers = shape.latent.size * shape.kv_heads * (shape.head_size - shape.latent.shared + shape.value_size)
    return float((2 + _LINEAR_BACKWARD) * 2 * numbers * most / cluster.flops)


def _layers_cost(
    plan: SequencePlan,
    layers: int,
    cluster: Cluster,
    shape: AttentionShape,
    routed: bool | None,
    gradient_width: float | None,
) -> StepCost:
    """The cost of attention in `layers` layers of one kind.

    The host's seconds include those of the layers' other modules. The other parameters are as in `step_cost`.
    """
    latents = shape.latent is not None and plan.sees_all
    moved = plan_links(plan, cluster, in_step=True)
    sent_bytes = _sent_bytes(plan, shape)
    numbers = (shape.heads + shape.kv_heads) * (shape.head_size + shape.value_size)  # q, k, v to attention; output back
    if routed is None and cluster.nodes > 1:
        pair = pair_flops(shape.heads, shape.head_size, shape.value_size)
        sent = {"kv_bytes": sent_bytes, "remap_bytes": numbers * shape.item_bytes}
        if not routing_pays(plan, cluster, **sent, flops_of_pair=pair, moved=moved):  # as the engine decides
            routed = False
    forward, backward = kv_seconds(moved, plan.exchange, sent_bytes, cluster, routed, gradient_width)
    least = least_turn(plan, cluster, shape)
    asked = what_is_asked(plan, cluster, moved, least)
    projection = _projection_seconds(moved, cluster, shape) if latents else 0.0
    more = _PROJECTION * asked.rounds if latents else 0
    latency = asked.rounds * cluster.message_seconds
    exchange = forward + latency, backward + 2 * latency  # gradients follow the keys
    forward_compute, backward_compute, attention = _attention(plan, cluster, shape, least)
    exposed = _exposed(plan, exchange, forward_compute, backward_compute)
    attention_host = host_seconds(cluster, sum(asked.launches) + more, sum(asked.messages))
    remap = 0.0
    if plan.remapped:
        # Backward takes as long.
        remap = traffic_seconds(remap_traffic(plan), numbers * shape.item_bytes, cluster, routed)
    return StepCost(
        attention=layers * (attention + projection),
        exchange=layers * sum(exchange),
        exposed=layers * exposed,
        linear=0.0,
        remap=layers * 2 * remap,
        launch=layers * (sum(asked.launches) + more) * cluster.launch_seconds,
        host=layers * (attention_host + REST * cluster.host_seconds),
        launches=asked.launches[0],
    )


def _attention(
    plan: SequencePlan, cluster: Cluster, shape: AttentionShape, turn_tokens: TurnTokens
) -> tuple[float, float | None, float]:
    """Seconds of attention's kernels in one layer: forward and backward of the ranks that are slowest in each, and of
    the rank that is slowest in both together. None of backward: 2.5 times forward."""
    if cluster.rates is None:
        compute = hidden_seconds(float(tile_area(plan).max(initial=0.0)), cluster, shape)
        return compute, None, (1 + _ATTENTION_BACKWARD) * compute
    forward, backward = _rank_seconds(plan, cluster, shape, turn_tokens)
    return float(forward.max()), float(backward.max()), float((forward + backward).max())


def _rank_seconds(
    plan: SequencePlan, cluster: Cluster, shape: AttentionShape, turn_tokens: TurnTokens
) -> tuple[np.ndarray, np.ndarray]:
    rings, turns = plan_rounds(plan, cluster, turn_tokens)
    return attention_rank_seconds(attention_work(plan, rings + turns), cluster, shape)


def extra_pairs(plan: SequencePlan, cluster: Cluster, shape: AttentionShape) -> np.ndarray:
    """float64 [rank], query-key pairs of long pieces that take as long as what a rank computes besides its area: the
    parts of tiles outside the mask, rows, and pieces. cluster: with rates."""
    flops = pair_flops(shape.heads, shape.head_size, shape.value_size)
    forward, backward = _rank_seconds(plan, cluster, shape, least_turn(plan, cluster, shape))
    return np.asarray((forward + backward) / sum(_long_seconds(1.0, cluster, flops)) - plan.area)


class AttentionWork(NamedTuple):
    """What attention's kernels compute in one layer, forward, float64 [rank].

    pairs: query-key pairs in whole tiles.
    queries: in whole tiles; counted once for each call in which they meet keys.
    pieces: pieces of documents, counted in the same way.
    """

    pairs: np.ndarray
    queries: np.ndarray
    pieces: np.ndarray


def attention_work(plan: SequencePlan, rounds: np.ndarray) -> AttentionWork:
    """The work of each rank. rounds: int [rank], rounds that bring the rank keys (`rounds.plan_rounds`).

    A rank's own tokens of a document are one piece of its first call. Tokens that see gathered keys are a piece of the
    call of each turn that brings such keys, at least a tile of them. On a ring they are one in each round.
    """
    sequence, start, stop, rank = plan.table.T
    member, which = np.unique(sequence * plan.ranks + rank, return_inverse=True)
    whole, holder = np.divmod(member, plan.ranks)
    tokens = np.bincount(which, stop - start)
    queries = np.bincount(holder, -(-tokens // TILE) * TILE, plan.ranks)
    pieces = np.bincount(holder, minlength=plan.ranks).astype(np.float64)
    members = np.bincount(whole, minlength=len(plan.lengths))
    how = np.array(plan.exchange)
    on_ring = how[whole] == "ring"
    again = (members[whole] - 1) * on_ring
    queries += np.bincount(holder, again * _RING_ROWS * -(-tokens // TILE) * TILE, plan.ranks)
    pieces += np.bincount(holder, again, plan.ranks)
    more_queries, more_pieces = _turn_work(plan, rounds)
    return AttentionWork(tile_area(plan), queries + more_queries, pieces + more_pieces)


def _turn_work(plan: SequencePlan, rounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Queries and pieces of the calls with gathered keys, float64 [rank]."""
    sequence, _, _, rank = plan.table.T
    sees, reaching = plan.before_shards()
    rows = -(-reaching // TILE) * TILE
    gathered = np.array(plan.exchange)[sequence] == "gather"
    turns = np.where(gathered, np.minimum(rounds[rank], -(-sees // TILE)), 0)
    return np.bincount(rank, turns * rows, plan.ranks), np.bincount(rank, turns, plan.ranks).astype(np.float64)


def least_turn(plan: SequencePlan, cluster: Cluster, shape: AttentionShape) -> TurnTokens:
    """The least tokens of a turn of gathering: what a turn costs follows from the plan. The same on all ranks."""
    attention = attention_seconds(float(plan.area.max(initial=0)), cluster, shape)
    device = (attention + linear_seconds(int(plan.linear_tokens.max(initial=0)), cluster, shape)) / shape.layers
    rows = 0.0
    if cluster.rates is not None and plan.sees_all:  # in a window each query is computed once
        most, one = (_turn_work(plan, np.full(plan.ranks, turns)) for turns in (MOST_TURNS, 1))
        queries, pieces = ((more - less) / (MOST_TURNS - 1) for more, less in zip(most, one, strict=True))
        forward, _ = attention_rank_seconds(AttentionWork(np.zeros(plan.ranks), queries, pieces), cluster, shape)
        rows = float(forward.max(initial=0.0))
    ranks = shape.tensor_parallel
    return turn_tokens(cluster, _sent_bytes(plan, shape) / ranks, rows=rows / ranks, device=device / ranks)


def attention_rank_seconds(
    work: AttentionWork, cluster: Cluster, shape: AttentionShape
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of attention's kernels in one layer, float64 [rank], forward and backward.

    cluster: with rates.
    """
    assert cluster.rates is not None
    flops = pair_flops(shape.heads, shape.head_size, shape.value_size)
    rates = cluster.rates
    return rates.forward.seconds(*work, flops), rates.backward.seconds(*work, _ATTENTION_BACKWARD * flops)


def kv_seconds(
    moved: LinkTokens,
    exchange: Collection[str],
    token_bytes: float,
    cluster: Cluster,
    routed: bool | None = None,
    gradient_width: float | None = None,
) -> tuple[float, float]:
    """Seconds of transfers of keys and values in one layer: forward, and backward with their gradients.

    moved: tokens on links in forward.
    exchange: the exchange of each sequence; if any sequence is on a ring, all gradients count as on rings.
    token_bytes: bytes of one token's keys and values.
    cluster, routed: as in `traffic.traffic_seconds`.
    gradient_width: as in `step_cost`.
    """
    forward = link_tokens_seconds(moved.near, moved.far, token_bytes, cluster, routed)
    near_width = far_width = gradient_width or 1.0
    if gradient_width is None and "ring" in exchange:
        near_width = _SUM_WIDTH
    # On a ring gradients go the same way as keys. Gathered keys' gradients go back to the ranks that sent the keys.
    way = 1 if "ring" in exchange else -1
    near, far = moved.near + near_width * moved.near[::way], moved.far + far_width * moved.far[::way]
    return forward, link_tokens_seconds(near, far, token_bytes, cluster, routed)


def routing_pays(
    plan: SequencePlan,
    cluster: Cluster,
    *,
    kv_bytes: int,
    remap_bytes: int,
    flops_of_pair: float,
    moved: LinkTokens | None = None,
) -> bool:
    """Whether routing, to spread traffic between nodes over all NICs, saves enough of attention's time.

    plan: the plan of the batch.
    cluster: the cluster of the plan's ranks.
    kv_bytes: bytes of one token's keys and values in one layer.
    remap_bytes: bytes of one token that are remapped to attention and back.
    flops_of_pair: `pair_flops` of the layer.
    moved: tokens on links in forward, if they are known.
    """
    moved = plan_links(plan, cluster, in_step=True) if moved is None else moved
    forward, backward = _long_seconds(float(tile_area(plan).max(initial=0.0)), cluster, flops_of_pair)
    waits = []
    for routed in (False, True):
        exchange = kv_seconds(moved, plan.exchange, kv_bytes, cluster, routed)
        waits.append(_exposed(plan, exchange, forward, None if cluster.rates is None else backward))
        if plan.remapped:
            waits[-1] += 2 * traffic_seconds(remap_traffic(plan), remap_bytes, cluster, routed)
    direct, spread = waits
    return direct - spread > _ROUTING_SAVES * (forward + backward + direct)


def limit_seconds(lengths: Sequence[int], cluster: Cluster, shape: AttentionShape) -> float:
    """Seconds of the limit: the batch's work spread evenly over all ranks, all transfers hidden.

    With measured rates the work is that of uncut documents at these rates, otherwise the batch's exact FLOPs.

    lengths: tokens of each sequence.
    """
    if cluster.rates is not None:
        attention = float(whole_seconds(lengths, cluster, shape).sum())
        return (attention + linear_seconds(sum(lengths), cluster, shape)) / cluster.world_size
    attention = attention_seconds(shape.mean_area(lengths), cluster, shape)
    return (attention + linear_seconds(sum(lengths), cluster, shape)) / cluster.world_size


def whole_seconds(lengths: Sequence[int] | np.ndarray, cluster: Cluster, shape: AttentionShape) -> np.ndarray:
    """float64 [document], seconds of one rank to compute attention of uncut documents in all layers, forward and
    backward, in whole tiles that a query sees."""
    work = whole_work(lengths, shape)
    if cluster.rates is None:
        return np.asarray(work.pairs * attention_seconds(1.0, cluster, shape))
    return np.asarray(shape.layers * sum(attention_rank_seconds(work, cluster, shape)))


def whole_work(lengths: Sequence[int] | np.ndarray, shape: AttentionShape) -> AttentionWork:
    """The work of uncut documents in the mean layer, float64 [document]."""
    tokens = token_counts(lengths)
    rows = -(-tokens // TILE)
    pairs = rows * (rows + 1) // 2 * float(TILE**2) - shape.unseen_pairs(rows)
    return AttentionWork(pairs, rows * float(TILE), np.ones(len(tokens)))


def attention_seconds(pairs: float, cluster: Cluster, shape: AttentionShape) -> float:
    """Seconds of one rank to compute `pairs` query-key pairs of long pieces in all layers, forward and backward."""
    if cluster.rates is None:
        return shape.layers * (1 + _ATTENTION_BACKWARD) * hidden_seconds(pairs, cluster, shape)
    return shape.layers * sum(_long_seconds(pairs, cluster, pair_flops(shape.heads, shape.head_size, shape.value_size)))


def hidden_seconds(pairs: float, cluster: Cluster, shape: AttentionShape) -> float:
    """Seconds of one rank to compute `pairs` query-key pairs of long pieces in one layer, forward; they hide as long a
    transfer."""
    return _long_seconds(pairs, cluster, pair_flops(shape.heads, shape.head_size, shape.value_size))[0]


def _long_seconds(pairs: float, cluster: Cluster, flops_of_pair: float) -> tuple[float, float]:
    """Seconds of `pairs` query-key pairs of long pieces in one layer, forward and backward."""
    if cluster.rates is None:
        forward = pairs * flops_of_pair / (cluster.flops * ONE_RATE)
        return forward, _ATTENTION_BACKWARD * forward
    rates = cluster.rates
    return (
        pairs * flops_of_pair / rates.forward.flops,
        pairs * _ATTENTION_BACKWARD * flops_of_pair / rates.backward.flops,
    )


def kv_bytes(shape: AttentionShape) -> int:
    """Bytes of one token's keys and values in one layer, over all tensor-parallel ranks."""
    return shape.heads_of_rank[1] * shape.tensor_parallel * (shape.head_size + shape.value_size) * shape.item_bytes


def latent_bytes(shape: AttentionShape) -> int:
    """Bytes of one token's latent and shared part of its key in one layer, over all tensor-parallel ranks."""
    assert shape.latent is not None
    return (shape.latent.size + shape.latent.shared) * shape.tensor_parallel * shape.item_bytes


def token_bytes(shape: AttentionShape) -> int:
    """Bytes that are sent of a token in layers that see all tokens: its latent if it has one, else keys and values."""
    return kv_bytes(shape) if shape.latent is None else latent_bytes(shape)


def _sent_bytes(plan: SequencePlan, shape: AttentionShape) -> int:
    """Bytes that are sent of a token in the layers of a plan. Keys in a sliding window are sent themselves."""
    return token_bytes(shape) if plan.sees_all else kv_bytes(shape)


def linear_seconds(tokens: float, cluster: Cluster, shape: AttentionShape) -> float:
    """Seconds of one rank to compute all linear layers for `tokens` tokens, forward and backward, with a gated MLP."""
    width = (shape.heads + shape.kv_heads) * (shape.head_size + shape.value_size)  # of q and the output, of k and v
    parameters = shape.hidden * (width + 3 * shape.ffn_hidden)
    return shape.layers * (1 + _LINEAR_BACKWARD) * 2 * parameters * tokens / cluster.flops


def hidden_tokens(cluster: Cluster, shape: AttentionShape, bandwidth: float) -> float:
    """Tokens of each rank of a ring at which computing a round takes as long as sending the next round, forward.

    Compute is quadratic and communication linear: a round of a causal zig-zag ring with c tokens a rank computes
    2 c^2 heads x head_size FLOPs and sends 2 c kv_heads x head_size elements.

    bandwidth: bytes/s of the ring's slowest link. With an infinite bandwidth the result is 0.
    """
    flops = cluster.flops * ONE_RATE if cluster.rates is None else cluster.rates.forward.flops
    return kv_bytes(shape) / bandwidth / (pair_flops(shape.heads, shape.head_size, shape.value_size) / 2 / flops)


def tile_area(plan: SequencePlan) -> np.ndarray:
    """float64 [rank], query-key pairs that a rank computes in attention, in whole tiles.

    On a zig-zag ring a rank computes its own tokens in one call. In each round either all of its queries see half of
    the received keys, or half of its queries see all of them. Short sequences do not fill such tiles.
    """
    sequence, start, stop, rank = plan.table.T
    rows = -(-(stop - start) // TILE)
    # Rows of tiles end at start + 128, start + 256, ..., stop, and reach back to key 0.
    tiles = (rows - 1) * -(-start // TILE) + rows * (rows - 1) // 2 + -(-stop // TILE)
    tiles -= plan.unseen_tiles(rows)
    members = np.array([len(plan.ring(number)) for number in range(len(plan.lengths))])
    whole, half = (np.ceil(np.array(plan.lengths) / members / part / TILE) for part in (1, 2))
    on_zigzag = members * (whole * (whole + 1) / 2 + (members - 1) * whole * half)
    wasted = np.maximum(1.0, on_zigzag / np.bincount(sequence, tiles, len(plan.lengths)))
    on_ring = np.array([exchange == "ring" for exchange in plan.exchange], dtype=bool)
    return np.bincount(rank, tiles * np.where(on_ring, wasted, 1.0)[sequence], plan.ranks) * TILE**2


def _exposed(
    plan: SequencePlan, exchange: tuple[float, float], compute: float, backward_compute: float | None = None
) -> float:
    """Seconds of the exchange in one layer that compute does not hide.

    compute, backward_compute: seconds of the passes; None of backward: 2.5 times forward.

    On a ring no transfer overlaps with the compute of the last keys, and the last round of gradients leaves after it.
    """
    forward, backward = exchange
    rings = [len(plan.ring(number)) for number, how in enumerate(plan.exchange) if how == "ring"]
    least = 0.0
    if rings:
        rounds = max(rings) - 1
        compute *= rounds / (rounds + 1)
        if backward_compute is not None:
            backward_compute *= rounds / (rounds + 1)
        least = (backward - forward) / rounds
    gathers = "gather" in plan.exchange
    return exposed_seconds(exchange, compute, gathers=gathers, least=least, backward_compute=backward_compute)


def exposed_seconds(
    exchange: tuple[float, float],
    compute: float,
    *,
    gathers: bool,
    least: float = 0.0,
    backward_compute: float | None = None,
) -> float:
    """Seconds of transfers in one layer that compute does not hide.

    exchange: seconds of the transfers, forward and backward.
    compute: seconds of the forward pass that can hide them.
    backward_compute: those of the backward pass; 2.5 times forward by default.
    gathers: whether keys are gathered.
    least: seconds of backward's transfers that are always exposed, besides those of gathering.
    """
    forward, backward = exchange
    hides = _HIDES if gathers else 1.0
    compute *= hides
    behind = _ATTENTION_BACKWARD * compute if backward_compute is None else backward_compute * hides
    beyond = max(0.0, forward - compute) + max(least, backward - behind)
    return beyond + _NEVER_HIDDEN * (forward + backward) * gathers
