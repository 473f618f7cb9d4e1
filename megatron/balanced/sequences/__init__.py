"""Balanced sequences in Megatron-LM (`--balance-sequences`): data, plans and attention of context-parallel ranks."""
