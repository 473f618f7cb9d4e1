"""Gather and scatter of tokens, to run a layer for a part of them.

Tokens keep their order, so causal attention among the gathered tokens is causal. Hidden states are [s, b, h], sequence
first, as in Megatron-LM; an index of tokens is [k, b], positions ascending for each sequence of the batch.
"""

import torch

__all__ = ["put_back", "take", "tokens_of"]


def take(hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The tokens `index` [k, b] of `hidden` [s, b, h] -> [k, b, h]. Differentiable."""
    return hidden.gather(0, index[:, :, None].expand(-1, -1, hidden.shape[2]))


def put_back(hidden: torch.Tensor, index: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
    """`hidden` [s, b, h] with `change` [k, b, h] added to the tokens `index` [k, b]. Differentiable in both."""
    return hidden.scatter_add(0, index[:, :, None].expand(-1, -1, hidden.shape[2]), change)


def tokens_of(active: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that are set in `active` [s, b]: `index` [k, b], and `real` [k, b], bool.

    k is the largest number of any sequence. Sequences with fewer are padded with tokens that are not active; these come
    last, so that no active token attends to them, and `real` is False for them.
    """
    counts = active.sum(0)
    most = int(counts.max())
    index = torch.argsort(active.logical_not().to(torch.int8), dim=0, stable=True)[:most]
    return index, torch.arange(most, device=active.device)[:, None] < counts
