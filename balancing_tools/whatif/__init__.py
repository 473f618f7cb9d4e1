"""Forecasts of a job's step time without balancing, with each balancer and with all, without running the job.

`python -m balancing.whatif` prints the forecasts; docs/whatif.md says how far to trust them.

    job         the flags of Megatron-LM that decide how long a step takes
    step        the balanced step, by constants fitted to published runs
    gains       each balancer's own planner and cost model on sampled loads
    forecast    the scenarios, and the verdict
    lengths     lengths of documents of published training sets
    routing     loads of experts of given skew
"""

from balancing_tools.whatif.forecast import SCENARIOS, WORTH, Forecast, forecast, verdict
from balancing_tools.whatif.job import Job, read_flags, read_recipe_flags

__all__ = ["SCENARIOS", "WORTH", "Forecast", "Job", "forecast", "read_flags", "read_recipe_flags", "verdict"]
