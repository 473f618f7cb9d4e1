"""Two checkers of what a GPU would punish: the order of collectives, and races between streams (docs/support.md)."""
