"""Lengths of documents for benchmarks and tests: those that forecasts draw, too."""

from balancing.whatif.lengths import DISTRIBUTIONS, draw_batch, draw_lengths

__all__ = ["DISTRIBUTIONS", "draw_batch", "draw_lengths"]
