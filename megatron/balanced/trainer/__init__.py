"""The trainer: Megatron-LM's own loop with the balancers. All that knows `megatron.training` is here."""
