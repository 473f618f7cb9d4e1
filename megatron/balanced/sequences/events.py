"""Events of the report about the documents of a step: their spread over ranks, and what that took."""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from balancing.cluster import Cluster
from balancing.kernels.pairs import causal_area
from balancing.kernels.timed import TimedKernel
from balancing.report import event, imbalance, measured_event
from balancing.sequences import AttentionShape, SequenceAttention, SequencePlan
from balancing.sequences.micro_batches import document_seconds
from balancing.sequences.plan import zone_shares
from balancing.sequences.sequence_plan import layer_kinds, zigzag_areas
from megatron.balanced.sequences.domain import Domain

__all__ = ["MicroBatch", "Share", "StepRecord", "calls_event", "step_event"]


class MicroBatch(NamedTuple):
    """A micro-batch of a step in one model chunk.

    origins, numbers: [document], its origin, and its index among the documents that were drawn together.
    attentions: one for each kind of layers.
    plan_ms, waited_ms: milliseconds of planning, and of waiting for the plan.
    """

    chunk: int
    plan: SequencePlan
    origins: tuple[int, ...]
    numbers: tuple[int, ...]
    attentions: list[SequenceAttention]
    plan_ms: float
    waited_ms: float


class Share(NamedTuple):
    """What an event says of one rank's part in a step. It has no process groups: a loop may ask for an event when they
    are gone.

    domain, cluster, shape: the ranks that share micro-batches, and the model.
    kernel, kernel_flops: as in `Choice`: name and rates.
    stage, replica: the pipeline stage and data-parallel rank of this rank.
    padded, step_seconds: as in `Tokens`.
    """

    domain: Domain
    cluster: Cluster
    shape: AttentionShape
    kernel: str
    kernel_flops: dict[str, float]
    stage: int
    replica: int
    padded: bool
    step_seconds: Callable[[np.ndarray], float] | None


class StepRecord:
    """The micro-batches of the training step in progress, on one rank.

    timed: whether someone reads the times of messages.
    most_rows: most rows of keys and values, own and received, in a micro-batch so far, also of validation.
    """

    def __init__(self, timed: bool) -> None:
        self.timed, self.most_rows = timed, 0
        self._batches: list[MicroBatch] | None = None

    def begin(self) -> None:
        """A schedule of a training step begins, perhaps once more."""
        self._batches = []

    def add(self, batch: MicroBatch) -> None:
        self.most_rows = max(self.most_rows, *(attention.program.program.rows for attention in batch.attentions))
        if self._batches is not None:
            self._batches.append(batch)

    @property
    def digest(self) -> int:
        """Digest of all plans of the step, below 2^56."""
        digests = "".join(batch.plan.digest for batch in self._batches or ()).encode()
        return int.from_bytes(hashlib.sha256(digests).digest()[:7], "little")

    @property
    def spent(self) -> list[int]:
        """Six numbers of the step: microseconds that this rank waited for transfers, and for plans; bytes of keys and
        values that it sent inside its node, and to other nodes; bytes of remapping that it sent inside its node, and to
        others."""
        batches = self._batches or ()
        statistics = [attention.statistics for batch in batches for attention in batch.attentions]
        return [
            round(sum(counted.exposed_seconds for counted in statistics) * 1e6),
            round(sum(batch.waited_ms for batch in batches) * 1e3),
            sum(counted.intra_bytes for counted in statistics),
            sum(counted.inter_bytes for counted in statistics),
            sum(counted.remap_intra_bytes for counted in statistics),
            sum(counted.remap_inter_bytes for counted in statistics),
        ]

    def end(self) -> list[MicroBatch]:
        """Returns the micro-batches of the step."""
        batches, self._batches = self._batches or [], None
        return batches


def calls_event(
    iteration: int, kernel: TimedKernel, taken: list[Any], way: str, name: str, cluster: Cluster
) -> dict[str, Any]:
    """The event of a step's calls of the kernel of attention `name`.

    iteration: from 0. taken, way: as in `TimedKernel.told`. cluster: that planners have.
    """
    return measured_event(iteration, kernel.told(taken, way, name).line(cluster))


def step_event(
    iteration: int, batches: Sequence[MicroBatch], spent_by_rank: np.ndarray, share: Share
) -> dict[str, Any]:
    """The event of one step.

    iteration: from 0.
    batches: the batches of the step, in all chunks of the rank.
    spent_by_rank: int64 [rank, number], `StepRecord.spent` of each rank that shares micro-batches.
    """
    domain, cluster, shape, kernel, kernel_flops, stage, replica, padded, step = share
    exposed, waited, *sent = spent_by_rank.T
    kv_intra, kv_inter, remap_intra, remap_inter = (int(part.sum()) for part in sent)
    plan_ms = sum(batch.plan_ms for batch in batches)
    batches = [batch for batch in batches if batch.chunk == 0]  # every chunk has the same plans
    plans = [batch.plan for batch in batches]
    drawn = _drawn(batches, domain.origins, step is not None)
    areas = [_areas(plan, lengths, shape, padded) for plan, lengths in zip(plans, drawn, strict=True)]
    costs = [
        np.array([document_seconds(lengths, cluster, shape).sum() for lengths in lengths_by_micro_batch])
        for lengths_by_micro_batch in ([np.concatenate(lengths) for lengths in drawn], [plan.lengths for plan in plans])
    ]
    # Fullest rank first: it differs between micro-batches, so means by rank would hide it.
    ordered = np.mean([[np.sort(area)[::-1] / area.mean() for area in pair] for pair in areas], axis=0)
    return event(
        iteration + 1,
        "sequences",
        "micro-batch",
        imbalance_before=float(np.mean([imbalance(before) for before, _ in areas])),
        imbalance_after=float(np.mean([imbalance(after) for _, after in areas])),
        plan_ms=plan_ms,
        apply_ms=int(exposed.max()) / 1e3,
        moved_bytes=kv_intra + kv_inter + remap_intra + remap_inter,
        action="spread",
        micro_batches=len(plans),
        methods=dict(Counter(plan.method for plan in plans)),
        kernel=kernel,
        kernel_flops=kernel_flops,
        token_imbalance=float(np.mean([imbalance(plan.linear_tokens) for plan in plans])),
        micro_batch_imbalance_before=imbalance(costs[0]),
        micro_batch_imbalance_after=imbalance(costs[1]),
        **({} if step is None else _steps_over_equal(costs, step)),
        plan_wait_ms=int(waited.max()) / 1e3,
        kv_intra_bytes=kv_intra,
        kv_inter_bytes=kv_inter,
        remap_intra_bytes=remap_intra,
        remap_inter_bytes=remap_inter,
        **zone_shares(plans, cluster),
        ordered_before=ordered[0],
        ordered_after=ordered[1],
        stage=stage,
        replica=replica,
    )


def _steps_over_equal(costs: list[np.ndarray], step: Callable[[np.ndarray], float]) -> dict[str, float]:
    """Seconds of the step divided by those with equal micro-batches. costs: [micro-batch], as drawn and as run."""
    equal = step(np.full_like(costs[0], costs[0].mean()))
    return {
        f"micro_batch_step_{when}": step(seconds) / equal
        for when, seconds in zip(("before", "after"), costs, strict=True)
    }


def _drawn(batches: Sequence[MicroBatch], origins: int, dealt: bool) -> list[list[np.ndarray]]:
    """[micro-batch][data-parallel rank], lengths of the documents that Megatron-LM drew."""
    parts = [np.array([batch.numbers, batch.origins, batch.plan.lengths]) for batch in batches]
    if not dealt:
        return [[lengths[origin == index] for index in range(origins)] for _, origin, lengths in parts]
    number, origin, lengths = np.concatenate(parts, axis=1)
    origin, lengths = origin[np.argsort(number)], lengths[np.argsort(number)]
    return [
        [lengths[origin == first + index] for index in range(origins)]
        for first in range(0, len(batches) * origins, origins)
    ]


def _areas(
    plan: SequencePlan, drawn: list[np.ndarray], shape: AttentionShape, padded: bool
) -> tuple[np.ndarray, np.ndarray]:
    """[rank], area of all layers if Megatron-LM cut the batch, and under the plan. drawn, padded: as in
    `_upstream_areas`."""
    kinds = layer_kinds(plan, shape)
    before = sum(layers * _upstream_areas(own, drawn, padded) for own, layers in kinds)
    return np.asarray(before), np.asarray(sum(layers * own.area for own, layers in kinds))


def _upstream_areas(plan: SequencePlan, drawn: list[np.ndarray], padded: bool) -> np.ndarray:
    """[rank], area if Megatron-LM cut the batch: its micro-batches each on the context-parallel ranks of a
    data-parallel rank, the packed sequence in a zig-zag.

    plan: the plan of the layers; its mask counts.
    drawn: lengths of Megatron-LM's micro-batch, by data-parallel rank.
    padded: every document is padded to fit, and cut over all of these ranks, which is balanced.
    """
    ranks, window = plan.ranks // len(drawn), plan.window
    areas = []
    for lengths in drawn:
        areas += [causal_area(lengths, window) / ranks] * ranks if padded else [*zigzag_areas(lengths, ranks, window)]
    return np.array(areas)
