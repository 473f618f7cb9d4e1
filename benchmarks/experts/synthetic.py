"""Synthetic loads for benchmarks and tests: those that forecasts use as well, and lognormal ones.

DeepEP's pull request 393 finds that a lognormal fits recorded loads of DeepSeek-V3 best. vLLM's 57598 draws lognormal
loads and scales them to a given imbalance by bisection. Compared with Zipf's law, fewer experts are very hot and more
are somewhat hot.
"""

import numpy as np

from balancing_tools.whatif.routing import drifted, sampled_load, zipf_popularity

__all__ = ["DISTRIBUTIONS", "drifted", "lognormal_popularity", "sampled_load", "zipf_popularity"]


def lognormal_popularity(experts: int, ranks: int, rank_imbalance: float, rng: np.random.Generator) -> np.ndarray:
    """Popularity, float [expert] with sum 1, whose logarithm is normal; parameters of `zipf_popularity`.

    The same draw is scaled until the busiest rank has `rank_imbalance` times the mean. Raises ValueError for an
    imbalance below 1, or not below the number of ranks.
    """
    if not 1 <= rank_imbalance < ranks:
        raise ValueError(f"rank_imbalance={rank_imbalance} must be at least 1 and less than the {ranks} ranks")
    drawn = rng.standard_normal(experts)

    def popularity(sigma: float) -> np.ndarray:
        weight = np.exp(sigma * (drawn - drawn.max()))
        return np.asarray(weight / weight.sum())

    low, high = 0.0, 64.0
    for _ in range(60):
        middle = (low + high) / 2
        fullest = popularity(middle).reshape(ranks, -1).sum(1).max() * ranks
        low, high = (middle, high) if fullest < rank_imbalance else (low, middle)
    return popularity(high if rank_imbalance > 1 else 0.0)


DISTRIBUTIONS = {"Zipf": zipf_popularity, "lognormal": lognormal_popularity}
