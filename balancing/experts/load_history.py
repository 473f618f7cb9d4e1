"""How many tokens each expert gets, from which rank, and how fast that changes.

A plan that is ready before the tokens are needs a load that is not known yet. Loads of neighbouring iterations resemble
each other (Pro-Prophet's locality), more or less: recorded ones differ by a hundredth of all tokens from one iteration
to the next or by a third, depending on the model and the stage of training. So a history does not assume a predictor,
it keeps score of several and uses the one that would have been best lately, and tells how large its error is.
"""

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["LoadHistory", "total_variation"]

_DECAYS = (0.0, 0.5, 0.8)  # weight of the past in each predictor's average; 0 repeats the last load
_SCORE_DECAY = 0.8  # of the past in the predictors' scores: about the last five loads count


def total_variation(a: ArrayLike, b: ArrayLike) -> np.ndarray:
    """The part of all tokens that goes to other experts in `b` than in `a`, 0 to 1: float [...].

    a, b: [..., source_rank, expert]. Sources are added up, and amounts do not matter, only proportions. No tokens at
    all are as far as can be from any (1) and equal to none (0).
    """
    p, q = (np.asarray(load, dtype=np.float64).sum(-2) for load in (a, b))
    total_p, total_q = p.sum(-1, keepdims=True), q.sum(-1, keepdims=True)
    p, q = p / np.where(total_p > 0, total_p, 1), q / np.where(total_q > 0, total_q, 1)
    apart = np.abs(p - q).sum(-1) / 2
    return np.where((total_p > 0)[..., 0] == (total_q > 0)[..., 0], apart, 1.0)


class LoadHistory:
    """The loads of one layer, or of several layers together, as they come in.

    A record is a load [source_rank, expert], or [layer, source_rank, expert]; all have the same shape. What it returns
    has one entry a layer then.
    """

    def __init__(self) -> None:
        self._averages: list[np.ndarray] = []
        self._errors: list[np.ndarray] = []
        self._last: np.ndarray | None = None
        self._drift: np.ndarray = np.array(0.0)
        self._recorded = 0

    def __len__(self) -> int:
        """Loads recorded."""
        return self._recorded

    def record(self, load: ArrayLike) -> np.ndarray:
        """Take in the next load; returns the drift from the one before, 0 for the first: float [] or [layer].

        Raises ValueError for a load of another shape than the first, or negative.
        """
        counts = np.asarray(load, dtype=np.float64)
        if counts.ndim not in (2, 3) or not np.isfinite(counts).all() or (counts < 0).any():
            raise ValueError(
                f"load of shape {counts.shape} must be [source_rank, expert] or [layer, source_rank, expert], "
                "finite and not negative"
            )
        if self._last is None:
            self._averages = [counts.copy() for _ in _DECAYS]
            self._errors = [np.zeros(counts.shape[:-2]) for _ in _DECAYS]
            self._drift = np.zeros(counts.shape[:-2])
        elif counts.shape != self._last.shape:
            raise ValueError(f"load of shape {counts.shape} follows loads of shape {self._last.shape}")
        else:
            self._drift = total_variation(self._last, counts)
            for at, decay in enumerate(_DECAYS):
                error = total_variation(self._averages[at], counts)
                self._errors[at] = _SCORE_DECAY * self._errors[at] + (1 - _SCORE_DECAY) * error
                self._averages[at] = decay * self._averages[at] + (1 - decay) * counts
        self._last = counts
        self._recorded += 1
        return self._drift

    @property
    def drift(self) -> np.ndarray:
        """Total variation between the last two loads: float [] or [layer]."""
        return self._drift

    @property
    def error(self) -> np.ndarray:
        """Total variation between predictions and what came, lately, of the predictor in use: float [] or [layer]."""
        assert self._last is not None, "nothing has been recorded"
        return np.min(self._errors, axis=0) / (1 - _SCORE_DECAY ** max(1, self._recorded - 1))

    def predict(self) -> np.ndarray:
        """The load to expect next, rounded: int64 in the shape of the records.

        Each layer takes the predictor with the least error lately; the last load if none is better.
        Raises ValueError if nothing has been recorded.
        """
        if self._last is None:
            raise ValueError("no load is recorded yet, so none can be predicted; run a step without replicas first")
        best = np.argmin(self._errors, axis=0)  # the first of equals, which is the last load
        stacked = np.stack(self._averages)
        chosen = stacked[best] if best.ndim == 0 else stacked[best, np.arange(len(best))]
        return np.rint(chosen).astype(np.int64)

    def interval(self, tolerance: float, *, most: int = 100) -> int:
        """For how many records a plan can be kept until the load may be expected to have drifted by `tolerance`.

        Steps are taken to add up, so this is careful. At least 1, at most `most`; of several layers the least.
        """
        drift = float(np.max(self.error)) if self._recorded > 1 else tolerance
        return most if drift * most <= tolerance else max(1, int(tolerance / drift))
