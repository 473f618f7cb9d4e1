"""Balanced sequences (`--balance-sequences`): data, plans and attention of ranks that share micro-batches."""
