"""Adapters for other training frameworks. An adapter imports its framework only when it is used."""
