"""The problem that planners of replicas solve."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from balancing.cluster import Cluster
from balancing.experts.cost import ExpertShape, TransferWindow
from balancing.experts.placement import ReplicaPlacement, SplitRule

__all__ = ["Problem"]


@dataclass(frozen=True)
class Problem:
    """What replicas are planned for, checked. Its fields are the parameters of `plan_replicas_layers`."""

    cluster: Cluster
    home: np.ndarray
    slots: int
    shape: ExpertShape | None
    window: TransferWindow
    drift: float

    def placement(self, slots: np.ndarray, split: SplitRule = "level") -> ReplicaPlacement:
        """The placement with `slots`: int [rank, slot], -1 in empty slots."""
        return ReplicaPlacement(self.home, slots, split, self.per_node, self.cluster.nics_per_node)

    @property
    def empty(self) -> np.ndarray:
        """Slots without replicas, int [rank, slot]."""
        return np.full((self.ranks, self.slots), -1)

    @cached_property
    def ranks(self) -> int:
        """Number of ranks."""
        return int(self.home.max()) + 1

    @property
    def per_node(self) -> int:
        """Ranks of a node."""
        return min(self.ranks, self.cluster.ranks_per_node)
