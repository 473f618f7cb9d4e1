"""Dynamic models: schemes that make a model cheaper while it trains, and its layers uneven.

Each scheme is one file: what is frozen, pruned, skipped or routed, and when. None of them balances anything; they are
why `balancing.layers` exists, and train by themselves.
"""

from balancing.dynamics.config import DynamicsConfig
from balancing.dynamics.early_exit import exits, saturation, weigh_loss
from balancing.dynamics.freezing import PlasticityFreezer, scheduled_prefix, similarity_loss
from balancing.dynamics.gather_tokens import put_back, take, tokens_of
from balancing.dynamics.mixture_of_depths import choose_tokens, gate, is_routed
from balancing.dynamics.pruning import cubic_sparsity, global_threshold, is_pruning_iteration
from balancing.dynamics.sparse_attention import block_sparse_attention, choose_blocks, hash_scores, mean_scores
from balancing.dynamics.sparse_linear import SparsePattern, sparse_linear

__all__ = [
    "DynamicsConfig",
    "PlasticityFreezer",
    "SparsePattern",
    "block_sparse_attention",
    "choose_blocks",
    "choose_tokens",
    "cubic_sparsity",
    "exits",
    "gate",
    "global_threshold",
    "hash_scores",
    "is_pruning_iteration",
    "is_routed",
    "mean_scores",
    "put_back",
    "saturation",
    "scheduled_prefix",
    "similarity_loss",
    "sparse_linear",
    "take",
    "tokens_of",
    "weigh_loss",
]
