"""Synthetic loads of experts with known imbalance and drift.

The popularity of experts follows a power law (Zipf) in random order. The exponent is chosen such that the busiest rank
has a given multiple of the mean load, which determines the step time of expert parallelism, or for a given Gini
coefficient. Drift multiplies each expert's popularity by a random factor such that a given share of all tokens changes
experts (total variation).
"""

import numpy as np

__all__ = ["drifted", "gini_popularity", "sampled_load", "zipf_popularity"]


def zipf_popularity(experts: int, ranks: int, rank_imbalance: float, rng: np.random.Generator) -> np.ndarray:
    """Popularity, float [expert] with sum 1, of given imbalance.

    experts: number of experts, with homes in contiguous blocks.
    ranks: number of ranks.
    rank_imbalance: load of the busiest rank over the mean.
    rng: source of the random order.

    Raises ValueError for an imbalance below 1, or not below the number of ranks.
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
    """Another popularity [expert] at a total variation of `variation` from this one.

    Raises ValueError for a variation below 0, not below 1, or out of reach from this popularity.
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
    """Draw the tokens of each rank: int64 [source_rank, expert]; each row has the sum `tokens_per_rank`.

    popularity: float [expert], sum 1.
    ranks: number of source ranks.
    tokens_per_rank: tokens x top-k of each rank.
    rng: source of randomness.
    """
    return rng.multinomial(tokens_per_rank, popularity, size=ranks)


def gini_popularity(experts: int, gini: float, rng: np.random.Generator) -> np.ndarray:
    """Popularity, float [expert] with sum 1, of a given Gini coefficient, by a power law in random order.

    Raises ValueError for a coefficient below 0 or not below 1 - 1 / experts.
    """
    if not 0 <= gini < 1 - 1 / experts:
        raise ValueError(f"gini={gini} must be at least 0 and less than {1 - 1 / experts:.3f} for {experts} experts")
    place = np.arange(1, experts + 1)

    def popularity(exponent: float) -> np.ndarray:
        weight = place**-exponent
        return np.asarray(weight / weight.sum())

    low, high = 0.0, 64.0
    for _ in range(60):
        middle = (low + high) / 2
        ascending = popularity(middle)[::-1]
        found = 1 - (2 * np.cumsum(ascending).sum() - 1) / experts
        low, high = (middle, high) if found < gini else (low, middle)
    return rng.permutation(popularity(high if gini > 0 else 0.0))
