"""Detection and report of failures and stalls, on every rank.

- `heartbeat`: each rank's heartbeat in the job's store, and one report when a job fails.
- `operations`: the last operations that this rank started on each process group.
- `stall`: the thread that notices an iteration that takes too long and asks all ranks where they are.
- `waiting`: from the ranks' answers, which rank waits for which.
"""
