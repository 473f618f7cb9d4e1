"""Synthetic loads for benchmarks and tests: those that forecasts draw, too."""

from balancing.whatif.routing import drifted, sampled_load, zipf_popularity

__all__ = ["drifted", "sampled_load", "zipf_popularity"]
