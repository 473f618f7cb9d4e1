"""What a pipeline is, for all who plan for one: which stage has which layers, in which order a stage works, and when.

stage     the ranks of one position in the pipeline
chunk     consecutive layers of a stage; an interleaved schedule has several chunks a stage
plan      the layers of each chunk of each stage (`StagePlan`), in the order of the model
fixed     the parts that no plan moves: embedding, head and tail (`balancing.pipeline.fixed_parts`)
layout    a plan as the string of Megatron-LM's --pipeline-model-parallel-layout
pattern   the kinds of layers of a hybrid model, as the string of Megatron-LM's --hybrid-layer-pattern
schedule  the order of forward and backward passes on each stage (`Schedule`)
timeline  when each of them begins and ends, simulated (`Timeline`)

Nothing here knows what is balanced. `balancing.layers` and `balancing.sequences` plan with it.
"""

from balancing.pipeline.layout import from_layout, to_layout
from balancing.pipeline.pattern import KINDS, Pattern, read_pattern
from balancing.pipeline.schedule import MEGATRON_DEFAULTS, Operation, Schedule, operations
from balancing.pipeline.stage_plan import StagePlan
from balancing.pipeline.timeline import Timeline, simulate_schedule, simulate_steps

__all__ = [
    "KINDS",
    "MEGATRON_DEFAULTS",
    "Operation",
    "Pattern",
    "Schedule",
    "StagePlan",
    "Timeline",
    "from_layout",
    "operations",
    "read_pattern",
    "simulate_schedule",
    "simulate_steps",
    "to_layout",
]
