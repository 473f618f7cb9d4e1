"""The schemes, on torch alone. Each reduces the cost of a model while it trains, and makes its layers uneven.

freezing             a prefix of the model stops training, by a schedule or by measured plasticity
pruning              weights of small magnitude are set to zero; `sparse_linear` multiplies by the rest
sparse attention     each block of queries attends to a few blocks of keys
early exit           tokens that have stopped changing skip the remaining layers
mixture of depths    routed layers run for a fixed fraction of the tokens

Each scheme is a file of its own and trains without a balancer. `balancing.layers` balances the uneven stages. The last
two share `gather_tokens`.
"""

from examples.dynamic_models.schemes.early_exit import exits, saturation, weigh_loss
from examples.dynamic_models.schemes.freezing import PlasticityFreezer, scheduled_prefix, similarity_loss
from examples.dynamic_models.schemes.gather_tokens import put_back, take, tokens_of
from examples.dynamic_models.schemes.mixture_of_depths import choose_tokens, gate, is_routed
from examples.dynamic_models.schemes.pruning import cubic_sparsity, global_threshold, is_pruning_iteration
from examples.dynamic_models.schemes.sparse_attention import (
    block_sparse_attention,
    choose_blocks,
    hash_scores,
    mean_scores,
)
from examples.dynamic_models.schemes.sparse_linear import SparsePattern, sparse_linear

__all__ = [
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
