"""Sequences of very different length: what they cost, and on which rank."""

from balancing.sequences.load import causal_area, zigzag_area, zigzag_areas

__all__ = ["causal_area", "zigzag_area", "zigzag_areas"]
