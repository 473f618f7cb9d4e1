"""Estimate of the step time under perfect balance of one kind of work, or of all.

An engineer who sees "stage 2 is 31 % over the mean" wants to know what that costs before moving anything. The answer
here is an estimate from measured device seconds, not a promise.

Model. Rank (s, l) of stage s and replica l works B[s, l] seconds a step, on m micro-batches in v chunks a stage, and
spends the share f of it on forward passes. In 1F1B some stage s works nearly without a pause. Before it the first
micro-batch fills the stages above, and after it the last one drains them; and if the stages below take longer to return
the first micro-batch than s takes for the forwards it may run ahead, it waits for the rest:

    pipeline(b) = max_s b[s] + (sum_{i<s} b[i] + max(0, sum_{i>s} b[i] - (P - 1 - s) f b[s])) / (m v)

For v = 1 this is exact for even stages and up to 6 % below the exact schedule for random ones, never above. The step
waits for the slowest replica, T = max_l pipeline(B[:, l]).

Ranks of an expert-parallel group wait for one another in every MoE layer, which a rank's total does not show: rank 0
may be hot in one layer and rank 1 in the next. So no rank of stage s is through before E[s] = mean_l B[s, l] + m * sum
over its MoE layers of (max - mean over expert-parallel ranks of the layer's seconds), and T is taken of max(B, E). Of
what a rank's seconds in such a layer differ from the mean, tokens explain no more than the layer would differ if all of
it went by tokens; the rest is the rank itself.

Levelling changes T to T'; the rest of the step (communication, data, optimizer) is taken to stay as it is:

    step' = step - (T - T'), and never below the mean load of a rank

    stages     every stage has the mean load, replicas keep their ratio
    sequences  ranks of one stage have the mean load of that stage, but for what tokens of experts explain
    experts    what tokens explain is gone from each MoE layer
    all        every rank has the mean load
    no idle    the limit: the step takes the mean load of a rank, no bubble and no waiting for anything

The gains overlap and must not be added. On a GPU the time a layer waits inside a collective counts as busy, which hides
uneven experts from the clock. Where tokens of expert-parallel ranks are uneven and their device time is not, "experts"
and what follows it say what is gained if MoE layers took time in proportion to the tokens of the fullest rank: this is
the most that can be had, and marked as `at_best`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

__all__ = ["Estimate", "ExpertLoad", "StepLoad", "estimate", "pipeline_seconds"]

# Device time that follows less than this share of the tokens' unevenness is taken not to show it at all.
_CLOCK_SEES_EXPERTS = 0.05


@dataclass(frozen=True)
class ExpertLoad:
    """One MoE layer in the typical step: its stage, and by expert-parallel rank the device seconds of the layer per
    micro-batch and the tokens per step."""

    stage: int
    seconds: np.ndarray
    tokens: np.ndarray


@dataclass(frozen=True)
class StepLoad:
    """The typical step.

    step_seconds    wall-clock seconds
    busy            float array [stage, replica], device seconds of a rank
    expert          int array [stage, replica], the expert-parallel rank of that rank
    micro_batches   m, at least 1; infinity if not known, which leaves the fill of the pipeline out
    chunks          v, at least 1
    forward_share   f, the forward passes' part of the busy time
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
    """Step time if `balanced` ("stages", "sequences", "experts", "all", "no idle") were even; `saved` is a share of the
    measured step, 0 to 1. `at_best`: an upper bound of the gain rather than an expectation."""

    balanced: str
    step_seconds: float
    saved: float
    at_best: bool = False


def pipeline_seconds(busy: np.ndarray, micro_batches: float, chunks: int, forward_share: float) -> float:
    """Seconds the slowest of some 1F1B pipelines takes; `busy` is [stage, pipeline] in seconds a step."""
    stages = len(busy)
    ahead = np.arange(stages - 1, -1, -1)[:, None]  # forwards a stage may run before its first backward
    above = np.cumsum(busy, axis=0) - busy
    below = busy.sum(axis=0) - above - busy
    fill = above + np.maximum(below - ahead * forward_share * busy, 0.0)
    return float((busy + fill / (micro_batches * chunks)).max())


def estimate(load: StepLoad) -> list[Estimate]:
    """One estimate for each unevenness that this run could have, then "all" and "no idle"."""
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
    """What uneven MoE layers cost in seconds a step.

    wait        [stage, 1]: how long the mean rank waits for the slowest of its layers
    token_wait, other_wait    [stage, 1]: the same if ranks differed by what tokens explain alone, or by the rest alone
    excess      [stage, replica]: the part of a rank's busy time over the mean that tokens explain
    bound       [stage, 1]: the gain if layers took time in proportion to tokens; 0 unless that is all there is to go by
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
