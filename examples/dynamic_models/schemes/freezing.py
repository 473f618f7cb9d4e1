"""Schedules of freezing: the number of frozen layers at the front of a model.

The front layers of a network converge first, and their backward pass, gradients and optimizer state are then wasted.
Frozen layers are always a prefix, with the embedding, since only then does the backward pass end early.
`scheduled_prefix` freezes at fixed iterations. `PlasticityFreezer` freezes as Egeria does (arXiv 2201.06227, section
4): plasticity is how much the structure of the front layer's output differs from that of an earlier version of the
layer. A layer whose plasticity is stationary is frozen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

__all__ = ["PlasticityFreezer", "scheduled_prefix", "similarity_loss"]


def scheduled_prefix(iteration: int, *, layers: int, start: int, interval: int = 0, until: int = 0) -> int:
    """The number of frozen layers in `iteration` (from 0).

    layers: most layers to freeze.
    start: iteration at which the first one freezes.
    interval: iterations until the next one freezes; 0 freezes all at `start`.
    until: iteration from which no layer is frozen; 0 for never.
    """
    if iteration < start or (until and iteration >= until):
        return 0
    return layers if not interval else min(layers, 1 + (iteration - start) // interval)


def similarity_loss(output: torch.Tensor, reference: torch.Tensor) -> float:
    """How differently two outputs [tokens, hidden] of a layer relate tokens to each other.

    The similarity-preserving loss of Tung and Mori: mean squared difference of the row-normalized matrices of inner
    products. 0 for equal structure; invariant to rotations and a common scale of the outputs. At most 4 / tokens.
    """

    def structure(hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(hidden @ hidden.T, dim=1)

    return float((structure(output) - structure(reference)).square().mean())


@dataclass
class PlasticityFreezer:
    """Grows a frozen prefix from measurements of the front layer's plasticity.

    layers: most layers to freeze.
    tolerance, patience: a layer freezes when the slope was below `tolerance` x the steepest one of this layer
        `patience` times in a row.
    window: measurements over which plasticity is smoothed and its slope fitted.

    When the learning rate falls to a tenth of its value at the first freezing, layers change again: all are unfrozen,
    and patience is halved.
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
        """Add a measurement of the first layer that is not frozen. Returns the number of frozen layers."""
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
        """The state of later decisions, in plain numbers."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`. `layers`, `tolerance` and `window` stay those of this run."""
        vars(self).update({k: v for k, v in state.items() if k not in ("layers", "tolerance", "window")})
        self.frozen = min(self.frozen, self.layers)


def _slope(values: Sequence[float]) -> float:
    """Slope of the least-squares line, per measurement."""
    return float(np.polyfit(np.arange(len(values)), values, 1)[0]) if len(values) > 1 else 0.0
