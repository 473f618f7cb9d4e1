"""Forecasts from a recorded run (--balance-report): its step time with each balancer, and on other numbers of GPUs.

- Layers are planned from their measured seconds and simulated in the run's own schedule.
- The gain of even sequences and of even experts is the estimate of `balancing.report`. For experts it is reduced to the
  share that replicas would reach if they were planned from one recorded step and used in the next.
- The time of a step outside the schedule is assumed not to change.
- On other numbers of GPUs the global batch stays, and each rank has more or fewer micro-batches.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from balancing.cluster import Cluster
from balancing.experts import plan_replicas, traffic
from balancing.layers.plan import Pipeline, plan_pipeline
from balancing.layers.recorded import RecordedRun
from balancing.layers.simulated_fill import weight_share
from balancing.report import History, summarize
from balancing_tools.load_trace import read_reported_loads
from balancing_tools.recorded_run import read_run
from balancing_tools.whatif.forecast import SCENARIOS, Forecast, schedule_seconds

__all__ = ["forecast_recorded"]

_RECORDS = 8  # recorded steps of experts that are replayed
_SLOTS = 2
_ANY = Cluster(1, 1, 1, 1.0, 1.0, 1.0, 1.0)


def forecast_recorded(
    history: History, gpus: Sequence[int] = (), iterations: int | None = None
) -> tuple[list[list[Forecast]], list[str]]:
    """Forecasts for each number of GPUs, and notes.

    history: from `balancing.report.read_history`.
    gpus: numbers of ranks; the run's own number by default.
    iterations: number of iterations of the whole training, for GPU-hours.

    Raises ValueError for a run without timed layers, and for numbers of GPUs that do not go with the run's stages and
    micro-batches.
    """
    run = read_run(history)
    summary = summarize(history)
    recorded = run.plan.stages * run.ranks_per_stage
    saved = {each.balanced: each.saved * run.step_seconds for each in summary.estimates}
    was = [float(gain.after) for gain in summary.gains if gain.balancer == "experts"]  # replicas stay in every row
    before, after = (was[0], was[0]) if was else _experts(history)
    if before > 1:
        saved["experts"] = saved.get("experts", 0.0) * max(0.0, before - after) / (before - 1)
    attention = summary.attention_before if summary.attention_after is None else summary.attention_after
    fullest = 1.0 if attention is None or not len(attention) else float(np.max(attention))
    notes = [
        f"Measured: {recorded} ranks, {run.step_seconds:.3g} s a step. Balanced sequences are assumed to be perfectly "
        "even."
    ]
    if history.unread:
        notes.append(history.unread)
    if summary.gains:
        names = ", ".join(gain.balancer for gain in summary.gains)
        notes.append(f"The run was balanced ({names}). These balancers stay on in every row, also in that of none.")
    imbalance = {"experts": (before, after), "sequences": (fullest, 1.0)}
    groups = [_group(run, number, recorded, saved, imbalance, iterations) for number in gpus or [recorded]]
    return groups, notes


def _experts(history: History) -> tuple[float, float]:
    """Tokens of the busiest expert-parallel rank over the mean, (without, with) replicas; 1 without experts."""
    if not history.experts:
        return 1.0, 1.0
    trace = read_reported_loads(history)
    counts = trace.counts[..., 0, :]  # [record, rank, layer, expert]
    ranks = counts.shape[1]
    if ranks == 1 or len(counts) < 2:
        return 1.0, 1.0
    without: list[float] = []
    replicated: list[float] = []
    for at in np.unique(np.linspace(1, len(counts) - 1, _RECORDS).astype(int)):
        for layer in range(counts.shape[2]):
            load = counts[at, :, layer]
            for slots, found in ((0, without), (_SLOTS, replicated)):
                cluster = _ANY.relabel(1, ranks)
                served = traffic(load, plan_replicas(counts[at - 1, :, layer], cluster, slots=slots)).sum(0)
                found.append(served.max() / max(served.mean(), 1e-9))
    return float(np.mean(without)), float(np.mean(replicated))


def _group(
    run: RecordedRun,
    gpus: int,
    recorded: int,
    saved: dict[str, float],
    imbalance: dict[str, tuple[float, float]],
    iterations: int | None,
) -> list[Forecast]:
    if gpus % run.plan.stages or (run.micro_batches * recorded) % gpus:
        raise ValueError(
            f"--gpus {gpus} does not go with the run: {run.plan.stages} stages, {run.micro_batches} micro-batches on "
            f"each of {recorded} ranks"
        )
    count = run.micro_batches * recorded // gpus
    cost, share = run.cost, count / run.micro_batches
    now, _ = schedule_seconds(cost, run.plan, run.micro_batches, 0.0, run.schedule)
    none, bubble = schedule_seconds(cost, run.plan, count, 0.0, run.schedule)
    rest = max(0.0, run.step_seconds - now)
    planned, seconds, idle = run.plan, none, bubble
    if run.plan.stages > 1:
        pipeline = Pipeline(run.plan.stages, count, run.plan.virtual, run.schedule)
        plan = plan_pipeline(cost, pipeline, current=run.plan)
        faster, less = schedule_seconds(cost, plan, count, 0.0, run.schedule)
        if faster < none:
            planned, seconds, idle = plan, faster, less
    gain = {"none": 0.0, "layers": none - seconds}
    idles = dict.fromkeys(SCENARIOS, bubble) | {"layers": idle, "all": idle}
    filled = {"fill": 0.0, "all": 0.0}
    if run.plan.stages > 1 and not run.schedule.in_parts:
        fills = replace(run.schedule, weight_share=weight_share(recomputes=run.recomputes))
        for name, of_plan, before in (("fill", run.plan, none), ("all", planned, seconds)):
            faster, less = schedule_seconds(cost, of_plan, count, 0.0, fills)
            if faster < before:
                filled[name], idles[name] = before - faster, less
    gain |= {name: saved.get(name, 0.0) * share for name in ("sequences", "experts")}
    gain["all"] = max(*gain.values(), min(sum(gain.values()), saved.get("all", 0.0) * share)) + filled["all"]
    gain["fill"] = filled["fill"]
    memory = float(run.memory.max()) if len(run.memory) and gpus == recorded else None
    found = []
    for name in SCENARIOS:
        step = none + rest - gain[name]
        loads = cost.stage_loads(planned if name in ("layers", "all") else run.plan)
        uneven = {kind: both[name in (kind, "all")] for kind, both in imbalance.items()}
        hours = None if iterations is None else step * iterations * gpus / 3600
        found.append(Forecast(
            gpus, name, step, idles[name], float(loads.max() / loads.mean()),
            uneven["sequences"], uneven["experts"], memory, hours,
            "" if name == "none" or gain[name] > 0 else "nothing to gain in the recorded run",
        ))  # fmt: skip
    return found
