"""Benchmarks: one command for every published figure."""
