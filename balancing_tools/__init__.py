"""Commands around a run: what-if, the report's page, the doctor, measured clusters, replays of recorded loads.

Training does not need them. `python -m balancing.NAME` hands over to `balancing_tools.NAME`. They import `balancing` by
its public names, and nothing of Megatron. In `balancing` and `megatron` only these commands, the page at the end of a
report and the forecast of a dry run import them, when they are asked for.
"""
