"""Document lengths for benchmarks and tests: the same as those of forecasts."""

from balancing_tools.whatif.lengths import DISTRIBUTIONS, draw_batch, draw_lengths

__all__ = ["DISTRIBUTIONS", "draw_batch", "draw_lengths"]
