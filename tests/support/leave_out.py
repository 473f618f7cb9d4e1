"""Trials whose steps are given, so that a short run has some, whatever the clock says."""

from collections.abc import Collection

__all__ = ["leave_out"]


def leave_out(steps: Collection[int], names: Collection[str] | None = None) -> None:
    """Leave balancers out of the iterations `steps` (from 0) of the runs of this process, and of no other.

    names: the balancers; None for all that a step can leave out.
    """
    from balancing.trials import Trials

    def left_out(self: Trials, iteration: int) -> frozenset[str]:
        chosen = self.names if names is None else [name for name in self.names if name in names]
        return frozenset(chosen) if iteration in steps else frozenset()

    Trials.left_out, Trials.is_trial = left_out, lambda self, iteration: False  # type: ignore[method-assign]
