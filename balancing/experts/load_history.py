"""History of an MoE layer's load: its drift from iteration to iteration, and a prediction of the next load.

Replicas are placed before the tokens are routed, so the planner needs a predicted load. Loads of neighbouring
iterations are similar (Pro-Prophet's locality). How similar depends on the model and the phase of training: in recorded
runs, 1 % to 33 % of all tokens change experts per iteration. `LoadHistory` therefore evaluates several predictors on
past loads and uses the one with the least recent error.
"""

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["LoadHistory", "drifted_loads", "total_variation"]

_DECAYS = (0.0, 0.5, 0.8)  # of the exponential average of each predictor; 0 repeats the last load
_SCORE_DECAY = 0.8  # of the exponential average of a predictor's errors, over about five loads


def total_variation(a: ArrayLike, b: ArrayLike) -> np.ndarray:
    """Total variation between two loads, the fraction of all tokens that changes experts: float [...], 0 to 1.

    a, b: [..., source_rank, expert], tokens. Loads are summed over source ranks and normalized. Between two empty loads
    it is 0, between an empty and another load it is 1.
    """
    p, q = (np.asarray(load, dtype=np.float64).sum(-2) for load in (a, b))
    total_p, total_q = p.sum(-1, keepdims=True), q.sum(-1, keepdims=True)
    p, q = p / np.where(total_p > 0, total_p, 1), q / np.where(total_q > 0, total_q, 1)
    apart = np.abs(p - q).sum(-1) / 2
    return np.where((total_p > 0)[..., 0] == (total_q > 0)[..., 0], apart, 1.0)


def drifted_loads(load: np.ndarray, drift: float) -> list[np.ndarray]:
    """Two loads that `load` may become when about `drift` of all tokens change experts (total variation): int64
    [source_rank, expert]. Only `load` itself, rounded, if `drift` is 0.

    The experts' tokens are multiplied by random factors, and by their inverses. The factors are the same in each call.

    load: [source_rank, expert], tokens.
    """
    # Lognormal factors of a small deviation s move 0.4 s of the tokens.
    exponent = 2.5 * drift * np.random.default_rng(0).standard_normal(load.shape[1])
    moved = [load * np.exp(sign * exponent) for sign in ((1, -1) if drift else (0,))]
    return [np.rint(drifted * (load.sum() / max(drifted.sum(), 1e-300))).astype(np.int64) for drifted in moved]


class LoadHistory:
    """Loads of one layer, [source_rank, expert], or of several layers together, [layer, source_rank, expert].

    All loads have the same shape. With several layers, results have one entry a layer.
    """

    def __init__(self) -> None:
        self._averages: list[np.ndarray] = []
        self._errors: list[np.ndarray] = []
        self._last: np.ndarray | None = None
        self._drift: np.ndarray = np.array(0.0)

    def record(self, load: ArrayLike) -> np.ndarray:
        """Add a load. Returns its total variation from the load before, 0 for the first: float [] or [layer].

        Raises ValueError for a load with another shape than the first, and for negative or non-finite counts.
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
            for index, decay in enumerate(_DECAYS):
                error = total_variation(self._averages[index], counts)
                self._errors[index] = _SCORE_DECAY * self._errors[index] + (1 - _SCORE_DECAY) * error
                self._averages[index] = decay * self._averages[index] + (1 - decay) * counts
        self._last = counts
        return self._drift

    def predict(self) -> np.ndarray:
        """The predicted next load, rounded: int64 in the shape of the records.

        Each layer uses the predictor with the least recent error, and the last load if no other is better.
        Raises ValueError if nothing has been recorded.
        """
        if self._last is None:
            raise ValueError("no load is recorded yet, so none can be predicted; run a step without replicas first")
        best = np.argmin(self._errors, axis=0)  # among equals the first predictor, which repeats the last load
        stacked = np.stack(self._averages)
        chosen = stacked[best] if best.ndim == 0 else stacked[best, np.arange(len(best))]
        return np.rint(chosen).astype(np.int64)

    def error(self) -> np.ndarray:
        """The recent total variation between predictions and loads: float [] or [layer], 0 without records."""
        return np.min(self._errors, axis=0) if self._errors else np.array(0.0)
