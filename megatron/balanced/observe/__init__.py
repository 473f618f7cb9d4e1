"""Measurement of a run: what each part of a rank computes, and its events for the report."""
