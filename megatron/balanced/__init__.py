"""Megatron-LM with load balancing inside: the wiring, and nothing but the wiring.

One file for each part of Megatron that changes. The algorithms are in `balancing`, which never imports Megatron.
"""
