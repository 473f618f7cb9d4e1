"""Errors for bad input."""

__all__ = ["LocalError"]


class LocalError(ValueError):
    """Bad input on this machine, such as a missing file. Other machines of the job may not have it."""
