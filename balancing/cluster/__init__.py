"""The machine that plans are made for: its nodes, ranks and NICs, and their speeds, as given or as measured."""

from balancing.cluster.cluster import PRESETS, Cluster

__all__ = ["PRESETS", "Cluster"]
