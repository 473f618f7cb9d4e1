"""The figures of the report. Each function returns an SVG element that follows the page's colours."""

from balancing_tools.report.figures.experts import expert_heat
from balancing_tools.report.figures.imbalance import imbalance_curves
from balancing_tools.report.figures.layers import layer_costs, stage_time
from balancing_tools.report.figures.ranks import rank_attention, rank_memory, rank_time, rank_work
from balancing_tools.report.figures.timeline import choose, timeline
from balancing_tools.report.figures.trials import pairs_of_steps

__all__ = [
    "choose",
    "expert_heat",
    "imbalance_curves",
    "layer_costs",
    "pairs_of_steps",
    "rank_attention",
    "rank_memory",
    "rank_time",
    "rank_work",
    "stage_time",
    "timeline",
]
