"""What the balancers ask of the host: `python -m benchmarks.host`."""
