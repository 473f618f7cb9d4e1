"""Published headlines beside the project's own figures: `python -m benchmarks.headlines`."""
