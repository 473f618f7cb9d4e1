"""Trials of balancers in a training loop (`balancing.trials`): a callback of a run, which no balancer names."""
