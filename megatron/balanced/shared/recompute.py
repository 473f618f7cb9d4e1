"""Recognition of recomputed forward passes.

Under activation recompute a module runs without gradients first and with gradients later, in the same order of
micro-batches. Decisions and counts that must be made once per micro-batch are made in the first pass and reused in the
second.
"""

from collections import deque
from collections.abc import Callable

import torch

__all__ = ["Replays"]


class Replays[T]:
    """The decisions of the first passes of one module, kept until these passes are recomputed."""

    def __init__(self) -> None:
        self._waiting: deque[T] = deque()

    def clear(self) -> None:
        """Forget first passes that will not be recomputed, since their schedule has failed."""
        self._waiting.clear()

    def decide(self, decide: Callable[[], T]) -> tuple[T, bool]:
        """Returns the result of `decide` in a first pass, or the stored result if this pass recomputes a first pass;
        and whether this pass is a recomputation."""
        if torch.is_grad_enabled() and self._waiting:
            return self._waiting.popleft(), True
        decided = decide()
        if not torch.is_grad_enabled():
            self._waiting.append(decided)
        return decided, False
