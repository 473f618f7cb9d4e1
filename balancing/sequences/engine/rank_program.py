"""One rank's part of a plan, compiled once: its program, its changes of layout, and its part in routes.

Compiling takes longer than a layer, and with routes between many nodes longer than planning. In training a data
loader's worker compiles ahead of the step (`balancing.sequences.ahead`), and all layers of the step share the result.
"""

from dataclasses import dataclass
from typing import NamedTuple

from balancing.cluster import Cluster
from balancing.sequences.cost import pair_flops, routing_pays
from balancing.sequences.engine.call_rows import RowTable, make_table
from balancing.sequences.engine.compiler import make_program
from balancing.sequences.engine.program import (
    LAYOUT_CHANGES,
    TO_ATTENTION,
    TO_LINEAR,
    Messages,
    Program,
    TransferGroup,
    layout_change,
)
from balancing.sequences.engine.routing import Routing, Slice, check_routing, routes
from balancing.sequences.rounds import SMALLEST_TURNS, turn_tokens
from balancing.sequences.sequence_plan import SequencePlan

__all__ = ["RankProgram", "TokenBytes", "compile_rank"]


class TokenBytes(NamedTuple):
    """Bytes and FLOPs of one token in the attention of one layer on this rank.

    kv: bytes of its keys and values between nodes; their gradients have as many.
    qkv: bytes of its query, key and value.
    out: bytes of its output.
    pair_flops: FLOPs of one query-key pair, forward.
    latents: whether latents are sent in place of keys and values. Calls with received keys then hold no own keys.
    """

    kv: int
    qkv: int
    out: int
    pair_flops: float
    latents: bool = False

    @classmethod
    def of(
        cls,
        *,
        heads: int,
        kv_heads: int,
        head_size: int,
        item_bytes: int,
        value_size: int | None = None,
    ) -> "TokenBytes":
        """For attention with these heads on this rank.

        heads: query heads of the rank.
        kv_heads: key-value heads of the rank.
        head_size: elements of a head.
        item_bytes: bytes of an element, 2 for bf16.
        value_size: elements of a head of values; head_size by default.
        """
        values = head_size if value_size is None else value_size
        kv = kv_heads * (head_size + values) * item_bytes
        queries, out = heads * head_size * item_bytes, heads * values * item_bytes
        return cls(kv, queries + kv, out, pair_flops(heads, head_size, values))

    def of_group(self, transfer_group: TransferGroup) -> int:
        """Bytes of one row of a transfer group. For changes of layout, bytes of the forward pass."""
        return {"to attention": self.qkv, "to linear": self.out}.get(transfer_group.kind, self.kv)


@dataclass(frozen=True)
class RankProgram:
    """One rank's compiled part of a plan. It can be pickled.

    rank: in the plan.
    cluster: tells which ranks share a node; None if all do.
    program: transfers and computation of attention.
    table: rows of the program's calls and messages, for the device.
    to_attention, to_linear: changes of layout; None where attention has the linear layout, token for token.
    routes: by transfer group with a route, on all ranks the same, the rank's part in messages that do not go directly.
    remapped: as in the plan.
    """

    rank: int
    cluster: Cluster | None
    program: Program
    table: RowTable
    to_attention: Messages | None
    to_linear: Messages | None
    routes: dict[TransferGroup, list[Slice]]
    remapped: bool


def compile_rank(
    plan: SequencePlan,
    rank: int,
    cluster: Cluster | None = None,
    routing: Routing = "off",
    token_bytes: TokenBytes | None = None,
) -> RankProgram:
    """The program of one rank. It is deterministic, so the programs of all ranks fit together.

    plan: of the whole batch.
    rank: in the plan.
    cluster: tells which ranks share a node; None if all do.
    routing: "off", "auto", or the number of proxies that share a transfer between nodes.
    token_bytes: sizes for planning routes and turns of gathering. Needed unless routing is "off". Without it or without
        a cluster there are as many turns as allowed.

    Raises ValueError for a rank outside the plan, an unknown routing, and routing without a cluster of the plan's
    ranks or without token_bytes.
    """
    slices: dict[TransferGroup, list[Slice]] = {}
    turns = SMALLEST_TURNS if cluster is None or token_bytes is None else turn_tokens(cluster, token_bytes.kv)
    check_routing(routing)
    if routing != "off":
        if cluster is None or cluster.world_size != plan.ranks:
            raise ValueError(f"routing {routing!r} needs the cluster of the plan's {plan.ranks} ranks, not {cluster}")
        if token_bytes is None:
            raise ValueError(f"routing {routing!r} needs token_bytes; give those of the layers' attention")
        if routing != "auto" or routing_pays(
            plan,
            cluster,
            kv_bytes=token_bytes.kv,
            remap_bytes=token_bytes.qkv + token_bytes.out,
            flops_of_pair=token_bytes.pair_flops,
        ):
            slices = routes(plan, rank, cluster, token_bytes.of_group, routing, turn_tokens=turns)
    relays = [group for group, own in slices.items() if own and group.kind not in LAYOUT_CHANGES]
    waits = token_bytes is None or not token_bytes.latents
    program = make_program(plan, rank, cluster, relays=relays, turn_tokens=turns, waits=waits)
    linear_shards = plan.shards(rank, linear=True)
    if not plan.remapped and linear_shards == program.shards:
        table = make_table(program.calls, program.messages)
        return RankProgram(rank, cluster, program, table, None, None, slices, False)
    # Equal layouts may still order a rank's tokens differently.
    to_attention = layout_change(plan.linear, plan.attention, linear_shards, program.shards)
    to_linear = Messages(to_attention.receives, to_attention.sends)
    table = make_table(program.calls, {**program.messages, TO_ATTENTION: to_attention, TO_LINEAR: to_linear})
    return RankProgram(rank, cluster, program, table, to_attention, to_linear, slices, plan.remapped)
