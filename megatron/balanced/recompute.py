"""Tells a recomputation from a first pass.

Where activations are recomputed, a module first runs without gradients and later again with them, in the order of the
micro-batches. What must be counted or decided once per micro-batch is counted in the first pass and recalled in the
second.
"""

from collections import deque
from collections.abc import Callable

import torch

__all__ = ["Replays"]


class Replays[T]:
    """What the first passes of one module decided, until the passes that repeat them."""

    def __init__(self) -> None:
        self._waiting: deque[T] = deque()

    def decide(self, decide: Callable[[], T]) -> tuple[T, bool]:
        """What `decide` gives in a first pass or gave in the one that this pass repeats, and whether it repeats one."""
        if torch.is_grad_enabled() and self._waiting:
            return self._waiting.popleft(), True
        decided = decide()
        if not torch.is_grad_enabled():
            self._waiting.append(decided)
        return decided, False
