"""Early exit during training: a token that has stopped changing skips the remaining layers.

A token exits when the cosine between input and output of a layer (hidden-state saturation, CALM, arXiv 2207.07061,
section 3.1) reaches a threshold. No head is needed at the exit, so any pipeline stage can decide. The hidden state of
an exited token passes through the rest of the model unchanged. The model's final norm and head compute its loss; all
exits share them. Tokens that continue do not attend to exited ones.
"""

from typing import Any

import torch

__all__ = ["exits", "saturation", "weigh_loss"]


def saturation(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Confidence [s, b] of tokens: the cosine of the hidden states [s, b, h] before and after a layer."""
    return torch.nn.functional.cosine_similarity(before.detach().float(), after.detach().float(), dim=-1)


def exits(confidence: torch.Tensor, active: torch.Tensor, threshold: float) -> torch.Tensor:
    """The tokens that exit here, bool [s, b]: those of `active` [s, b] whose confidence [s, b] reaches `threshold`.

    The least confident token of each sequence always continues, so that no layer is without tokens.
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
    """Multiply the gradient of the loss [b, s] by `weight` for tokens that exited.

    active: bool [s, b]. The value of the loss does not change, so it can be compared with other runs.
    """
    return _ScaledGradient.apply(loss, torch.where(active.T, 1.0, weight).to(loss.dtype))
