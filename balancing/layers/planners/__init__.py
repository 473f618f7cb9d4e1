"""Planners `optimal` (with `linear_partition`) and `diffusion`. `refine` improves a plan by simulated steps."""
