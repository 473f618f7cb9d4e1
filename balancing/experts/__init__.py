"""Experts that get more tokens than others: copies of them on other ranks, so that every rank computes equally long.

In expert-parallel training the rank with the hottest experts sets the pace. `plan_replicas` decides from an expected
load which experts get replicas on which ranks, `Splitter` divides the tokens that really came over the instances, and
weights and gradients travel under other compute. Routing, losses and checkpoints stay what they are.
"""

from balancing.experts.cost import ExpertShape, MoELayerCost, break_even_tokens, layer_cost
from balancing.experts.engine.simulator import BlockSeconds, exposed_seconds, render_schedule, simulate_iteration
from balancing.experts.load_history import LoadHistory, total_variation
from balancing.experts.placement import Copy, ReplicaPlacement, contiguous_homes
from balancing.experts.plan import METHODS, plan_replicas, plan_replicas_layers
from balancing.experts.planners.repair import repair
from balancing.experts.split.split import Splitter, split_tokens, traffic
from balancing.experts.trace import (
    LoadTrace,
    read_load_trace,
    read_reported_loads,
    read_routing_trace,
    write_load_trace,
)

__all__ = [
    "METHODS",
    "BlockSeconds",
    "Copy",
    "ExpertShape",
    "LoadHistory",
    "LoadTrace",
    "MoELayerCost",
    "ReplicaPlacement",
    "Splitter",
    "break_even_tokens",
    "contiguous_homes",
    "exposed_seconds",
    "layer_cost",
    "plan_replicas",
    "plan_replicas_layers",
    "read_load_trace",
    "read_reported_loads",
    "read_routing_trace",
    "render_schedule",
    "repair",
    "simulate_iteration",
    "split_tokens",
    "total_variation",
    "traffic",
    "write_load_trace",
]
