"""The trainer: Megatron-LM's own loop with the balancers. No other package depends on `megatron.training`."""
