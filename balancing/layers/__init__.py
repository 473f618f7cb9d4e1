"""Layers between pipeline stages: what they cost, which stage computes which, and what a schedule makes of it."""

from balancing.layers.cost import CostAverage, LayerSeconds, over_ranks
from balancing.layers.gate import Decision, Gate, GateConfig, LayerMove, layer_moves, migration_seconds
from balancing.layers.layout import from_layout, to_layout
from balancing.layers.memory import LayerMemory, in_flight, stage_memory
from balancing.layers.plan import plan_stages
from balancing.layers.planners.refine import refine_plan
from balancing.layers.repack import Release, Repack, choose_repack, first_fit, release_of, repack_options
from balancing.layers.simulator.schedule import Operation, operations
from balancing.layers.simulator.timeline import Span, Timeline, simulate_schedule, simulate_steps
from balancing.layers.stage_plan import StagePlan

__all__ = [
    "CostAverage",
    "Decision",
    "Gate",
    "GateConfig",
    "LayerMemory",
    "LayerMove",
    "LayerSeconds",
    "Operation",
    "Release",
    "Repack",
    "Span",
    "StagePlan",
    "Timeline",
    "choose_repack",
    "first_fit",
    "from_layout",
    "in_flight",
    "layer_moves",
    "migration_seconds",
    "operations",
    "over_ranks",
    "plan_stages",
    "refine_plan",
    "release_of",
    "repack_options",
    "simulate_schedule",
    "simulate_steps",
    "stage_memory",
    "to_layout",
]
