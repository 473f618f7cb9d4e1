"""Workload of an emulated run of sequences: machine, models, batches, methods, and how all of it is scaled down.

Modelled are two nodes of eight A800s with four NICs of 200 Gbit/s (`Cluster.preset("a800-4x200g")`), or four nodes of
half that, and layers of a 7B model with multi-head attention or with grouped queries 8:1, 4096 tokens a rank in one
micro-batch. Documents keep their lengths and every token its place. Emulated is the same with

- fewer bytes: a token's query, key and value have 8 heads of 8 numbers for 32 of 128, a factor of 64;
- more time: one factor on all compute. A NIC's rate is the modelled one over both factors.

So compute and NIC time keep their proportions. Methods that stand for other systems send gradients of keys and values
with as many bytes as keys and values, as those systems do; ours send them in float32, as the engine sums them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from balancing.cluster import Cluster
from balancing.cluster.rates import Rates
from balancing.kernels.base import Pieces
from balancing.sequences import AttentionShape, SequencePlan, plan_sequences, rounds, step_cost
from balancing.sequences.cost import TILE, least_turn
from balancing.sequences.plan import plan_attention
from balancing.sequences.rounds import what_is_asked
from balancing.sequences.traffic import plan_links
from benchmarks.baselines.data_parallel import as_drawn
from benchmarks.sequences.lengths import draw_batch
from benchmarks.sequences.peers import all_gather_seconds, heads_and_ring
from benchmarks.sequences.plans import baseline_parts

__all__ = [
    "CLUSTERS",
    "CONTEXT_METHODS",
    "DATA_METHODS",
    "METHODS",
    "SHAPES",
    "Case",
    "Method",
    "Scale",
    "host_seconds",
    "make_case",
    "predicted_seconds",
    "tile_pairs",
]

CLUSTERS = {"2 x 8": (2, 8), "4 x 4": (4, 4)}
SHAPES = {
    "MHA": AttentionShape(4096, 32, 32, 2, 11008),
    "GQA 8:1": AttentionShape(4096, 32, 4, 2, 14336),
}
_HEADS, _HEAD_SIZE = 8, 8  # emulated, of two bytes
_TOKENS = 4096  # a rank


@dataclass(frozen=True)
class Method:
    """One way to run a batch.

    planner: of `plan_sequences`. routed: whether the routing layer is on. remapped: whether linear layers have the
    plan's linear layout; otherwise they have that of attention. peer: it stands for another system.
    moves: how keys and values move; by the engine, or as a peer moves them (`benchmarks.sequences.emulated_peers`).
    stays: linear layers compute each token on the rank that drew its sample. "attention": attention does as well.
    """

    name: str
    planner: str
    routed: bool = True
    remapped: bool = True
    peer: bool = False
    moves: Literal["engine", "all-gather", "a2a+p2p"] = "engine"
    stays: Literal["", "tokens", "attention"] = ""


METHODS = {
    method.name: method
    for method in (
        Method("ring", "ring", routed=False, peer=True),
        Method("all-gather", "gather", peer=True, moves="all-gather"),
        Method("a2a+p2p", "ring", peer=True, moves="a2a+p2p"),
        Method("hybrid", "hybrid", routed=False, remapped=False, peer=True),
        Method("ring + routing", "ring", peer=True),
        Method("zones: engine only", "zones", routed=False, remapped=False),
        Method("zones, not remapped", "zones", remapped=False),
        Method("zones, not routed", "zones", routed=False),
        Method("zones", "zones"),
        Method("chunks", "chunks"),
        Method("as drawn", "chunks", stays="attention"),
        Method("attention travels", "chunks", stays="tokens"),
    )
}
# Over context-parallel ranks, and over data-parallel ranks of which each draws samples of its own.
CONTEXT_METHODS = tuple(name for name, method in METHODS.items() if not method.stays)
DATA_METHODS = ("as drawn", "attention travels", "chunks")


@dataclass(frozen=True)
class Scale:
    """The modelled machine and what becomes of it.

    nodes, ranks_per_node: the machine. time: emulated seconds for each modelled one. width: numbers of an
    emulated head. preset: whose GPUs, network cards and host. host: whether operations of our engine, and those of
    other layers beside it, cost the host; those of peers are not known and never do.
    """

    nodes: int
    ranks_per_node: int
    time: float
    width: int = _HEAD_SIZE
    preset: str = "a800-4x200g"
    host: bool = False

    @property
    def cluster(self) -> Cluster:
        """The modelled machine, with one rate for attention, as it is emulated, and without latencies of the device:
        launches and messages are not emulated."""
        machine = Cluster.preset(self.preset).relabel(self.nodes, self.ranks_per_node)
        assert machine.rates is not None
        rates = Rates.of_one_rate(
            machine.flops,
            operation_seconds=machine.rates.operation_seconds,
            post_seconds=machine.rates.post_seconds,
            copy_bandwidth=machine.rates.copy_bandwidth,
            source="emulated: one rate for attention, and the host of the preset",
        )
        host = {"rates": rates} if self.host else {"rates": None, "host_seconds": 0.0}
        return replace(machine, launch_seconds=0.0, message_seconds=0.0, **host)

    @property
    def bytes(self) -> float:
        """Modelled bytes for each emulated one."""
        return 32 * 128 / (_HEADS * self.width)

    @property
    def nic(self) -> float:
        """Emulated bytes/s of a NIC."""
        return self.cluster.nic_bandwidth / (self.bytes * self.time)

    @property
    def engine_cluster(self) -> Cluster:
        """The cluster for which the engine plans routes and turns: emulated bytes/s and FLOP/s at the modelled pace.

        Messages of emulated bytes are routed exactly as those of the modelled machine.
        """
        cluster = self.cluster
        return replace(
            cluster,
            rates=cluster.rates and cluster.rates.times(1 / self.bytes, cluster.rates.source),
            flops=cluster.flops / self.bytes,
            nic_bandwidth=cluster.nic_bandwidth / self.bytes,
            intra_node_bandwidth=cluster.intra_node_bandwidth / self.bytes,
        )

    def heads(self, shape: AttentionShape) -> tuple[int, int]:
        """Emulated heads and key-value heads."""
        return _HEADS, max(1, _HEADS * shape.kv_heads // shape.heads)


@dataclass(frozen=True)
class Case:
    """One batch of one model, planned by every method. parts: by method, plans that run one after another; a method
    that finds no plan is not in it."""

    model: str
    distribution: str
    batch: int
    lengths: tuple[int, ...]
    parts: dict[str, tuple[SequencePlan, ...]]


def make_case(
    cluster: Cluster, model: str, distribution: str, batch: int, methods: Sequence[Method], tokens: int = _TOKENS
) -> Case:
    """Draw a batch of `tokens` a rank and plan it. batch: its number, the seed."""
    draw = np.random.default_rng(batch)
    drawn: tuple[tuple[int, ...], ...] = (draw_batch(distribution, tokens * cluster.world_size, draw),)
    if any(method.stays for method in methods):  # a sample a rank
        drawn = tuple(draw_batch(distribution, tokens, draw) for _ in range(cluster.world_size))
    lengths = tuple(length for of_rank in drawn for length in of_rank)
    found = {method.name: _parts(method, drawn, lengths, cluster, SHAPES[model]) for method in methods}
    return Case(model, distribution, batch, lengths, {name: parts for name, parts in found.items() if parts})


def _parts(
    method: Method,
    drawn: tuple[tuple[int, ...], ...],
    lengths: tuple[int, ...],
    cluster: Cluster,
    shape: AttentionShape,
) -> tuple[SequencePlan, ...]:
    if method.stays:
        alone = as_drawn(drawn)
        if method.stays == "attention":
            return (alone,)
        return (plan_attention(lengths, alone.linear, cluster, shape=shape, method=method.planner),)
    if method.moves == "a2a+p2p":
        return (heads_and_ring(lengths, cluster, shape).plan,)
    if method.peer:
        return tuple(baseline_parts(method.planner, lengths, cluster, shape))
    plan = plan_sequences(lengths, cluster, shape=shape, method=method.planner)
    return (plan if method.remapped else replace(plan, linear=plan.attention),)


def predicted_seconds(case: Case, method: Method, cluster: Cluster) -> float:
    """What the cost model says of a step."""
    routed = None if method.routed else False
    shape, width = SHAPES[case.model], 1.0 if method.peer else None  # baselines send gradients in bf16
    parts = case.parts[method.name]
    if method.moves == "all-gather":
        return all_gather_seconds(case.lengths, cluster, shape, parts[0])
    if method.moves == "a2a+p2p":
        return heads_and_ring(case.lengths, cluster, shape).seconds(shape)
    costs = [step_cost(plan, cluster, shape, routed=routed, gradient_width=width) for plan in parts]
    return sum(cost.device if method.peer else cost.total for cost in costs)


def host_seconds(plan: SequencePlan) -> tuple[float, float]:
    """Modelled seconds of the host for attention of one layer, forward and backward, on the rank with most operations.

    plan: with its cluster and shape.
    """
    cluster, shape = plan.cluster, plan.shape
    assert cluster is not None and shape is not None
    asked = what_is_asked(plan, cluster, plan_links(plan, cluster, in_step=True), least_turn(plan, cluster, shape))
    forward, backward = (
        rounds.host_seconds(cluster, launches, messages)
        for launches, messages in zip(asked.launches, asked.messages, strict=True)
    )
    return forward, backward


def tile_pairs(pieces: Pieces) -> int:
    """Query-key pairs that flash attention computes, in whole tiles."""
    tiles = 0
    for queries, keys in zip(pieces.queries, pieces.keys, strict=True):
        rows, columns = -(-queries // TILE), -(-keys // TILE)
        if pieces.causal:
            tiles += (rows - 1) * -(-(keys - queries) // TILE) + rows * (rows - 1) // 2 + columns
        else:
            tiles += rows * columns
    return tiles * TILE**2
