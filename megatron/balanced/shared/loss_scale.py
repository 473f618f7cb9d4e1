"""One loss scale for all parts of an optimizer.

Megatron-LM gives experts of expert parallelism an optimizer of their own, and with fp16 a loss scale of its own. The
loss is multiplied by the first one alone. An overflow in one part halves the scale of that part alone, so the gradients
of the others would be wrong by a power of two from then on.
"""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from megatron.core.optimizer import ChainedOptimizer

__all__ = ["share_loss_scale", "with_one_loss_scale"]


def with_one_loss_scale(original: Callable) -> Callable:
    """Replaces the method of a `ChainedOptimizer` that divides gradients by the loss scale and looks for overflows."""

    @functools.wraps(original)
    def prepare_grads(self: Any) -> bool:
        """Divide by the scale that the loss has, and let all parts know of an overflow in any. Every rank learns of
        every overflow of a part, so the scales of ranks stay alike as well."""
        scalers = [scaler for part in self.chained_optimizers if (scaler := getattr(part, "grad_scaler", None))]
        before = scalers[0].state_dict() if scalers else {}
        for scaler in scalers:  # a checkpoint of Megatron-LM's may hold several scales
            scaler.load_state_dict(before)
        overflow: bool = original(self)
        for scaler in scalers if overflow else ():
            scaler.load_state_dict(before)
            scaler.update(True)
        return overflow

    return prepare_grads


def share_loss_scale(scale_loss: Any) -> None:
    """The same for the optimizer of a loop, known by its method `scale_loss`, which the model's config holds."""
    optimizer = getattr(scale_loss, "__self__", None)
    if isinstance(optimizer, ChainedOptimizer) and "prepare_grads" not in vars(optimizer):
        optimizer.prepare_grads = MethodType(with_one_loss_scale(ChainedOptimizer.prepare_grads), optimizer)
