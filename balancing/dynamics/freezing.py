"""When does the frozen prefix of a model grow?

Layers at the front of a network settle first. Once they have, their backward pass, gradients and optimizer state are
spent for nothing. What is frozen is always a prefix, embedding included, for only then does the backward pass end
early. `scheduled_prefix` freezes at fixed iterations. `PlasticityFreezer` freezes as Egeria does (arXiv 2201.06227,
section 4): the plasticity of the front layer is how much the structure of what it computes changed since an earlier
version of it, and a layer whose plasticity has stopped moving is frozen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

__all__ = ["PlasticityFreezer", "scheduled_prefix", "similarity_loss"]


def scheduled_prefix(iteration: int, *, layers: int, start: int, interval: int = 0, until: int = 0) -> int:
    """How many layers are frozen in `iteration` (from 0).

    The first at `start`, one more every `interval` iterations up to `layers`; all of them at `start` if it is 0. None
    from `until` on, if that is not 0.
    """
    if iteration < start or (until and iteration >= until):
        return 0
    return layers if not interval else min(layers, 1 + (iteration - start) // interval)


def similarity_loss(output: torch.Tensor, reference: torch.Tensor) -> float:
    """How differently two versions of a layer relate the same tokens to each other; both [tokens, hidden].

    The similarity-preserving loss of Tung and Mori: mean squared difference of the row-normalized matrices of inner
    products. 0 for equal structure; it does not see a rotation or a common scale of the outputs. At most 4 / tokens.
    """

    def structure(hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(hidden @ hidden.T, dim=1)

    return float((structure(output) - structure(reference)).square().mean())


@dataclass
class PlasticityFreezer:
    """Grows a frozen prefix from measurements of the front layer's plasticity. Plain numbers in, a count out.

    layers: most layers that may be frozen. window: measurements over which plasticity is smoothed and its slope fitted.
    tolerance, patience: the slope must stay below `tolerance` x the steepest one seen for this layer `patience` times
    in a row. The learning rate falling to a tenth of what it was at the first freezing unfreezes all, as layers then
    move again; patience is halved from there on.
    """

    layers: int
    tolerance: float = 0.2
    patience: int = 4
    window: int = 4
    frozen: int = 0
    history: list[float] = field(default_factory=list)  # smoothed plasticity of the front layer
    recent: list[float] = field(default_factory=list)  # as measured, at most `window`
    steepest: float = 0.0
    still: int = 0
    frozen_at_lr: float = 0.0

    def observe(self, plasticity: float, learning_rate: float) -> int:
        """Take one more measurement of the first layer that is not frozen. Returns how many layers are frozen now."""
        if self.frozen and learning_rate <= 0.1 * self.frozen_at_lr:
            self.frozen, self.patience = 0, max(1, self.patience // 2)
            self._begin_layer()
            return 0
        if self.frozen >= self.layers:
            return self.frozen
        self.recent = [*self.recent, plasticity][-self.window :]
        self.history = [*self.history, float(np.mean(self.recent))][-self.window :]
        if len(self.history) < self.window:
            return self.frozen
        slope = abs(_slope(self.history))
        self.steepest = max(self.steepest, slope)
        rounding = 1e-9 * self.history[-1]
        self.still = self.still + 1 if slope <= max(self.tolerance * self.steepest, rounding) else 0
        if self.still >= self.patience:
            if not self.frozen:
                self.frozen_at_lr = learning_rate
            self.frozen += 1
            self._begin_layer()
        return self.frozen

    def _begin_layer(self) -> None:
        self.history, self.recent, self.steepest, self.still = [], [], 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        """Everything that later decisions depend on, in plain numbers."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. `layers` and `tolerance` stay those of this run."""
        vars(self).update({k: v for k, v in state.items() if k not in ("layers", "tolerance", "window")})
        self.frozen = min(self.frozen, self.layers)


def _slope(values: Sequence[float]) -> float:
    """Of the straight line with the least squares, per measurement."""
    return float(np.polyfit(np.arange(len(values)), values, 1)[0]) if len(values) > 1 else 0.0
