"""Balances sequences of very different length over context-parallel ranks, and computes exact attention over them.

    from balancing.cluster import Cluster
    from balancing.sequences import AttentionShape, plan_sequences

    shape = AttentionShape(hidden=4096, heads=32, kv_heads=8, layers=32, ffn_hidden=14336)
    plan = plan_sequences([30000, 1200, 500, 833], Cluster.preset("h200-8x400g"), shape=shape)
    print(plan.exchange, plan.area / plan.area.mean())

Planning:

- sequence: one document of a packed batch. A token attends only to its own document, causally.
- area: query-key pairs under the causal mask, the cost of attention. The cost of linear layers is tokens.
- shard: tokens [start, stop) of one sequence on one rank.
- layout: shards that hold every token once. A plan has one layout for attention and one for linear layers.
- remap: to send tokens from one layout to the other.
- chunk: the unit in which the planner "chunks" cuts the ends of long sequences.
- zone: where the planner "zones" keeps a sequence: on one rank, on ranks of one node, or on several nodes.
- micro-batch: documents that pass through the pipeline together.
- deal: the micro-batch of each document of a step.
- exchange: how keys and values of a sequence reach the queries that see them: "local", "ring" or "gather".

Carrying a plan out (`engine`):

- program: the steps of one rank in one layer: start a transfer group, wait for it, compute tasks.
- transfer group: messages that start together on all ranks, for instance one round of all rings.
- round: one step of a ring. turn: one part of a gather, whose messages are under way together.
- workspace: rows of keys and values, one a token: the rank's own, then those that it receives.
- run: adjacent tokens of one sequence on one rank.
- task: a block of queries and the keys that they see, fully or causally. piece: a task inside a kernel's call.
- call: all tasks of a step together, one launch of a kernel.
- route: a message between nodes is cut into parts. A proxy sends each part over its own NIC, in slices.
"""

from balancing.sequences.cost import StepCost, limit_seconds, step_cost
from balancing.sequences.engine.attention import SequenceAttention
from balancing.sequences.engine.attention_call import Statistics
from balancing.sequences.engine.compiler import make_program
from balancing.sequences.engine.program import Program
from balancing.sequences.engine.rank_program import RankProgram, TokenBytes, compile_rank
from balancing.sequences.engine.routing import route
from balancing.sequences.load import causal_area, zigzag_area
from balancing.sequences.micro_batches import MicroBatchPlan, deal_whole, plan_micro_batches
from balancing.sequences.plan import DEFAULT_CHUNK, METHODS, plan_attention, plan_sequences
from balancing.sequences.planners.linear_layout import linear_layout
from balancing.sequences.sequence_plan import AttentionShape, KVExchange, SequencePlan, Shard
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
    "TokenBytes",
    "TokenTraffic",
    "causal_area",
    "compile_rank",
    "deal_whole",
    "kv_traffic",
    "limit_seconds",
    "linear_layout",
    "make_program",
    "plan_attention",
    "plan_micro_batches",
    "plan_sequences",
    "remap_traffic",
    "route",
    "step_cost",
    "zigzag_area",
]
