"""Mixture of depths: a routed layer processes a fixed fraction of the tokens, the others bypass it.

Expert-choice routing (Raposo et al., arXiv 2404.02258, section 3): a router scores every token, and the layer processes
the k tokens of each sequence with the highest scores. k is known in advance, and so is the cost of the layer. The
router learns because its score scales what the layer adds to these tokens.
"""

import math

import torch

__all__ = ["choose_tokens", "gate", "is_routed"]


def is_routed(layer_number: int, every: int) -> bool:
    """True for layers `every`, 2 x `every`, ... (from 1)."""
    return not layer_number % every


def choose_tokens(scores: torch.Tensor, share: float) -> torch.Tensor:
    """Positions [k, b], ascending, of the ceil(share x s) tokens with the highest scores [s, b] of each sequence."""
    count = max(1, math.ceil(share * scores.shape[0]))
    return torch.topk(scores, count, dim=0).indices.sort(dim=0).values


def gate(scores: torch.Tensor) -> torch.Tensor:
    """The factor on what a layer adds to a token: between 0 and 2, and 1 for a score of 0."""
    return 2 * torch.sigmoid(scores)
