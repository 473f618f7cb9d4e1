"""Errors of bad input that say where it is bad."""

__all__ = ["LocalError"]


class LocalError(ValueError):
    """Bad input that other machines of the job may not have, such as a missing file."""
