"""Balanced pipeline stages: measured costs of layers, plans of stages, and a simulated step that scores the plans.

stage    the ranks of one position in the pipeline
chunk    consecutive layers of a stage; an interleaved schedule has several chunks a stage
cost     device seconds of forward and backward of one layer and one micro-batch (`LayerSeconds`)
load     the sum of the costs on a stage
plan     the layers of each chunk of each stage (`StagePlan`), in the order of the model
bounds   a plan as the first layer of each chunk along the pipeline, followed by the number of layers
layout   a plan as the string of Megatron-LM's --pipeline-model-parallel-layout
move     a layer that changes its stage, with weights, optimizer state and buffers
gate     the decision whether the gain of a plan pays for its moves
repack   the change to fewer stages
release  the ranks that leave the job after a repack

Six layers on two stages of one chunk: `StagePlan.from_counts(((4,), (2,)))` has chunks (((0, 1, 2, 3),), ((4, 5),)),
bounds (0, 4, 6) and layout "Et*4|ttL". The plan ((3,), (3,)) is one move away: layer 3 goes from stage 0 to stage 1.
"""

from balancing.layers.cost import CostAverage, LayerSeconds, over_ranks
from balancing.layers.gate import Decision, Gate, GateConfig, LayerMove, Predicted, layer_moves, migration_seconds
from balancing.layers.layout import from_layout, to_layout
from balancing.layers.memory import LayerMemory, in_flight, stage_memory
from balancing.layers.plan import Pipeline, plan_partition, plan_pipeline, plan_stages
from balancing.layers.planners.refine import refine_plan
from balancing.layers.repack import Release, Repack, Running, choose_repack, release_of, repack_options
from balancing.layers.simulator.schedule import MEGATRONS, Operation, Schedule, operations
from balancing.layers.simulator.timeline import Timeline, simulate_schedule, simulate_steps
from balancing.layers.stage_plan import StagePlan

__all__ = [
    "MEGATRONS",
    "CostAverage",
    "Decision",
    "Gate",
    "GateConfig",
    "LayerMemory",
    "LayerMove",
    "LayerSeconds",
    "Operation",
    "Pipeline",
    "Predicted",
    "Release",
    "Repack",
    "Running",
    "Schedule",
    "StagePlan",
    "Timeline",
    "choose_repack",
    "from_layout",
    "in_flight",
    "layer_moves",
    "migration_seconds",
    "operations",
    "over_ranks",
    "plan_partition",
    "plan_pipeline",
    "plan_stages",
    "refine_plan",
    "release_of",
    "repack_options",
    "simulate_schedule",
    "simulate_steps",
    "stage_memory",
    "to_layout",
]
