"""Run a layer for some of the tokens: take them out, put what became of them back.

Tokens stay in their order, so that causal attention among those taken is causal. Hidden states are [s, b, h], sequence
first, as in Megatron-LM; which tokens is [k, b], positions ascending for each sequence of the batch.
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
    """Which tokens are set in `active` [s, b]: `index` [k, b], and `real` [k, b], bool.

    k is the most that any sequence has. The rest of a sequence with fewer is filled with tokens that are not active;
    they come last, so that no active token attends to them, and `real` is False for them.
    """
    counts = active.sum(0)
    most = int(counts.max())
    index = torch.argsort(active.logical_not().to(torch.int8), dim=0, stable=True)[:most]
    return index, torch.arange(most, device=active.device)[:, None] < counts
