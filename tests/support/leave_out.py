"""Trials whose steps are given, so that a short run has some, whatever the clock says."""

from collections.abc import Collection

__all__ = ["leave_out"]


def leave_out(steps: Collection[int]) -> None:
    """Leave all balancers that a step can leave out, out of the iterations `steps` (from 0) of the runs of this
    process, and of no other."""
    from balancing.trials import TrialSchedule

    def left_out(self: TrialSchedule, iteration: int, off: frozenset[str]) -> frozenset[str]:
        return frozenset(self.names) if iteration in steps else frozenset()

    TrialSchedule.left_out = left_out  # type: ignore[method-assign]
    TrialSchedule.combination = lambda self, iteration: None  # type: ignore[method-assign]
