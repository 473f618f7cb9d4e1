"""What follows from a plan for one rank, and one call that goes by it.

To work out programs and routes takes longer than a layer, so they are kept from layer to layer and between the forward
and the backward pass, by the plan's digest.
"""

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from balancing.cluster import Cluster
from balancing.sequences.cost import pair_flops, routing_pays
from balancing.sequences.engine.compiler import make_program
from balancing.sequences.engine.kernels import Kernel
from balancing.sequences.engine.program import Exchange, Program, Stage, layout_change
from balancing.sequences.engine.routing import Routing, Slice, routes
from balancing.sequences.engine.transport import Dtypes, Pending, Transport, dtype_of
from balancing.sequences.sequence_plan import SequencePlan

__all__ = ["Run", "Statistics", "Way", "Widths", "find_way", "keep_way"]

_KEPT = 256  # ways: the micro-batches of a step, with their backward passes still to come
_TO_ATTENTION, _TO_LINEAR = Stage("to attention", True), Stage("to linear", True)


class Widths(NamedTuple):
    """What the attention of one layer weighs on this rank.

    Bytes of a token between nodes: keys with values, or their gradients; q with k and v; output. pair_flops: of a
    query-key pair, forward.
    """

    kv: int
    together: int
    out: int
    pair_flops: float

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor) -> "Widths":
        """Of such queries [tokens, heads, size] and keys [tokens, kv_heads, size]."""
        (heads, size), kv_heads = q.shape[1:], k.shape[1]
        kv, together, out = (elements * size for elements in (2 * kv_heads, heads + 2 * kv_heads, heads))
        item = q.element_size()
        return cls(kv * item, together * item, out * item, pair_flops=pair_flops(heads, size))

    def of_stage(self, stage: Stage) -> int:
        """Of what a stage moves, for changes of layout in the forward pass."""
        return {"to attention": self.together, "to linear": self.out}.get(stage.kind, self.kv)


@dataclass(frozen=True)
class Way:
    """All that follows from a plan for one rank. The two changes of layout are None where attention has the linear
    layout, token for token. routes: the rank's part in messages between nodes that do not go directly."""

    rank: int
    cluster: Cluster | None
    program: Program
    to_attention: Exchange | None
    to_linear: Exchange | None
    routes: dict[Stage, list[Slice]]


_ways: OrderedDict[tuple, Way] = OrderedDict()


def find_way(
    plan: SequencePlan, rank: int, cluster: Cluster | None, routing: Routing = "off", widths: Widths | None = None
) -> Way:
    """The way of `rank`. widths: what routes are planned for; not needed with routing "off"."""
    key = (plan.digest, rank, cluster, routing, widths)
    if key not in _ways:
        keep_way(_make(plan, rank, cluster, routing, widths), plan, routing, widths)
    _ways.move_to_end(key)
    return _ways[key]


def keep_way(way: Way, plan: SequencePlan, routing: Routing = "off", widths: Widths | None = None) -> None:
    """Have `find_way` find a way that was made ahead, in another process, as a data loader's worker is one."""
    _ways[plan.digest, way.rank, way.cluster, routing, widths] = way
    if len(_ways) > _KEPT:
        _ways.popitem(last=False)


def _make(plan: SequencePlan, rank: int, cluster: Cluster | None, routing: Routing, widths: Widths | None) -> Way:
    slices: dict[Stage, list[Slice]] = {}
    if routing != "off":
        assert cluster is not None and widths is not None
        if routing != "auto" or routing_pays(
            plan,
            cluster,
            kv_bytes=widths.kv,
            remap_bytes=widths.together + widths.out,
            flops_of_pair=widths.pair_flops,
        ):
            slices = routes(plan, rank, cluster, widths.of_stage, routing)
    relays = [stage for stage in slices if stage.kind not in ("to attention", "to linear")]
    program = make_program(plan, rank, cluster, relays=relays)
    own = plan.shards(rank, linear=True)
    if not plan.remapped and own == program.held:
        return Way(rank, cluster, program, None, None, slices)
    # The order of a rank's tokens counts, too.
    there = layout_change(plan.linear, plan.attention, own, program.held)
    return Way(rank, cluster, program, there, Exchange(there.receives, there.sends), slices)


@dataclass
class Statistics:
    """What attention has moved since it was made, on this rank.

    Bytes sent to ranks of the same node and of other nodes, for keys and values and for changes of layout, what the
    rank hands on for others included.
    """

    intra_bytes: int = 0
    inter_bytes: int = 0
    remap_intra_bytes: int = 0
    remap_inter_bytes: int = 0
    _waited: float = 0.0
    _marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    @property
    def exposed_seconds(self) -> float:
        """Seconds in which the rank, or on CUDA its stream, waited for transfers. Waits for what is still under way."""
        for begin, end in self._marks:
            end.synchronize()
            self._waited += begin.elapsed_time(end) / 1e3
        self._marks.clear()
        return self._waited

    def wait(self, pending: Pending) -> None:
        """Wait for transfers, and count the time."""
        if pending.on_cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            pending.wait()
            end.record()
            self._marks.append((begin, end))
            return
        start = time.perf_counter()
        pending.wait()
        self._waited += time.perf_counter() - start


@dataclass(frozen=True)
class Run:
    """One call of attention: its way, what carries its transfers and counts them, what computes, and the factor of its
    scores."""

    way: Way
    transport: Transport
    statistics: Statistics
    kernel: Kernel
    scale: float

    def start(self, stage: Stage, rows: torch.Tensor, dtype: torch.dtype) -> Pending:
        """Start the transfers of a stage between the workspaces of the ranks. dtype: of keys.

        Gradients of gathered keys go straight home and are rounded once, to the type of keys, as kernels round them.
        Sums on a ring stay what they are inside a node, and are rounded where they leave it.
        """
        exchange, slices = self.way.program.exchanges[stage], self.way.routes.get(stage, ())
        near = rows.dtype if stage.kind == "ring return" else dtype
        dtypes = {peer: near if self._same_node(peer) else dtype for peer in self._peers(exchange, slices)}
        self._count(exchange, rows, dtypes, slices, remap=False)
        return self.transport.start(exchange, rows, rows, _tag(stage), slices, dtypes)

    def moved(self, exchange: Exchange, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`parts` [token, heads, size] in the other layout, in one message a peer."""
        stage = _TO_ATTENTION if exchange is self.way.to_attention else _TO_LINEAR
        before = (torch.cat(parts, 1) if len(parts) > 1 else parts[0]).contiguous()
        after = before.new_empty(sum(message.tokens for message in exchange.receives), *before.shape[1:])
        slices = self.way.routes.get(stage, ())
        dtypes = dict.fromkeys(self._peers(exchange, slices), before.dtype)
        self._count(exchange, before, dtypes, slices, remap=True)
        self.statistics.wait(self.transport.start(exchange, before, after, _tag(stage), slices))
        return after.split([part.shape[1] for part in parts], 1)

    def _same_node(self, peer: int) -> bool:
        return self.way.cluster is None or self.way.cluster.same_node(peer, self.way.rank)

    def _peers(self, exchange: Exchange, slices: Sequence[Slice]) -> set[int]:
        """The ranks that send to this one or receive from it, and those whose messages it hands on."""
        ends = {rank for piece in slices for rank in piece.flow}
        return ends | {message.peer for message in (*exchange.sends, *exchange.receives)}

    def _count(
        self, exchange: Exchange, rows: torch.Tensor, dtypes: Dtypes, slices: Sequence[Slice], *, remap: bool
    ) -> None:
        numbers = rows.shape[1:].numel()
        bytes_to = dict.fromkeys((False, True), 0)
        for peer, dtype, tokens in sent(exchange, self.way.rank, dtypes, slices):
            bytes_to[not self._same_node(peer)] += tokens * numbers * dtype.itemsize
        if remap:
            self.statistics.remap_intra_bytes += bytes_to[False]
            self.statistics.remap_inter_bytes += bytes_to[True]
        else:
            self.statistics.intra_bytes += bytes_to[False]
            self.statistics.inter_bytes += bytes_to[True]


def sent(
    exchange: Exchange, rank: int, dtypes: Dtypes, slices: Sequence[Slice]
) -> Iterator[tuple[int, torch.dtype, int]]:
    """To whom `rank` sends rows, its own and what it hands on, of which type, and how many."""
    routed = {piece.flow for piece in slices}
    for message in exchange.sends:
        if message.peer != rank and (rank, message.peer) not in routed:
            yield message.peer, dtypes[message.peer], message.tokens
    for piece in slices:
        if rank != piece.path[-1]:
            yield piece.path[piece.path.index(rank) + 1], dtype_of(piece, dtypes), piece.stop - piece.start


def _tag(stage: Stage) -> int:
    """A number for each stage, the same on all ranks."""
    kinds = ("gather", "ring", "return", "ring return", "to attention", "to linear")
    return kinds.index(stage.kind) + len(kinds) * (stage.inter + 2 * stage.round)
