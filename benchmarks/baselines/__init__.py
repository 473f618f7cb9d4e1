"""Planners of other systems, to compare with. Training does not use them: its planners are in `balancing`."""
