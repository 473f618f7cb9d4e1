"""Early exit while training: a token that is done skips the layers that are left.

A token is done when a layer hardly changes it any more: the cosine between what went into the layer and what came out
(hidden-state saturation, CALM, arXiv 2207.07061, section 3.1) reaches a threshold. It needs no head at the exit, so any
pipeline stage can decide. The state of an exited token goes through the rest of the model unchanged, and final norm and
head, which all exits share, turn it into a loss: that is the loss of its exit. Exited tokens are not attended to by
those that go on.
"""

from typing import Any

import torch

__all__ = ["exits", "saturation", "weigh_loss"]


def saturation(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """The confidence [s, b] of tokens whose hidden states [s, b, h] a layer made `after` of `before`: their cosine."""
    return torch.nn.functional.cosine_similarity(before.detach().float(), after.detach().float(), dim=-1)


def exits(confidence: torch.Tensor, active: torch.Tensor, threshold: float) -> torch.Tensor:
    """Which tokens exit here, bool [s, b]: those of `active` [s, b] whose confidence reaches `threshold`.

    The least confident token of each sequence goes on in any case, so that no layer is without a token.
    """
    done = active & (confidence >= threshold)
    least = confidence.masked_fill(~active, float("inf")).argmin(0, keepdim=True)
    return done.scatter(0, least, False)


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (weight,) = ctx.saved_tensors
        return gradients[0] * weight, None


def weigh_loss(loss: torch.Tensor, active: torch.Tensor, weight: float) -> torch.Tensor:
    """The loss [b, s] of each token, whose gradient counts `weight` times for tokens that exited.

    active: bool [s, b]. The value stays what it is, to be compared with that of other runs.
    """
    return _ScaledGradient.apply(loss, torch.where(active.T, 1.0, weight).to(loss.dtype))
