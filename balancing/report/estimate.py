"""Estimate of the step time under perfect balance of one kind of work, or of all, from measured device seconds.

Pipeline. Rank (s, l) of stage s and replica l works B[s, l] seconds a step, on m micro-batches in v chunks a stage, and
spends the share f of this time on forward passes. P is the number of stages. In 1F1B some stage s works nearly without
a pause. Before that the first micro-batch must pass the stages above s, and afterwards the last micro-batch must return
through them. If the stages below take longer to return the first micro-batch than s takes for the forward passes that
it may run ahead, s waits for the difference:

    pipeline(b) = max_s b[s] + (sum_{i<s} b[i] + max(0, sum_{i>s} b[i] - (P - 1 - s) f b[s])) / (m v)

For v = 1 this is exact for even stages. For random stages it is up to 6 % below the exact schedule, never above. The
step waits for the slowest replica, T = max_l pipeline(B[:, l]).

Experts. Ranks of an expert-parallel group wait for one another in every MoE layer. A rank's total does not show that:
rank 0 may be hot in one layer and rank 1 in the next. So no rank of stage s finishes before E[s] = mean_l B[s, l] + m *
sum over its MoE layers of (max - mean over expert-parallel ranks of the layer's seconds), and T is computed from
max(B, E). The difference of a rank's seconds in an MoE layer from the mean has two parts. Tokens explain at most the
difference that the layer would have if its time were proportional to tokens; the rest is due to the rank itself.

Balancing changes T to T'. The rest of the step (communication, data, optimizer) is assumed not to change:

    step' = step - (T - T'), and never below the mean load of a rank

    stages     every stage has the mean load, replicas keep their ratio
    sequences  ranks of one stage have the mean load of that stage, except for the part that tokens of experts explain
    experts    MoE layers without the part that tokens explain
    all        every rank has the mean load
    no idle    the limit: the step takes the mean load of a rank, without bubble and without any waiting

The gains overlap and must not be added.

On a GPU the time that a layer waits inside a collective counts as busy, so device time may not show uneven experts. If
tokens of expert-parallel ranks are uneven and their device time is not, "experts", "all" and "no idle" assume that MoE
layers take time in proportion to the tokens of the fullest rank. Their gain is then an upper bound, marked `at_best`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

__all__ = ["Estimate", "ExpertLoad", "StepLoad", "estimate", "pipeline_seconds"]

# If tokens explain less than this share of the imbalance that they would cause, device time is assumed not to show it.
_CLOCK_SEES_EXPERTS = 0.05


@dataclass(frozen=True)
class ExpertLoad:
    """One MoE layer in the typical step.

    stage: that holds the layer.
    seconds: [expert-parallel rank], device seconds of the layer per micro-batch.
    tokens: [expert-parallel rank], tokens per step.
    """

    stage: int
    seconds: np.ndarray
    tokens: np.ndarray


@dataclass(frozen=True)
class StepLoad:
    """The typical step.

    step_seconds    wall-clock seconds
    busy            float array [stage, replica], device seconds of a rank
    expert          int array [stage, replica], the expert-parallel rank of that rank
    micro_batches   m, at least 1; infinity if unknown, which leaves out warm-up and cool-down of the pipeline
    chunks          v, at least 1
    forward_share   f, the share of forward passes in busy time
    expert_layers   layer -> its load, empty for a dense model
    """

    step_seconds: float
    busy: np.ndarray
    expert: np.ndarray
    micro_batches: float
    chunks: int
    forward_share: float
    expert_layers: Mapping[int, ExpertLoad]


@dataclass(frozen=True)
class Estimate:
    """Step time under perfect balance of one kind of work.

    balanced: "stages", "sequences", "experts", "all" or "no idle".
    step_seconds: estimated seconds of the step.
    saved: share of the measured step, 0 to 1.
    at_best: whether the gain is an upper bound rather than an expectation.
    """

    balanced: str
    step_seconds: float
    saved: float
    at_best: bool = False


def pipeline_seconds(busy: np.ndarray, micro_batches: float, chunks: int, forward_share: float) -> float:
    """Seconds of the slowest of several 1F1B pipelines. busy: [stage, pipeline], seconds a step."""
    stages = len(busy)
    ahead = np.arange(stages - 1, -1, -1)[:, None]  # forwards a stage may run before its first backward
    above = np.cumsum(busy, axis=0) - busy
    below = busy.sum(axis=0) - above - busy
    fill = above + np.maximum(below - ahead * forward_share * busy, 0.0)
    return float((busy + fill / (micro_batches * chunks)).max())


def estimate(load: StepLoad) -> list[Estimate]:
    """One estimate for each kind of work that could be uneven in this run, then "all" and "no idle"."""
    busy, mean = load.busy, float(load.busy.mean())
    stage_mean = busy.mean(axis=1, keepdims=True)
    experts = _experts(load)

    def seconds(work: np.ndarray) -> float:
        return pipeline_seconds(work, load.micro_batches, load.chunks, load.forward_share)

    def step(saved_seconds: float, balanced: str, at_best: bool = False) -> Estimate:
        predicted = min(max(load.step_seconds - max(saved_seconds, 0.0), float(even.mean())), load.step_seconds)
        return Estimate(balanced, predicted, 1.0 - predicted / load.step_seconds, at_best)

    now = seconds(np.maximum(busy, stage_mean + experts.wait))
    at_best = bool(experts.bound.any())
    even = busy - experts.excess - experts.bound
    estimates = []
    if busy.shape[0] > 1:
        scale = mean / np.where(stage_mean > 0, stage_mean, 1.0)
        estimates.append(step(now - seconds(np.maximum(busy, stage_mean + experts.wait) * scale), "stages"))
    if busy.shape[1] > 1:
        estimates.append(step(now - seconds(stage_mean + experts.token_wait), "sequences"))
    if any(layer.tokens.size > 1 for layer in load.expert_layers.values()):
        left = seconds(np.maximum(even, stage_mean - experts.bound + experts.other_wait))
        estimates.append(step(now - left, "experts", at_best))
    if busy.size > 1:
        estimates.append(step(now - seconds(np.full_like(busy, even.mean())), "all", at_best))
    return [*estimates, step(load.step_seconds, "no idle", at_best)]


@dataclass(frozen=True)
class _ExpertCost:
    """Cost of uneven MoE layers in seconds a step.

    wait        [stage, 1]: how long the mean rank waits for the slowest rank, over all MoE layers
    token_wait  [stage, 1]: `wait` if ranks differed only by the part that tokens explain
    other_wait  [stage, 1]: `wait` if ranks differed only by the rest
    excess      [stage, replica]: the part of a rank's busy time over the mean that tokens explain
    bound       [stage, 1]: the gain if layers took time in proportion to tokens; 0 if device time shows uneven tokens
    """

    wait: np.ndarray
    token_wait: np.ndarray
    other_wait: np.ndarray
    excess: np.ndarray
    bound: np.ndarray


def _experts(load: StepLoad) -> _ExpertCost:
    wait, token_wait, other_wait, bound = (np.zeros((load.busy.shape[0], 1)) for _ in range(4))
    excess = np.zeros_like(load.busy)
    m = load.micro_batches if np.isfinite(load.micro_batches) else 0.0
    for layer in load.expert_layers.values():
        mean, stage = layer.seconds.mean(), layer.stage
        differ = layer.seconds - mean
        by_tokens = mean * (layer.tokens / max(layer.tokens.mean(), 1e-9) - 1.0)
        explained = np.clip(differ, np.minimum(by_tokens, 0.0), np.maximum(by_tokens, 0.0))
        wait[stage] += m * differ.max()
        token_wait[stage] += m * explained.max()
        other_wait[stage] += m * (differ - explained).max()
        excess[stage] += m * explained[load.expert[stage]]
        bound[stage] += m * mean * (1.0 - layer.tokens.mean() / max(layer.tokens.max(), 1e-9))
    if token_wait.sum() >= _CLOCK_SEES_EXPERTS * bound.sum():
        bound[:] = 0.0
    return _ExpertCost(wait, token_wait, other_wait, excess, bound)
