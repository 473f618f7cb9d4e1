"""What the balancers have in common: callbacks of a step, process groups, the state of optimizers."""
