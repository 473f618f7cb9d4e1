"""Balanced pipeline stages: measured costs of layers, and plans of stages that a simulated step scores.

Stages, chunks, plans, layouts, schedules and timelines are those of `balancing.pipeline`. `reference.py` is the search
in a page.

Glossary
    cost     device seconds of forward and backward of one layer and one micro-batch (`LayerSeconds`)
    load     the sum of the costs on a stage
    bounds   a plan as the first layer of each chunk along the pipeline, followed by the number of layers
    move     a layer that changes its stage, with weights, optimizer state and buffers
    gate     the decision whether the gain of a plan pays for its moves
    repack   the change to fewer stages
    release  the ranks that leave the job after a repack

Example: 3 stages, 6 layers that cost [4, 2, 2, 2, 1, 1] ms, forward and backward of one micro-batch.

    layers of a stage   bounds         layout      load, ms      slowest over mean
    equal numbers       (0, 2, 4, 6)   Ett|tt|ttL  [6, 4, 2]     1.5
    `plan_stages`       (0, 1, 3, 6)   Et|tt|tttL  [4, 4, 4]     1.0

From the first plan to the second, layers 1 and 3 move to the next stage. A step of 8 micro-batches takes 50 and 40 ms
if messages are free (`balancing.pipeline.simulate_schedule`).
"""

from balancing.layers.cost import CostAverage, LayerSeconds, over_ranks
from balancing.layers.gate import (
    Decision,
    Gate,
    GateConfig,
    LayerMove,
    Predicted,
    layer_moves,
    migration_seconds,
    noise_of_gain,
)
from balancing.layers.memory import LayerMemory, in_flight, stage_memory
from balancing.layers.plan import Pipeline, Running, plan_partition, plan_pipeline, plan_stages
from balancing.layers.planners.refine import refine_plan
from balancing.layers.repack import Release, Repack, choose_repack, release_of, repack_options
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
    "noise_of_gain",
    "over_ranks",
    "plan_partition",
    "plan_pipeline",
    "plan_stages",
    "refine_plan",
    "release_of",
    "repack_options",
    "stage_memory",
]
