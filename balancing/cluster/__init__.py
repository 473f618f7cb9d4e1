"""The cluster that planners plan for: nodes, ranks, NICs and their speeds, from a preset, a file or a measurement."""

from balancing.cluster.cluster import PRESETS, Cluster

__all__ = ["PRESETS", "Cluster"]
