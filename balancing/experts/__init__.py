"""Replicas of hot experts in expert parallelism, so that all ranks compute for equally long.

In expert-parallel training, the rank with the most popular experts determines the step time. `plan_replicas` decides
from a predicted load which experts get replicas on which ranks. `Splitter` divides the tokens of each expert over its
instances, from the load of the current micro-batch. `engine` sends the replicas' weights and returns their gradients
while other layers compute. Routing, losses and checkpoints do not change.

Glossary
    expert, logical expert   one of the router's choices. Its home owns its weights, optimizer state and checkpoint.
    home                     the rank that owns an expert, as Megatron-LM assigns it: contiguous blocks of experts.
    replica                  a copy of an expert's weights on another rank, for one iteration.
    slot                     memory for one replica on one rank. Every rank has the same number of slots.
    instance                 the expert at home or one of its replicas; instances compute tokens.
    physical expert          a place for an instance, numbered rank by rank: homes first, then slots.
    late copy                a replica that is added inside the layer, from the load of the micro-batch (`late`).
    placement                which expert is in which slot of which rank (`ReplicaPlacement`). Planners return it.
    load                     tokens [source_rank, expert]: how many tokens on each rank chose each expert.
    split                    how many of these tokens each instance serves: [source_rank, physical].
    quota                    the tokens that one instance serves, over all source ranks.
    imbalance                tokens of the busiest rank over the mean of all ranks.
    chain, hop               the order of ranks in which an expert's weights are relayed, and one link of it.
    Trans, Agg               the paper's names for sending weights to replicas and returning their gradients.
    resident, shared         the two modes of slots: each layer has its own, or all layers share two sets.

Example: 3 ranks, 3 experts, one slot a rank. Expert 0 is hot.

    home                                [0, 1, 2]            expert e lives on rank e
    slot_expert                         [[-1], [0], [0]]     ranks 1 and 2 hold a replica of expert 0
    phys2log                            [0, -1, 1, 0, 2, 0]  two physical experts a rank: its home, its slot
    load of each rank                   [30, 10, 5]          so experts have 90, 30 and 15 tokens
    tokens of ranks without replicas    [90, 30, 15]         imbalance 2
    tokens of ranks with replicas       [45, 45, 45]         quotas of expert 0: 45, 15 and 30
    tokens sent without / with          90 / 45              of 135; tokens served on their own rank are not sent
"""

from balancing.experts.cost import ExpertShape, MoELayerCost, TransferWindow, break_even_tokens, layer_cost
from balancing.experts.late import add_late_copies, late_tokens
from balancing.experts.load_history import LoadHistory, total_variation
from balancing.experts.placement import Copy, ReplicaPlacement, contiguous_homes
from balancing.experts.plan import METHODS, plan_replicas, plan_replicas_layers
from balancing.experts.split.split import Splitter, split_tokens, traffic

__all__ = [
    "METHODS",
    "Copy",
    "ExpertShape",
    "LoadHistory",
    "MoELayerCost",
    "ReplicaPlacement",
    "Splitter",
    "TransferWindow",
    "add_late_copies",
    "break_even_tokens",
    "contiguous_homes",
    "late_tokens",
    "layer_cost",
    "plan_replicas",
    "plan_replicas_layers",
    "split_tokens",
    "total_variation",
    "traffic",
]
