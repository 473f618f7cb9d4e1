"""Attention alone under context parallelism, modelled in MagiAttention's setting beside its published figures.

Setting: H100, 8 GPUs a node, packed causal documents of at most a quarter of all tokens, 64 heads and 8 key heads of
128, 8k tokens a GPU, bf16. Published are TFLOP/s a GPU, read by eye (+-3 %) from MagiAttention's cp_benchmark.md; its
authors ran all baselines on FlashAttention 3. Here documents are drawn from the published percentiles of the same
training set, kernels take FlashAttention 3's curve in `balancing.cluster.presets`, and links their preset's speed.

- ring: Transformer Engine's p2p. Each document is cut over all ranks; in each round a rank attends to the keys that
  came, and merges. Rounds go at the pace of the slowest link, since all ranks pass on in step.
- all-gather: all keys to all ranks before attention, a reduce-scatter of float32 gradients after it, which are cleared,
  summed and converted in the memory of each rank; nothing overlaps.
- Ulysses: every rank has all tokens of some heads. With more ranks than key heads, key heads are sent several times.
  Tokens are permuted in memory before and after an exchange.
- USP, LoongTrain: Ulysses over the ranks of a node, a ring over nodes.
- HybridCP: Megatron-LM's scheduler, groups of documents one after another, each document on a power of two ranks.
- Magi, native: areas and tokens balanced, a key enters a node once, transfers overlap. Magi, all-to-all-v: each rank
  receives its own keys.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from balancing.cluster import Cluster
from balancing.cluster.presets import H100
from balancing.kernels.pairs import pair_flops
from balancing.sequences import AttentionShape, SequencePlan, causal_area, plan_sequences
from balancing.sequences.cost import (
    AttentionWork,
    attention_rank_seconds,
    attention_work,
    kv_bytes,
    step_cost,
    whole_work,
)
from balancing.sequences.rounds import plan_rounds, turn_tokens
from balancing.sequences.traffic import kv_traffic, link_tokens_seconds, plan_links, traffic_seconds
from balancing_tools.whatif.lengths import draw_lengths
from benchmarks.sequences.plans import baseline_parts

__all__ = ["GPUS", "METHODS", "OURS", "PUBLISHED", "SHAPE", "batch", "modelled"]

GPUS = (8, 16, 32, 64)
SHAPE = AttentionShape(8192, 64, 8, 1, 0, head_size=128)
_TOKENS = 8192  # a GPU
_BATCHES = 3
_BACKWARD = 2.5  # FLOPs of backward over those of forward
# TFLOP/s a GPU at 8, 16, 32 and 64 GPUs, forward and backward.
PUBLISHED: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "Magi, native": ((459, 426, 315, 238), (360, 372, 333, 264)),
    "Magi, all-to-all-v": ((387, 306, 276, 207), (335, 353, 325, 242)),
    "all-gather": ((288, 292, 240, 180), (179, 155, 104, 55)),
    "Ulysses": ((278, 199, 186, 163), (332, 294, 277, 248)),
    "HybridCP": ((277, 222, 190, 161), (226, 220, 190, 163)),
    "USP": ((260, 252, 255, 192), (325, 309, 284, 195)),
    "LoongTrain": ((259, 251, 208, 193), (320, 253, 180, 171)),
    "ring": ((89, 68, 48, 29), (97, 86, 57, 29)),
}
OURS = ("chunks", "zones")
_Seconds = tuple[float, float]  # forward, backward


def batch(gpus: int, seed: int) -> list[int]:
    """Tokens of the documents of one batch, each at most a quarter of all."""
    total, found, generator = _TOKENS * gpus, [], np.random.default_rng(seed)
    while (left := total - sum(found)) > 0:
        found.append(min(left, total // 4, int(draw_lengths("packed", 1, generator)[0])))
    return found


def modelled(method: str, gpus: int, kernel: str = "fa3") -> tuple[float, float]:
    """TFLOP/s of a GPU, forward and backward, of the mean of a few batches. method: of `METHODS` or `OURS`."""
    cluster = replace(Cluster.preset("h100-8x400g", nodes=gpus // 8), rates=replace(H100, kernel=kernel))
    work, seconds = 0.0, np.zeros(2)
    for seed in range(_BATCHES):
        lengths = batch(gpus, seed)
        found = _ours(method, lengths, cluster) if method in OURS else METHODS[method](lengths, cluster)
        if found is not None:
            work += causal_area(lengths) * pair_flops(SHAPE.heads, SHAPE.head_size) / gpus
            seconds += found
    forward, backward = work / seconds / 1e12
    return float(forward), float(backward * _BACKWARD)


def _ours(method: str, lengths: Sequence[int], cluster: Cluster) -> _Seconds:
    """Of our engine: its host, as measured, or its device, whichever takes longer."""
    plan = plan_sequences(lengths, cluster, shape=SHAPE, method=method)
    cost = step_cost(plan, cluster, SHAPE)
    device = _overlapped(plan, cluster)
    slower = max(1.0, (cost.host - 75 * cluster.host_seconds) / sum(device))  # without the operations of other layers
    return device[0] * slower, device[1] * slower


def _compute(plan: SequencePlan, cluster: Cluster) -> _Seconds:
    """Seconds of the slowest rank's kernels."""
    rounds = sum(plan_rounds(plan, cluster, turn_tokens(cluster, kv_bytes(SHAPE))))
    forward, backward = attention_rank_seconds(attention_work(plan, rounds), cluster, SHAPE)
    return float(forward.max()), float(backward.max())


def _overlapped(plan: SequencePlan, cluster: Cluster, *, once: bool = True) -> _Seconds:
    """Balanced attention whose transfers overlap: the longer of both, and the first keys or the last gradients.

    once: whether a key enters a node once.
    """
    forward, backward = _compute(plan, cluster)
    if once:
        moved = plan_links(plan, cluster, in_step=True)
        keys = link_tokens_seconds(moved.near, moved.far, kv_bytes(SHAPE), cluster)
    else:
        keys = traffic_seconds(kv_traffic(plan), kv_bytes(SHAPE), cluster, False)
    exposed = 0.15  # `balancing.sequences.cost` says why
    return max(forward, keys) + exposed * keys, max(backward, 2 * keys) + exposed * 2 * keys


def _magi(lengths: Sequence[int], cluster: Cluster) -> _Seconds:
    free = replace(cluster, rates=replace(cluster.rates, operation_seconds=0.0, post_seconds=0.0))
    return _overlapped(plan_sequences(lengths, free, shape=SHAPE), free)


def _magi_direct(lengths: Sequence[int], cluster: Cluster) -> _Seconds:
    free = replace(cluster, rates=replace(cluster.rates, operation_seconds=0.0, post_seconds=0.0))
    return _overlapped(plan_sequences(lengths, free, shape=SHAPE), free, once=False)


def _ring(lengths: Sequence[int], cluster: Cluster) -> _Seconds:
    return _in_rounds(plan_sequences(lengths, cluster, shape=SHAPE, method="ring"), cluster)


def _merges(tokens: float, heads: int, rounds: int, cluster: Cluster) -> float:
    """Seconds to merge the results of `rounds` rounds: a partial result is read, a float32 sum is read and written, and
    half of the queries are copied for the next round."""
    assert cluster.rates is not None
    return rounds * tokens * heads * SHAPE.head_size * (2 + 4 + 4 + 2) / cluster.rates.copy_bandwidth


def _in_rounds(plan: SequencePlan, cluster: Cluster) -> _Seconds:
    """A ring: each round takes as long as its kernels or the next keys."""
    longest = max(len(plan.ring(number)) for number in range(len(plan.lengths)))
    merged = _merges(float(plan.tokens.max()), SHAPE.heads, longest - 1, cluster)
    forward, backward = (each + merged for each in _compute(plan, cluster))
    moved = plan_links(plan, cluster, in_step=True)
    keys = link_tokens_seconds(moved.near, moved.far, kv_bytes(SHAPE), cluster, False)
    rounds = max(len(plan.ring(number)) for number in range(len(plan.lengths)))
    last = 1 / rounds  # of the kernels, when nothing is sent
    return max(forward * (1 - last), keys) + forward * last, max(backward * (1 - last), 2 * keys) + backward * last


def _all_gather(lengths: Sequence[int], cluster: Cluster) -> _Seconds:
    plan = plan_sequences(lengths, cluster, shape=SHAPE, method="gather")
    forward, backward = attention_rank_seconds(attention_work(plan, np.ones(plan.ranks, dtype=int)), cluster, SHAPE)
    ranks, nodes = cluster.world_size, cluster.nodes
    network = (ranks - 1) / ranks / (cluster.nics_per_node * cluster.nic_bandwidth) if nodes > 1 else 0.0
    inside = (ranks - 1) / ranks / cluster.intra_node_bandwidth
    keys = sum(lengths) * max(network, inside) * kv_bytes(SHAPE)
    assert cluster.rates is not None
    sums = sum(lengths) * kv_bytes(SHAPE) / 2 * (4 + 8 + 4 + 2) / cluster.rates.copy_bandwidth  # bytes of an element
    return float(forward.max()) + keys, float(backward.max()) + 3 * keys + sums


def _heads(lengths: Sequence[int], cluster: Cluster, together: int) -> tuple[AttentionWork, _Seconds]:
    """Ulysses over groups of `together` neighbouring ranks: work of whole documents, and seconds of the exchanges."""
    head = SHAPE.head_size * 2  # bytes
    keys = max(SHAPE.kv_heads, together)  # sent once to each rank that needs them
    tokens = sum(lengths) / cluster.world_size
    sent = tokens * head * (2 * SHAPE.heads + 2 * keys)
    inside = min(together, cluster.ranks_per_node)
    near = sent * (inside - 1) / together / cluster.intra_node_bandwidth
    far = sent * (together - inside) / together / cluster.nic_bandwidth if together > inside else 0.0
    assert cluster.rates is not None
    seconds = max(near, far) + 4 * sent / cluster.rates.copy_bandwidth  # read and written at both ends
    return whole_work(lengths, SHAPE), (seconds, seconds)


def _ulysses(lengths: Sequence[int], cluster: Cluster) -> _Seconds:
    work, (forward, backward) = _heads(lengths, cluster, cluster.world_size)
    kernels = [float(each.sum()) / cluster.world_size for each in attention_rank_seconds(work, cluster, SHAPE)]
    return kernels[0] + forward, kernels[1] + backward


def _usp(lengths: Sequence[int], cluster: Cluster) -> _Seconds:
    """Groups of a node act as one rank of a ring, whose keys leave over all cards of the node."""
    if cluster.nodes == 1:
        return _ulysses(lengths, cluster)
    together = cluster.ranks_per_node
    _, (forward, backward) = _heads(lengths, cluster, together)
    groups = replace(cluster, ranks_per_node=1, intra_node_bandwidth=cluster.intra_node_bandwidth * together)
    narrow = replace(SHAPE, heads=SHAPE.heads // together, kv_heads=SHAPE.kv_heads // together)
    plan = plan_sequences(lengths, groups, shape=SHAPE, method="ring")
    rounds = sum(plan_rounds(plan, groups, turn_tokens(groups, kv_bytes(SHAPE))))
    kernels = [float(each.max()) for each in attention_rank_seconds(attention_work(plan, rounds), groups, narrow)]
    merged = _merges(sum(lengths) / cluster.nodes, narrow.heads, cluster.nodes - 1, cluster)
    kernels = [each + merged for each in kernels]
    moved = plan_links(plan, groups, in_step=True)
    keys = link_tokens_seconds(moved.near, moved.far, kv_bytes(narrow), groups, False) * groups.nics_per_node / together
    last = 1 / cluster.nodes
    found = [max(each * (1 - last), times * keys) + each * last for each, times in zip(kernels, (1, 2), strict=True)]
    return found[0] + forward, found[1] + backward


def _hybrid(lengths: Sequence[int], cluster: Cluster) -> _Seconds | None:
    """None where Megatron-LM's scheduler finds no plan."""
    parts = [_in_rounds(plan, cluster) for plan in baseline_parts("hybrid", lengths, cluster, SHAPE)]
    return (sum(part[0] for part in parts), sum(part[1] for part in parts)) if parts else None


METHODS: dict[str, Callable[[Sequence[int], Cluster], _Seconds | None]] = {
    "Magi, native": _magi,
    "Magi, all-to-all-v": _magi_direct,
    "all-gather": _all_gather,
    "Ulysses": _ulysses,
    "HybridCP": _hybrid,
    "USP": _usp,
    "LoongTrain": _usp,
    "ring": _ring,
}
