"""Measures how long each part of a rank computes, and writes the events of the report."""
