"""Balances sequences of very different length over context-parallel ranks, and computes exact attention over them.

    from balancing.cluster import Cluster
    from balancing.sequences import AttentionShape, plan_sequences

    shape = AttentionShape(hidden=4096, heads=32, kv_heads=8, layers=32, ffn_hidden=14336)
    plan = plan_sequences([30000, 1200, 500, 833], Cluster.preset("h200-8x400g"), shape=shape)
    print(plan.exchange, plan.area / plan.area.mean())

Glossary
    document, sequence   the two words mean the same here. A token attends to its own document alone, causally.
    area                 query-key pairs under the causal mask, the work of attention. That of linear layers is tokens.
    shard                tokens [start, stop) of one document on one rank.
    layout               shards that hold every token once. A plan has one for attention and one for linear layers.
    reshard, remap       to send tokens from one layout to the other; only the planner "zones" needs it.
    exchange             how keys and values reach the queries that see them: "local", "ring" or "gather" (all-gather).
    chunk                the unit in which the planner "chunks" cuts a document.
    zone                 Zeppelin's word: a document stays on one rank, on the ranks of one node, or is cut over nodes.
    micro-batch          documents that pass through the pipeline together; to deal is to choose them for each.

How a plan is carried out, with words of its own, is in `balancing.sequences.engine`; `reference.py` is all of it in
80 lines.

Example: 3 ranks, documents a, b and c of 10, 3 and 2 tokens. Their areas are 55, 6 and 3, so an even share is 5 tokens
and 21.3 pairs. Each token once, 5 a rank, in order, is as Megatron-LM would pack them:

    rank 0   a[0:5]                  15 pairs
    rank 1   a[5:10]                 40          imbalance 1.9
    rank 2   b, c                     9

`plan_sequences` cuts a where its pairs, not its tokens, are even. The last tokens of a are the dearest:

    rank 0   a[0:1], a[8:10], c      23 pairs    gathers a[1:6] from rank 2 and a[6:8] from rank 1
    rank 1   a[6:8], b               21          gathers a[0:1] from rank 0 and a[1:6] from rank 2
    rank 2   a[1:6]                  20          gathers a[0:1] from rank 0
"""

from balancing.kernels.pairs import causal_area
from balancing.sequences.cost import StepCost, limit_seconds, step_cost
from balancing.sequences.engine.attention import SequenceAttention
from balancing.sequences.engine.compiler import RankProgram, compile_rank
from balancing.sequences.engine.program import Program
from balancing.sequences.engine.routing import route
from balancing.sequences.engine.transport import Statistics
from balancing.sequences.micro_batches import MicroBatchPlan, deal_whole, plan_micro_batches
from balancing.sequences.plan import DEFAULT_CHUNK, METHODS, plan_attention, plan_sequences
from balancing.sequences.planners.linear_layout import linear_layout
from balancing.sequences.sequence_plan import AttentionShape, KVExchange, SequencePlan, Shard, zigzag_area
from balancing.sequences.traffic import TokenTraffic, kv_traffic, remap_traffic

__all__ = [
    "DEFAULT_CHUNK",
    "METHODS",
    "AttentionShape",
    "KVExchange",
    "MicroBatchPlan",
    "Program",
    "RankProgram",
    "SequenceAttention",
    "SequencePlan",
    "Shard",
    "Statistics",
    "StepCost",
    "TokenTraffic",
    "causal_area",
    "compile_rank",
    "deal_whole",
    "kv_traffic",
    "limit_seconds",
    "linear_layout",
    "plan_attention",
    "plan_micro_batches",
    "plan_sequences",
    "remap_traffic",
    "route",
    "step_cost",
    "zigzag_area",
]
