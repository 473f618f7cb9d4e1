"""Sequences of very different length: what they cost, on which rank, and attention over them wherever they are."""

from balancing.sequences.attention import SequenceAttention
from balancing.sequences.layout import AttentionShape, SequencePlan, Shard
from balancing.sequences.load import causal_area, zigzag_area
from balancing.sequences.remap import linear_layout, remap
from balancing.sequences.routing import route
from balancing.sequences.steps import Program
from balancing.sequences.tasks import make_program
from balancing.sequences.way import Statistics

__all__ = [
    "AttentionShape",
    "Program",
    "SequenceAttention",
    "SequencePlan",
    "Shard",
    "Statistics",
    "causal_area",
    "linear_layout",
    "make_program",
    "remap",
    "route",
    "zigzag_area",
]
