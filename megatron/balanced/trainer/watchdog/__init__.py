"""Reports of failures and stalls, on every rank.

- `failure`: one report when a job fails, on which the ranks agree in the job's store.
- `stall`: a thread that notices an iteration that takes too long and asks all ranks where they are.
"""
