"""Dynamic models: schemes that make a model cheaper while it trains, and its layers uneven.

Each scheme is one file: what is frozen, pruned, skipped or routed, and when. None of them balances anything; they are
why `balancing.layers` exists, and train by themselves.
"""

from balancing.dynamics.config import DynamicsConfig
from balancing.dynamics.freezing import PlasticityFreezer, scheduled_prefix, similarity_loss
from balancing.dynamics.pruning import cubic_sparsity, global_threshold, is_pruning_iteration
from balancing.dynamics.sparse_linear import SparsePattern, sparse_linear

__all__ = [
    "DynamicsConfig",
    "PlasticityFreezer",
    "SparsePattern",
    "cubic_sparsity",
    "global_threshold",
    "is_pruning_iteration",
    "scheduled_prefix",
    "similarity_loss",
    "sparse_linear",
]
