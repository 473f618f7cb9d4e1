"""Forecasts: the step of a job without balancing, with each balancer, and with all of them.

A scenario has its own seconds of attention (sequences), its own seconds of experts (experts) and its own layers on each
stage (layers). The pipeline's schedule is simulated with these, so gains of balancers are neither added nor multiplied.
A balancer that would not gain is left off, as its gate does in training, and the forecast says why.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from balancing.cluster import Cluster
from balancing.layers.cost import LayerSeconds
from balancing.layers.plan import Pipeline, Running, plan_pipeline
from balancing.layers.repack import Repack, choose_repack, repack_options
from balancing.layers.simulated_fill import weight_share
from balancing.pipeline.schedule import MEGATRON_DEFAULTS, Schedule
from balancing.pipeline.stage_plan import StagePlan
from balancing_tools.load_trace import LoadTrace
from balancing_tools.whatif.gains import ExpertLoads, SequenceLoads, expert_loads, sequence_loads
from balancing_tools.whatif.job import Job
from balancing_tools.whatif.step import FITTED, Efficiency, LayerWork, StepModel

__all__ = [
    "SCENARIOS",
    "WORTH",
    "Forecast",
    "forecast",
    "forecast_loads",
    "schedule_seconds",
    "shorter",
    "verdict",
    "when_shorter",
]

# "fill" is --fill-with-weight-gradients.
SCENARIOS = ("none", "layers", "sequences", "experts", "fill", "all")
_FLAGS = {name: f"--balance-{name}" for name in ("layers", "sequences", "experts")}
_FLAGS["fill"] = "--fill-with-weight-gradients"
# Least gain, as a share of a step, for which a balancer is worth its flag: without any gain it costs 1 to 3 %.
WORTH = 0.02


@dataclass(frozen=True)
class Forecast:
    """One scenario on one number of GPUs.

    gpus: ranks.
    balancer: of `SCENARIOS`; "fill" computes weight gradients while the pipeline waits.
    step_seconds: of one step.
    bubble: idle share of the pipeline's time, over all stages.
    layers, sequences, experts: imbalance (max / mean) of pipeline stages in time, of ranks that share micro-batches in
        attention, of expert-parallel ranks in tokens; 1.0 with a single stage or rank.
    memory: bytes of the fullest rank, without buffers of libraries; None if not known.
    gpu_hours: of the whole training; None if the job does not say how long it trains, or freezes layers.
    off: why the balancer is off; empty if it is on.
    """

    gpus: int
    balancer: str
    step_seconds: float
    bubble: float
    layers: float
    sequences: float
    experts: float
    memory: float | None
    gpu_hours: float | None
    off: str = ""


def forecast(
    job: Job,
    cluster: Cluster,
    *,
    lengths: str | Sequence[int] | np.ndarray | None = None,
    routing: str | LoadTrace = "even",
    efficiency: Efficiency = FITTED,
    seed: int = 0,
) -> list[Forecast]:
    """Forecasts of all scenarios for a job on a cluster of as many ranks.

    job: with its number of GPUs.
    cluster: the cluster of as many ranks.
    lengths: of documents that are masked from each other: the name of a distribution, or recorded lengths [document];
        None if every sequence is one document.
    routing: skew of experts: a name of `gains.ROUTING`, or recorded loads.
    efficiency: constants of the balanced step.
    seed: seed of the random loads.

    Raises ValueError for unknown distributions, a cluster of another size, and a schedule that Megatron-LM does not
    have.
    """
    if cluster.world_size != job.gpus:
        raise ValueError(f"a cluster of {cluster.world_size} ranks for a job of {job.gpus}")
    model = StepModel(job, cluster, efficiency)
    experts = None
    if job.num_experts:
        experts = expert_loads(model, routing, np.random.default_rng(seed))
    sequences = None if lengths is None else sequence_loads(model, lengths, np.random.default_rng(seed))
    return forecast_loads(model, experts, sequences)


def forecast_loads(model: StepModel, experts: ExpertLoads | None, sequences: SequenceLoads | None) -> list[Forecast]:
    """Forecasts of all scenarios under given loads. sequences: None if every sequence is one document."""
    found: list[Forecast] = []
    for balancer in SCENARIOS:
        on = {name: balancer in (name, "all") for name in _FLAGS}
        one = _scenario(model, balancer, on, experts, sequences)
        off = _nothing_to_do(model, balancer, sequences is not None)
        if not off and found and one.step_seconds >= found[0].step_seconds * (1 - 1e-6):
            off = "no plan makes the step quicker"
        if off and found and balancer != "all":
            one = replace(found[0], balancer=balancer)
        found.append(replace(one, off=off))
    return found


def shorter(model: StepModel, throughput_floor: float, min_stages: int = 1) -> Repack | None:
    """The pipeline of fewer stages that the job would be repacked into; None if none reaches the throughput floor.

    model: of the job, with even loads.
    throughput_floor, min_stages: as --repack-throughput-floor and --repack-min-stages.
    """
    job, cluster = model.job, model.cluster
    costs, count = model.costs(model.works()), job.micro_batches
    balanced = _replanned(costs, job)
    running = Running(
        costs, balanced, count, job.gpus // balanced.stages, cluster.ranks_per_node, schedule=job.schedule
    )
    options = repack_options(running, min_stages=min_stages, transfer=model.transfer_seconds())
    return choose_repack((each for each in options if each.gpu_time < 1), throughput_floor)


def when_shorter(job: Job, cluster: Cluster, throughput_floor: float, min_stages: int) -> str:
    """A sentence about the smallest number of frozen layers with which stages are released. Parameters as for
    `shorter`."""
    for frozen in range(job.freeze_layers + 1):
        model = StepModel(replace(job, freeze_layers=frozen), cluster)
        if (less := shorter(model, throughput_floor, min_stages)) is not None:
            return (
                f"with {frozen} layers frozen {less.stages} of {job.pipeline_model_parallel_size} stages keep "
                f"{less.throughput:.0%} of the balanced throughput, and {less.freed_nodes} nodes are released"
            )
    return f"no shorter pipeline keeps {throughput_floor:.0%} of the balanced throughput, so no node is released"


def _replanned(costs: LayerSeconds, job: Job) -> StagePlan:
    plan = job.plan
    return plan_pipeline(costs, Pipeline(plan.stages, job.micro_batches, plan.virtual, job.schedule), current=plan)


def _nothing_to_do(model: StepModel, balancer: str, documents: bool) -> str:
    job = model.job
    if balancer in ("layers", "fill") and job.pipeline_model_parallel_size == 1:
        return "one pipeline stage"
    if balancer == "fill" and job.overlap_moe_expert_parallel_comm:
        return "--overlap-moe-expert-parallel-comm runs a forward and a backward pass in turn"
    if balancer == "experts" and not job.num_experts:
        return "no experts"
    if balancer == "experts" and job.expert_model_parallel_size == 1:
        return "one expert-parallel rank"
    if balancer == "sequences" and _one_rank_a_micro_batch(job):
        return "one rank for each micro-batch"
    if balancer == "sequences" and not documents:
        return "no --lengths: one document a sequence"
    return ""


def _one_rank_a_micro_batch(job: Job) -> bool:
    """Whether no rank shares its micro-batches with another rank, without --sequence-micro-batches."""
    data = job.data_parallel if job.sequence_domain != "context" else 1
    return job.context_parallel_size * data == 1 and not job.sequence_micro_batches


def _scenario(
    model: StepModel,
    balancer: str,
    on: dict[str, bool],
    experts: ExpertLoads | None,
    sequences: SequenceLoads | None,
) -> Forecast:
    job = model.job
    seconds = [each[on["experts"]] for each in experts.seconds] if experts else []
    if sequences is None:
        works = model.works(None, seconds)
        fill, ring = 0.0, (1.0, 1.0)
    else:
        at, ring = on["sequences"], sequences.imbalance
        pairs = sequences.slowest[at] * sequences.factor[at]
        works = model.works(pairs, seconds)
        fill = (sequences.fullest[at] / sequences.slowest[at] - 1) * 3.5
    costs = model.costs(works)
    plan, transfer = job.plan, model.transfer_seconds()
    step, bubble = schedule_seconds(costs, plan, job.micro_batches, transfer, job.schedule)
    if on["layers"] and plan.stages > 1:
        planned = _replanned(costs, job)
        faster, idle = schedule_seconds(costs, planned, job.micro_batches, transfer, job.schedule)
        if faster < step:
            plan, step, bubble = planned, faster, idle
    if on["fill"] and plan.stages > 1 and not job.overlap_moe_expert_parallel_comm:
        filled = replace(job.schedule, weight_share=_deferred_share(job, works))
        faster, idle = schedule_seconds(costs, plan, job.micro_batches, transfer, filled)
        if faster < step:
            step, bubble = faster, idle
    loads = costs.stage_loads(plan)
    # While the pipeline fills, micro-batches of unequal cost pass through it at the pace of the most expensive one.
    attention = sum(work.attention for work in works) / plan.stages  # of the mean stage
    longest = fill * attention * (plan.stages - 1) / plan.virtual
    step += longest + model.data_parallel_seconds(plan)
    memory = float(model.memory(plan).max())
    if job.freeze_layers:  # before they are frozen
        all_train = StepModel(replace(job, freeze_layers=0), model.cluster, model.efficiency)
        memory = max(memory, float(all_train.memory(job.plan).max()))
    imbalance = (1.0, 1.0)
    if experts is not None:
        imbalance = experts.imbalance
        memory += experts.memory * on["experts"]
    hours = None
    if job.iterations is not None and not job.freeze_layers:
        hours = step * job.iterations * job.gpus / 3600
    return Forecast(
        job.gpus, balancer, step, bubble, float(loads.max() / loads.mean()), ring[on["sequences"]],
        imbalance[on["experts"]], memory, hours,
    )  # fmt: skip


def _deferred_share(job: Job, works: Sequence[LayerWork]) -> float:
    """Share of the backward seconds of layers that computes weight gradients; the attention kernel has none."""
    forward = sum(work.total - work.backward for work in works)
    attention = sum(work.attention for work in works)
    return weight_share(recomputes=job.recompute_granularity == "full") * (1 - attention / forward)


def schedule_seconds(
    costs: LayerSeconds,
    plan: StagePlan,
    micro_batches: int,
    transfer: float,
    schedule: Schedule = MEGATRON_DEFAULTS,
) -> tuple[float, float]:
    """Seconds of the pipeline's schedule, and the idle share of all stages' time.

    The schedule is simulated exactly up to 4 groups of micro-batches, or 4 micro-batches a stage. Each further group
    adds as much as the fourth, since the pipeline is then full.
    """
    stages, group = plan.stages, schedule.group
    unit = stages if plan.virtual == 1 or group is None else group
    work = float(costs.stage_loads(plan).mean())
    if stages == 1:
        return work * micro_batches, 0.0
    few = min(micro_batches, 4 * unit)
    if micro_batches > few:
        few += (micro_batches - few) % unit
    seconds = costs.step_seconds(plan, few, transfer=transfer, schedule=schedule)
    if micro_batches > few:
        less = costs.step_seconds(plan, few - unit, transfer=transfer, schedule=schedule)
        seconds += (seconds - less) / unit * (micro_batches - few)
    return seconds, max(0.0, 1 - work * micro_batches / seconds)


def verdict(found: Sequence[Forecast]) -> str:
    """One sentence for one number of GPUs: how much balancing saves, and which flags are worth it."""
    none = found[0]
    gains = {each.balancer: 1 - each.step_seconds / none.step_seconds for each in found[1:]}
    best = max(gains, key=lambda name: (round(gains[name], 4), name == "all"))
    if gains[best] < WORTH:
        return (
            f"On {none.gpus:,} GPUs balancing is not worth it: at best it saves {gains[best]:.1%} of a step, and less "
            f"than {WORTH:.0%} is not worth a flag."
        )
    worth = [name for name in _FLAGS if gains.get(name, 0.0) >= WORTH]
    flags = ", ".join(f"{_FLAGS[name]} ({gains[name]:.0%})" for name in worth) or "only all of them together"
    hours = ""
    if none.gpu_hours is not None and none.gpu_hours >= 1:
        hours = f", {none.gpu_hours * gains[best]:,.0f} GPU-hours of {none.gpu_hours:,.0f}"
    return f"On {none.gpus:,} GPUs balancing saves {gains[best]:.0%} of a step{hours}; worth it: {flags}."
