"""Made-up loads with a known imbalance and a known drift, for tests and benchmarks without a recorded run.

Popularity of experts follows a power law in a random order (Zipf). Its exponent is found such that the fullest rank has
a given multiple of the mean load, since that is what expert-parallel training pays for. Drift multiplies each expert's
popularity by a random factor such that a given part of all tokens changes experts (total variation).
"""

import numpy as np

__all__ = ["drifted", "sampled_load", "zipf_popularity"]


def zipf_popularity(experts: int, ranks: int, rank_imbalance: float, rng: np.random.Generator) -> np.ndarray:
    """Popularity [expert], sum 1, with the loads of ranks at `rank_imbalance` (largest over mean), homes in blocks.

    Raises ValueError for an imbalance below 1 or of all tokens on one rank and more.
    """
    if not 1 <= rank_imbalance < ranks:
        raise ValueError(f"rank_imbalance={rank_imbalance} must be at least 1 and less than the {ranks} ranks")
    place = np.empty(experts)
    place[rng.permutation(experts)] = np.arange(1, experts + 1)

    def popularity(exponent: float) -> np.ndarray:
        weight = place**-exponent
        return weight / weight.sum()

    low, high = 0.0, 64.0
    for _ in range(60):
        middle = (low + high) / 2
        fullest = popularity(middle).reshape(ranks, -1).sum(1).max() * ranks
        low, high = (middle, high) if fullest < rank_imbalance else (low, middle)
    return popularity(high if rank_imbalance > 1 else 0.0)


def drifted(popularity: np.ndarray, variation: float, rng: np.random.Generator) -> np.ndarray:
    """Another popularity [expert] at the given total variation from this one, 0 (the same) to below 1.

    Raises ValueError for a variation outside that.
    """
    if not 0 <= variation < 1:
        raise ValueError(f"variation={variation} must be at least 0 and below 1")
    if variation == 0:
        return popularity.copy()
    direction, low, high = rng.standard_normal(len(popularity)), 0.0, 1.0

    def moved(strength: float) -> np.ndarray:
        weight = popularity * np.exp(strength * (direction - direction.max()))
        return weight / weight.sum()

    def distance(strength: float) -> float:
        return float(np.abs(moved(strength) - popularity).sum() / 2)

    while distance(high) < variation:
        high *= 2
        if high > 1e6:
            raise ValueError(f"variation={variation} cannot be reached from this popularity; use a smaller one")
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if distance(middle) < variation else (low, middle)
    return moved(high)


def sampled_load(popularity: np.ndarray, ranks: int, tokens_per_rank: int, rng: np.random.Generator) -> np.ndarray:
    """Tokens drawn from the popularity on each rank: int64 [source_rank, expert], rows sum to `tokens_per_rank`."""
    return rng.multinomial(tokens_per_rank, popularity, size=ranks)
