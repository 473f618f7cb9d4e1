"""Every number we publish, one command each."""
