"""Planners of peers that benchmarks compare with. Training does not know them: it has the planners of the three papers
that this project builds on and its own, in `balancing`."""
