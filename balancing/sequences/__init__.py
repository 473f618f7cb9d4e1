"""Sequences of very different length: what they cost, on which rank, and attention over them wherever they are.

from balancing.cluster import Cluster
from balancing.sequences import AttentionShape, plan_sequences, render

shape = AttentionShape(hidden=4096, heads=32, kv_heads=8, layers=32, ffn_hidden=14336)
plan = plan_sequences([30000, 1200, 500, 833], Cluster.preset("h200-8x400g"), shape=shape)
print(render(plan))
"""

from balancing.sequences.cost import StepCost, limit_seconds, step_cost
from balancing.sequences.engine.attention import SequenceAttention
from balancing.sequences.engine.compiler import make_program
from balancing.sequences.engine.program import Program
from balancing.sequences.engine.rank_program import Statistics
from balancing.sequences.engine.routing import route
from balancing.sequences.load import causal_area, zigzag_area
from balancing.sequences.plan import DEFAULT_CHUNK, METHODS, plan_sequences
from balancing.sequences.planners.linear_layout import linear_layout
from balancing.sequences.render import render
from balancing.sequences.sequence_plan import AttentionShape, Exchange, SequencePlan, Shard
from balancing.sequences.traffic import Traffic, kv_traffic, remap_traffic

__all__ = [
    "DEFAULT_CHUNK",
    "METHODS",
    "AttentionShape",
    "Exchange",
    "Program",
    "SequenceAttention",
    "SequencePlan",
    "Shard",
    "Statistics",
    "StepCost",
    "Traffic",
    "causal_area",
    "kv_traffic",
    "limit_seconds",
    "linear_layout",
    "make_program",
    "plan_sequences",
    "remap_traffic",
    "render",
    "route",
    "step_cost",
    "zigzag_area",
]
