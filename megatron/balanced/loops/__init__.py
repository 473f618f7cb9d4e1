"""Balancers in the training loops of others: thin adapters, which import nothing of these loops."""
