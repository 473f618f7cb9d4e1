"""Shared by all balancers: callbacks of a step, process groups, and optimizer state."""
