"""Checks at start-up: flags, combinations and the built model, each refusal in one line."""
