"""Fit the constants of `balancing_tools.whatif.step` to published steps, and see how they do on steps left out."""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
from scipy.optimize import least_squares

from balancing.report.estimate import pipeline_seconds
from balancing_tools.whatif.step import Efficiency, StepModel
from benchmarks.whatif.published import Published

__all__ = ["fit", "held_out"]

# Least, first and most of each constant.
_RANGES = {
    "linear": (0.5, 0.65, 1.0),
    "attention": (0.3, 0.5, 0.8),
    "experts": (0.3, 0.6, 0.95),
    "memory": (0.3, 0.6, 1.0),
    "fp8": (1.2, 1.6, 2.0),
    "tensor_exposed": (0.8, 1.3, 3.0),
    "expert_exposed": (0.5, 1.3, 4.0),
    "data_exposed": (0.5, 1.0, 2.0),
    "overlapped": (0.05, 0.3, 0.7),
    "layer_seconds": (1e-5, 3e-4, 1.5e-3),
    "host_seconds": (1e-4, 8e-3, 2e-2),
    "ampere": (0.8, 1.2, 1.8),
}
_OUTLIER = 0.05  # relative error from which a row pulls less


def fit(rows: Sequence[Published]) -> Efficiency:
    """Constants with the least relative errors, each source with the same weight."""
    low, first, high = np.log([_RANGES[each.name] for each in fields(Efficiency)]).T
    sources = [row.source for row in rows]
    weight = np.array([sources.count(source) ** -0.5 for source in sources])
    plans = [row.job.plan for row in rows]

    def errors(constants: np.ndarray) -> np.ndarray:
        efficiency = Efficiency(*np.exp(constants).tolist())
        told = [_quick_seconds(row, plan, efficiency) / row.seconds for row, plan in zip(rows, plans, strict=True)]
        return np.log(told) * weight

    found = least_squares(
        errors, first, bounds=(low - 1e-9, high + 1e-9), loss="soft_l1", f_scale=_OUTLIER, diff_step=1e-3, max_nfev=30
    )
    return Efficiency(*np.exp(found.x).tolist())


def held_out(rows: Sequence[Published], folds: int = 3) -> np.ndarray:
    """float [row]: relative error of each step under constants that were fitted without its part of the rows."""
    found = np.empty(len(rows))
    part = np.random.default_rng(0).permutation(len(rows)) % folds
    for fold in range(folds):
        efficiency = fit([row for row, own in zip(rows, part, strict=True) if own != fold])
        for at in np.flatnonzero(part == fold):
            row = rows[at]
            found[at] = _quick_seconds(row, row.job.plan, efficiency) / row.seconds - 1
    return found


def _quick_seconds(row: Published, plan, efficiency: Efficiency) -> float:
    """The step, by a closed form of the pipeline in place of the simulator."""
    model, count = StepModel(row.job, row.cluster, efficiency), row.job.micro_batches
    costs = model.costs(model.works())
    loads = costs.stage_loads(plan)[:, None] * count
    forward = float(costs.forward.sum() / costs.total.sum())
    seconds = pipeline_seconds(loads, count, plan.virtual, forward)
    if plan.stages > 1 and plan.virtual == 1:
        seconds += 2 * model.transfer_seconds() * count
    return seconds + model.data_parallel_seconds(plan)
