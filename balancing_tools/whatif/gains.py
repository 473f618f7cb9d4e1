"""Effect of the balancers of experts and sequences on a job's loads, by their own planners and cost models.

Loads are drawn. Tokens of experts follow a popularity of given skew, which drifts from the step whose loads are
measured to the step that uses the plan. Lengths of documents follow a published table. Nothing here is fitted: the
ratio of a plan's cost to the cost without a plan comes from `balancing.experts` and `balancing.sequences`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from balancing.cluster import Cluster
from balancing.cluster.links import exchange_seconds
from balancing.cluster.rates import ONE_RATE
from balancing.experts import ExpertShape, TransferWindow, layer_cost, plan_replicas, traffic
from balancing.kernels.pairs import causal_area
from balancing.sequences.cost import step_cost, whole_seconds
from balancing.sequences.domain_choice import WORTH as DOMAIN_WORTH
from balancing.sequences.domain_choice import planned_ranks
from balancing.sequences.plan import plan_sequences
from balancing.sequences.sequence_plan import AttentionShape
from balancing_tools.load_trace import LoadTrace
from balancing_tools.whatif.lengths import draw_batch
from balancing_tools.whatif.routing import drifted, gini_popularity, sampled_load, zipf_popularity
from balancing_tools.whatif.step import StepModel

__all__ = ["ROUTING", "ExpertLoads", "SequenceLoads", "batch_loads", "expert_loads", "sequence_loads"]

# Published skews. "rank": the busiest rank over the mean; "gini": the Gini coefficient of the experts' loads.
# dodoco: arXiv 2605.20982, five checkpoints on real text, by kind of attention. laer: mean of the runs that LAER-MoE
# (arXiv 2602.11686) published, Mixtral with 16 experts, 4 expert-parallel ranks. ultraep-low, ultraep-high: the ends of
# UltraEP's range in training and prefill of models of 106 to 671 billion parameters; the lower end is DeepSeek-V3's
# training. ultraep-glm, ultraep-qwen3: the training of GLM4.5-106B and Qwen3-235B.
ROUTING: dict[str, tuple[str, float]] = {
    "even": ("rank", 1.0),
    "dodoco-mha": ("gini", 0.105),
    "dodoco-mamba": ("gini", 0.150),
    "dodoco-mla": ("gini", 0.24),
    "laer": ("rank", 1.73),
    "ultraep-low": ("rank", 1.30),
    "ultraep-glm": ("rank", 2.23),
    "ultraep-qwen3": ("rank", 2.86),
    "ultraep-high": ("rank", 4.01),
}
# Layers of one model differ: this is the standard deviation of log(imbalance - 1) over layers. In the public record of
# SmartMoE (ATC'23) it is 0.43, 0.36 and 0.31 over 12 layers on 8, 16 and 32 ranks; LAER-MoE's 24 layers range from 1.28
# to 2.43, which is 0.41. Micro-batches of one step vary by less than 1 % in SmartMoE's record and count as equal.
_LAYERS_APART = 0.4
_MOST_IMBALANCE = 0.9  # bound of imbalance over the number of ranks; all tokens on one rank would be 1
# Total variation of popularity between consecutive steps, so between planning and use: LAER-MoE's, 16 experts.
_DRIFT = 0.062
_SLOTS = 2  # --expert-replica-slots
_LAYERS = 4  # sampled
_BATCHES = 4  # of sequences, planned
_SHARED_BATCHES = 2  # planned, of micro-batches that replicas share
_MOST_RANKS = 256  # that are planned together
_AREAS = 1024  # micro-batches whose attention is drawn
_TRIALS = 8


@dataclass(frozen=True)
class ExpertLoads:
    """Seconds and imbalance of experts, without and with replicas.

    seconds: of each MoE layer (used cyclically), (without, with) replicas, (forward, backward) seconds of experts and
        their all-to-alls.
    imbalance: tokens of the busiest rank over the mean, (without, with) replicas.
    memory: bytes of replicas on a rank.
    """

    seconds: tuple[tuple[tuple[float, float], tuple[float, float]], ...]
    imbalance: tuple[float, float]
    memory: float


@dataclass(frozen=True)
class SequenceLoads:
    """Attention of the micro-batches, each field but the last (without, with) the balancer.

    slowest: query-key pairs on one rank, in the mean micro-batch of the slowest replica.
    fullest: query-key pairs on one rank, in the largest micro-batch of that replica.
    factor: time of attention with its exchange over the time of the same pairs spread evenly, without exchange.
    imbalance: pairs of the fullest rank over the mean of the ranks that share micro-batches.
    domain: which ranks share micro-batches with the balancer, "context" or "data" (--sequence-domain).
    """

    slowest: tuple[float, float]
    fullest: tuple[float, float]
    factor: tuple[float, float]
    imbalance: tuple[float, float]
    domain: str = "context"

    @classmethod
    def of(cls, alone: "_Spread", spread: "_Spread", domain: str) -> "SequenceLoads":
        """From micro-batches as Megatron-LM runs them (`alone`), and with the balancer (`spread`)."""
        slowest, fullest, factor, imbalance = zip(alone, spread, strict=True)
        return cls(slowest, fullest, factor, imbalance, domain)


class _Spread(NamedTuple):
    """Micro-batches on their ranks; fields as in `SequenceLoads`."""

    slowest: float
    fullest: float
    factor: float
    imbalance: float

    @property
    def seconds(self) -> float:
        """Time of attention of the slowest replica, in units of one query-key pair."""
        return self.slowest * self.factor


def expert_loads(model: StepModel, routing: str | LoadTrace, generator: np.random.Generator) -> ExpertLoads:
    """Loads of the experts of a job.

    routing: a name of `ROUTING`, or recorded loads.

    Raises ValueError for an unknown name, a skew that this number of ranks cannot have, a trace of one record, and a
    trace with another number of experts.
    """
    job, cluster = model.job, model.expert_cluster()
    ranks, experts = job.expert_model_parallel_size, job.num_experts or 0
    even = model.expert_seconds()
    if ranks == 1 or routing == "even":
        return ExpertLoads(((even, even),), (1.0, 1.0), 0.0)
    per_rank = max(1, round(job.tokens * job.moe_router_topk / model.tensor))
    shape = ExpertShape(job.moe_latent_size or job.hidden_size, job.expert_ffn, 2, gated=job.swiglu)
    work = model.layer(next(kind for kind in job.kinds if "E" in kind))
    hidden = work.attention + work.rest
    level = np.full((ranks, ranks), per_rank / ranks)
    table = shape.hidden * shape.bytes_per_parameter
    window = TransferWindow(hidden, micro_batches=job.micro_batches)
    level_exchange = exchange_seconds(level * table, cluster)
    level_forward = shape.rank_seconds(float(per_rank), experts // ranks, cluster)
    seconds: list[tuple[tuple[float, float], tuple[float, float]]] = []
    before: list[float] = []
    after: list[float] = []
    for past, load in _loads(model, routing, per_rank, generator):
        if load.shape[1] != experts:
            raise ValueError(f"the trace has {load.shape[1]} experts, the job --num-experts {experts}")
        found = []
        for slots, imbalances in ((0, before), (_SLOTS, after)):
            placement = plan_replicas(
                past if slots else load, cluster, slots=slots, shape=shape, window=window,
                method="quota" if slots else "none",
            )  # fmt: skip
            sent = traffic(load, placement)
            cost = layer_cost(sent, placement, cluster, shape, window)
            busiest = sent.sum(0).max() / sent.sum(0).mean()
            exchange = model.exchange_seconds() * cost.all_to_all / level_exchange
            extra = (cost.exposed + cost.slowed / job.micro_batches) / 3  # a third of it forward
            compute = model.expert_compute() * cost.forward / level_forward + extra
            found.append((compute + 2 * exchange, 2 * compute + 2 * exchange))
            imbalances.append(float(busiest))
        # The balancer's gate makes no replicas in a layer that would not gain.
        seconds.append((found[0], min(found, key=sum)))
    memory = _SLOTS * shape.parameters / job.expert_tensor * (2 * 2 + 4)  # two sets of weights, one of gradients
    if not isinstance(routing, LoadTrace):  # random order of the sampled layers, so stages differ, too
        order = generator.permutation(np.resize(np.arange(len(seconds)), int(job.is_moe.sum())))
        seconds = [seconds[at] for at in order]
    return ExpertLoads(tuple(seconds), (float(np.mean(before)), float(np.mean(after))), memory)


def _loads(
    model: StepModel, routing: str | LoadTrace, per_rank: int, generator: np.random.Generator
) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each sampled layer the loads [source_rank, expert] of a step and of the step after it."""
    ranks, experts = model.job.expert_model_parallel_size, model.job.num_experts or 0
    if isinstance(routing, LoadTrace):
        counts = routing.on_ranks(ranks)
        if len(counts) < 2:
            raise ValueError("the trace has one record; it takes at least two, one to plan from and the next to use it")
        pick = np.unique(np.linspace(0, counts.shape[2] - 1, _LAYERS).astype(int))
        at = len(counts) // 2
        # The record may have other numbers of tokens than the job. A placement is made for the mean micro-batch of a
        # step and used for all micro-batches of the next step.
        scaled = per_rank / max(1.0, float(counts[at - 1 : at + 1].sum(-1).mean()))
        return [
            (counts[at - 1, :, layer].mean(1) * scaled, np.rint(counts[at, :, layer, 0] * scaled).astype(np.int64))
            for layer in pick
        ]
    if routing not in ROUTING:
        raise ValueError(f"unknown routing {routing!r}; known: {', '.join(ROUTING)}, or a file of recorded loads")
    kind, value = ROUTING[routing]
    found = []
    spread = NormalDist(0, _LAYERS_APART)
    apart = np.exp([spread.inv_cdf((at + 0.5) / _LAYERS) for at in range(_LAYERS)])
    for each in apart / apart.mean():
        if kind == "gini":
            popularity = gini_popularity(experts, value, generator)
        else:
            most = max(value, _MOST_IMBALANCE * ranks)
            popularity = zipf_popularity(experts, ranks, min(1 + (value - 1) * each, most), generator)
        # The current load has the published skew; the load of the step before differs by the drift.
        past = drifted(popularity, _DRIFT, generator)
        found.append(
            (sampled_load(past, ranks, per_rank, generator), sampled_load(popularity, ranks, per_rank, generator))
        )
    return found


def sequence_loads(
    model: StepModel, lengths: str | Sequence[int] | np.ndarray, generator: np.random.Generator
) -> SequenceLoads:
    """Attention of a job whose sequences are packed with documents that do not see each other.

    lengths: the name of a distribution of `balancing_tools.whatif.lengths`, or recorded lengths.

    Replicas of an expert-parallel group wait for each other in every MoE layer, so a micro-batch of the group costs as
    much as the largest one of its replicas. A replica's time is the sum over its micro-batches, and the step takes the
    time of the slowest replica. Replicas that share micro-batches each have the mean. With --sequence-micro-batches all
    micro-batches count as equal.
    """
    job, ranks = model.job, model.job.context_parallel_size

    def documents() -> tuple[int, ...]:
        packed: tuple[int, ...] = ()
        for _ in range(job.micro_batch_size):
            packed += draw_batch(lengths, job.seq_length, generator)
        return packed

    areas = np.empty(_AREAS)
    for at in range(_AREAS):
        own = np.array(documents(), dtype=float)
        areas[at] = (own * (own + 1) / 2).sum()
    areas /= ranks
    waiting = (
        max(1, job.expert_model_parallel_size * job.expert_tensor // (model.tensor * ranks)) if job.num_experts else 1
    )
    waiting = min(waiting, job.data_parallel)
    groups, count = max(1, job.data_parallel // waiting), job.micro_batches
    trials = max(1, min(_TRIALS, 2_000_000 // (groups * waiting * count)))
    slowest, fullest, shared, uneven = [], [], [], []
    for _ in range(trials):
        drawn = generator.choice(areas, (groups, count, waiting))
        worst = int(drawn.max(2).sum(1).argmax())
        slowest.append(float(drawn[worst].max(1).mean()))
        fullest.append(float(drawn[worst].max()))
        shared.append(float(drawn.mean((0, 2)).max()))
        uneven.append(float((drawn.max((0, 2)) / drawn.mean((0, 2))).mean()))
    batches = [documents() for _ in range(_BATCHES)]
    alone = _Spread(float(np.mean(slowest)), float(np.mean(fullest)), *_planned(model, batches, ranks, "ring"))
    found: dict[str, _Spread] = {}
    if ranks > 1 and (job.sequence_domain != "data" or job.data_parallel == 1):
        factor, level = _planned(model, batches, ranks, "chunks")
        found["context"] = alone._replace(factor=factor, imbalance=level)
    if job.sequence_domain != "context" and job.data_parallel > 1:
        per_node = max(1, model.cluster.ranks_per_node // model.tensor)
        shared_by = planned_ranks(job.data_parallel, ranks, per_node, _MOST_RANKS)
        wide = [sum((documents() for _ in range(shared_by // ranks)), ()) for _ in range(_SHARED_BATCHES)]
        planned = _planned(model, wide, shared_by, "chunks")
        found["data"] = _Spread(float(areas.mean()), float(np.mean(shared)), *planned)
    domain = "data" if "data" in found else "context"
    if len(found) == 2 and found["data"].seconds > (1 - DOMAIN_WORTH) * found["context"].seconds:
        domain = "context"
    spread = found.get(domain, alone)
    if job.sequence_micro_batches:
        spread = spread._replace(fullest=spread.slowest)
    if domain == "data":
        alone = alone._replace(imbalance=alone.imbalance * float(np.mean(uneven)))
    return SequenceLoads.of(alone, spread, domain)


def batch_loads(model: StepModel, batches: Sequence[tuple[int, ...]]) -> SequenceLoads:
    """Attention of known micro-batches, the same on all replicas. batches: lengths of the documents of each."""
    ranks = model.job.context_parallel_size
    areas = np.array([causal_area(lengths) for lengths in batches]) / ranks
    ring, balanced = (
        _Spread(float(areas.mean()), float(areas.max()), *_planned(model, batches, ranks, method))
        for method in ("ring", "chunks")
    )
    return SequenceLoads.of(ring, balanced, "context")


def _planned(model: StepModel, batches: Sequence[tuple[int, ...]], ranks: int, method: str) -> tuple[float, float]:
    """Time of attention with its exchange over attention alone, and pairs of the fullest rank over the mean.

    ranks: that share a micro-batch.
    method: "chunks", or "ring" as in other systems: each rank sends through its own NIC, gradients of keys in bf16.
    """
    job = model.job
    shape = AttentionShape(
        job.hidden_size, max(1, job.num_attention_heads // model.tensor), max(1, job.kv_heads // model.tensor), 1,
        job.ffn, head_size=job.head_size, value_size=job.value_size,
    )  # fmt: skip
    per_node = max(1, min(ranks, model.cluster.ranks_per_node // model.tensor))
    while ranks % per_node:
        per_node -= 1
    cluster = model.cluster.relabel(ranks // per_node, per_node)
    if cluster.rates is None:
        cluster = replace(cluster, flops=cluster.flops * model.efficiency.attention / ONE_RATE)
    seconds = alone = fullest = 0.0
    for lengths in batches:
        plan = plan_sequences(lengths, cluster, shape=shape, method=method)
        peer = method == "ring"
        cost = step_cost(plan, cluster, shape, routed=False if peer else None, gradient_width=1.0 if peer else None)
        # What a peer's operations cost its host is not known, and nobody has measured the host of the sheet's cluster.
        seconds += (cost.device if peer or cluster.rates is None else cost.total) - cost.linear
        alone += _alone(plan.area, lengths, cluster, shape)
        fullest += float(plan.area.max() / plan.area.mean())
    return seconds / alone, fullest / len(batches)


def _alone(area: np.ndarray, lengths: Sequence[int], cluster: Cluster, shape: AttentionShape) -> float:
    """Forward and backward seconds of the mean rank's attention: with measured rates of uncut documents, otherwise of
    query-key pairs without tiles; without launches and exchange."""
    if cluster.rates is not None:
        return float(whole_seconds(lengths, cluster, shape).sum()) / len(area)
    pairs = 2.0 * shape.heads * (shape.head_size + shape.value_size)
    return float(area.mean()) * pairs * 3.5 / (cluster.flops * ONE_RATE)
