"""Dynamic models: schemes that make a model cheaper while it trains, and its layers uneven.

Each scheme is one file: what is frozen, pruned, skipped or routed, and when. None of them balances anything; they are
why `balancing.layers` exists, and train by themselves.
"""

from balancing.dynamics.config import DynamicsConfig
from balancing.dynamics.freezing import PlasticityFreezer, scheduled_prefix, similarity_loss

__all__ = ["DynamicsConfig", "PlasticityFreezer", "scheduled_prefix", "similarity_loss"]
