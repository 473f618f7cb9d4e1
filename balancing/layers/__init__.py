"""Layers between pipeline stages: what a pipeline schedule costs when its stages are not equal."""

from balancing.layers.schedule import Operation, operations
from balancing.layers.timeline import Span, Timeline, simulate_schedule

__all__ = ["Operation", "Span", "Timeline", "operations", "simulate_schedule"]
