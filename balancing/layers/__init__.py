"""Balanced pipeline stages: measured costs of layers, and plans of stages that a simulated step scores.

Stages, chunks, plans, layouts, schedules and timelines are those of `balancing.pipeline`. Beside them:

cost     device seconds of forward and backward of one layer and one micro-batch (`LayerSeconds`)
load     the sum of the costs on a stage
bounds   a plan as the first layer of each chunk along the pipeline, followed by the number of layers
move     a layer that changes its stage, with weights, optimizer state and buffers
gate     the decision whether the gain of a plan pays for its moves
repack   the change to fewer stages
release  the ranks that leave the job after a repack

Six layers on two stages of one chunk: `StagePlan.from_counts(((4,), (2,)))` has chunks (((0, 1, 2, 3),), ((4, 5),)),
bounds (0, 4, 6) and layout "Et*4|ttL". The plan ((3,), (3,)) is one move away: layer 3 goes from stage 0 to stage 1.
"""

from balancing.layers.cost import CostAverage, LayerSeconds, over_ranks
from balancing.layers.gate import Decision, Gate, GateConfig, LayerMove, Predicted, layer_moves, migration_seconds
from balancing.layers.memory import LayerMemory, in_flight, stage_memory
from balancing.layers.plan import Pipeline, plan_partition, plan_pipeline, plan_stages
from balancing.layers.planners.refine import refine_plan
from balancing.layers.repack import Release, Repack, Running, choose_repack, release_of, repack_options
from balancing.pipeline.stage_plan import StagePlan

__all__ = [
    "CostAverage",
    "Decision",
    "Gate",
    "GateConfig",
    "LayerMemory",
    "LayerMove",
    "LayerSeconds",
    "Pipeline",
    "Predicted",
    "Release",
    "Repack",
    "Running",
    "StagePlan",
    "choose_repack",
    "in_flight",
    "layer_moves",
    "migration_seconds",
    "over_ranks",
    "plan_partition",
    "plan_pipeline",
    "plan_stages",
    "refine_plan",
    "release_of",
    "repack_options",
    "stage_memory",
]
