"""The event log: what was uneven in each iteration, one JSON object a line in DIR/events.jsonl.

Every observation and every action of a balancer is a line. All lines share ten keys (`STANDARD_KEYS`); further keys
depend on the balancer. `imbalance_before` and `imbalance_after` are always max / mean, so 1.0 is perfect. A run never
stops because its log cannot be written.

`observe` turns the record of an iteration into lines with action "observe", in which imbalance_before equals
imbalance_after. Lines of the balancers have other actions.

balancer "layers", unit "stage", action "observe":
    step_s              seconds of the step
    busy_s, idle_s      [stage], seconds, mean over the ranks of the stage
    bubble_fraction     share of the job's rank time that was idle
    micro_batches, chunks    of the step; chunks per stage
    microbatch_group_size, overlap_moe_expert_parallel_comm    with several chunks, as in Megatron-LM
    rank                numbers of the ranks; the following keys are [rank] in this order
    rank_busy_s, memory_bytes, stage, node, data, tensor, context, expert
    graphs              "layers" if CUDA graphs ran parts of the passes, else absent

balancer "layers", unit "step", action "observe", in the place of units "stage" and "layer" where one CUDA graph ran all
passes of the iteration, so that only its begin and end are seen; the imbalance is 1:
    step_s, rank, memory_bytes, stage, node, data, tensor, context, expert    as in unit "stage"
    graph_s             [rank], seconds of the graph, waits for other ranks included
    graphs              "iteration"

balancer "layers", unit "layer", action "observe"; the imbalance is that of the numbered layers:
    layers              names in the order of the model, "embedding" first, "head" last
    forward_s, backward_s, recompute_s    [layer], device seconds per micro-batch, mean over micro-batches and over the
                        ranks that hold the layer
    exposed_s           [layer], with overlap_moe_expert_parallel_comm: seconds of the experts' messages that no
                        computation hides; forward_s and backward_s include them
    stage, chunk        [layer], the stage and the chunk that hold the layer
    kinds               [layer], of a hybrid model: "attention", "Mamba" and so on

balancer "sequences", unit "rank", action "observe"; the imbalance is that of the attention area:
    tokens, attention_area, longest_sequence    [rank]
    token_imbalance     imbalance of tokens

balancer "sequences", unit "micro-batch", action "spread": what balancing did in a step, one line for each pipeline
`stage` and data-parallel `replica` (the first of those that share micro-batches), with means over `micro_batches`. The
imbalance is that of the attention area; before: as Megatron-LM would cut the batch:
    token_imbalance     imbalance of tokens in linear layers
    methods             planner -> number of micro-batches
    kernel              name of the kernel of attention
    kernel_flops        name -> measured FLOP/s of each kernel of attention that was timed; empty on CPUs
    plan_wait_ms        how long the step waited for plans
    apply_ms            how long attention waited for transfers, on the rank that waited longest
    kv_intra_bytes, kv_inter_bytes, remap_intra_bytes, remap_inter_bytes    sent by all ranks together, inside nodes and
                        between nodes
    local_share, intra_node_share, inter_node_share    shares of tokens whose document is on one rank, in one node, or
                        in several nodes
    micro_batch_imbalance_before, micro_batch_imbalance_after    imbalance of modelled seconds of micro-batches, as
                        drawn and as run
    micro_batch_step_before, micro_batch_step_after    modelled seconds of a step over those of a step of equal
                        micro-batches, if documents were distributed over micro-batches
    ordered_before, ordered_after    [rank of the domain], attention area over the mean of its micro-batch, from the
                        fullest rank to the emptiest

balancer "experts", unit "rank", action "observe": one line for each MoE layer; the imbalance is that of
tokens_per_rank:
    layer               number of the layer
    tokens_per_expert   [expert], over all ranks
    expert_imbalance    imbalance of tokens_per_expert
    tokens_per_rank     [expert-parallel rank], with every expert on its home rank, in contiguous blocks
    busy_s              [expert-parallel rank], device seconds of this layer per micro-batch
    graphs              "iteration" if one CUDA graph ran all passes; there is no busy_s then

balancer "experts", unit "layer", action "replicate" or "keep": what balancing did for one MoE layer in a step. The
imbalance is that of tokens of expert-parallel ranks, mean over micro-batches; before: with every expert on its home
rank, after: with replicas:
    tokens_per_rank     [expert-parallel rank], with replicas
    replicas            slots in use over all ranks
    late_copies         replicas that were added inside the layer, over all ranks and micro-batches
    drift               share of the layer's tokens that changed experts between the last two iterations before this one
    plan_age            iterations since the loads for which the replicas were placed
    plan_wait_ms        how long the step waited for plans
    apply_ms            how long the step waited for transfers of replicas
    moved_bytes         of weights and gradients, sent by all ranks together
    slot_bytes          memory of the replica slots of all layers of the model chunk on one rank, with gradients

balancer "experts", "sequences", "layers" or "together", unit "step", action "trial": what trials say
(`balancing.trials`), and of layers, steps before and after they moved:
    gain, gain_low, gain_high    seconds of a step without the balancer over those with it: the median over pairs of
                        steps, and its interval; gain_high is null with fewer than 6 pairs
    pairs               number of pairs
    pair_iterations, pair_ratios    [pair], of those since the line before: the later iteration, and the ratio
    on                  whether the balancer is on from now on

balancer "cluster", unit "call", action "measured": calls of one kind in a step on one rank, from which
`balancing.cluster.job_rates` takes rates of the machine; the imbalance is 1:
    kind                "experts", or the kernel of attention
    way                 "forward" or "backward"
    flops               of a query-key pair, or of a row, forward
    calls               [call][number]: pairs and queries in whole tiles and pieces, or rows and groups; device seconds;
                        how many calls took as much, of which these seconds are the median
    times               how many times as long all calls took as the rates say that planners had, if they had any

balancer "training", unit "loss", action "no loss": no token of any rank counted for the loss of this step
"""

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from balancing.files import check_output
from balancing.report.exposed import exposed_seconds
from balancing.report.record import IterationRecord, RankRecord

__all__ = [
    "IN_GRAPH",
    "MEASURED",
    "STANDARD_KEYS",
    "WARM_UP",
    "EventLog",
    "event",
    "imbalance",
    "measured_event",
    "observe",
]

MEASURED = "measured"  # action of lines from which rates are taken
IN_GRAPH = "iteration"  # `graphs` of a step whose passes one CUDA graph ran
WARM_UP = 2  # steps of a run whose calls are not measured
STANDARD_KEYS = (
    "iteration",
    "balancer",
    "unit",
    "imbalance_before",
    "imbalance_after",
    "plan_ms",
    "apply_ms",
    "moved_bytes",
    "action",
    "reason",
)

_PHASE = {"forward": 0, "backward": 1, "recompute": 2}

logger = logging.getLogger(__name__)


def imbalance(load: Any) -> float:
    """max / mean of an array of loads of any shape; 1.0, the perfect value, if there is no load."""
    load = np.asarray(load, dtype=float)
    mean = load.mean() if load.size else 0.0
    return float(load.max() / mean) if mean > 0 else 1.0


def event(
    iteration: int,
    balancer: str,
    unit: str,
    *,
    imbalance_before: float,
    imbalance_after: float | None = None,
    plan_ms: float = 0.0,
    apply_ms: float = 0.0,
    moved_bytes: int = 0,
    action: str = "observe",
    reason: str = "",
    **more: Any,
) -> dict[str, Any]:
    """One line of the log: all standard keys, then `more`. imbalance_after: imbalance_before by default."""
    after = imbalance_before if imbalance_after is None else imbalance_after
    values = (iteration, balancer, unit, imbalance_before, after, plan_ms, apply_ms, moved_bytes, action, reason)
    return dict(zip(STANDARD_KEYS, values, strict=True)) | more


def measured_event(iteration: int, calls: dict[str, Any]) -> dict[str, Any]:
    """A line on measured calls of one kind. iteration: from 0. calls: of `balancing.cluster.job_rates.Calls.line`."""
    return event(iteration + 1, "cluster", "call", imbalance_before=1.0, action=MEASURED, **calls)


class EventLog:
    """Appends events to DIR/events.jsonl, and makes DIR if it is missing.

    Each `write` reaches the operating system before it returns. If writing fails, for example on a full disk, one
    warning is logged, the log stays closed, and training goes on.

    Raises ValueError if DIR cannot be written to at the start.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = Path(directory) / "events.jsonl"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            check_output(self.path)
            self._file: int | None = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise ValueError(
                f"cannot write the event log {self.path}: {error.strerror}; give a directory that can be written to"
            ) from error
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            self._append(b"\n")  # an earlier run died in the middle of a line: keep our first line apart from it

    def write(self, events: Iterable[dict[str, Any]]) -> None:
        """Append `events`, usually those of one iteration. Numpy arrays and numbers become lists and numbers."""
        if self._file is None:
            return
        lines = []
        for line in events:
            assert all(key in line for key in STANDARD_KEYS), f"event without a standard key: {line}"
            lines.append(json.dumps(line, default=_plain, separators=(",", ":")))
        if lines:
            self._append(("\n".join(lines) + "\n").encode())

    def close(self) -> None:
        """Close the file. Later calls of `write` do nothing."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, data: bytes) -> None:
        assert self._file is not None
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as error:
            self.close()
            logger.warning(
                "cannot write %s any more (%s): training goes on, later events are lost", self.path, error.strerror
            )


def observe(record: IterationRecord) -> list[dict[str, Any]]:
    """The events of one iteration, as listed at the top of this file. Seconds are rounded to 0.1 microseconds."""
    ranks = sorted(record.ranks, key=lambda rank: rank.rank)
    assert ranks, f"iteration {record.iteration} was recorded on no rank"
    costs = [_RankCosts(rank) for rank in ranks]
    in_graph = ranks[0].graphs == IN_GRAPH
    events = [_step_event(record, ranks) if in_graph else _stage_event(record, ranks, costs)]
    if any(cost.seconds for cost in costs):
        events.append(_layer_event(record, ranks, costs))
    events.append(_sequence_event(record.iteration, ranks))
    events.extend(
        _expert_event(record.iteration, layer, ranks, costs)
        for layer in sorted({layer for rank in ranks for layer in rank.expert_tokens})
    )
    return events


class _RankCosts:
    """Device seconds by layer of one rank: layer -> [forward, backward, recompute], summed over micro-batches."""

    __slots__ = ("chunk", "exposed", "micro_batches", "seconds")

    def __init__(self, rank: RankRecord) -> None:
        self.seconds: dict[int | str, list[float]] = {}
        self.chunk: dict[int | str, int] = {}
        micro_batches = set()
        for kind, layer, chunk, micro_batch, _, _, busy in rank.spans:  # thousands a step: keep this loop lean
            phase = _PHASE.get(kind)
            if phase is None:
                continue
            seconds = self.seconds.get(layer)
            if seconds is None:
                seconds = self.seconds[layer] = [0.0, 0.0, 0.0]
                self.chunk[layer] = chunk
            seconds[phase] += busy
            micro_batches.add(micro_batch)
        self.micro_batches = len(micro_batches)
        self.exposed = exposed_seconds(rank.spans)  # (layer, phase) -> seconds per micro-batch


def _stage_event(record: IterationRecord, ranks: list[RankRecord], costs: list[_RankCosts]) -> dict[str, Any]:
    stage = np.array([rank.stage for rank in ranks])
    busy = np.array([rank.busy_seconds for rank in ranks])
    held = np.bincount(stage)
    assert held.all(), f"a pipeline stage has no rank: ranks by stage {held.tolist()}"
    busy_by_stage = np.bincount(stage, busy) / held
    idle = np.maximum(record.step_seconds - busy, 0.0)
    schedule: dict[str, Any] = {"graphs": ranks[0].graphs} if ranks[0].graphs else {}
    if record.microbatch_group_size is not None:
        schedule |= {
            "microbatch_group_size": record.microbatch_group_size,
            "overlap_moe_expert_parallel_comm": record.overlap_moe_expert_parallel_comm,
        }
    return event(
        record.iteration,
        "layers",
        "stage",
        imbalance_before=imbalance(busy_by_stage),
        step_s=round(record.step_seconds, 7),
        busy_s=_seconds(busy_by_stage),
        idle_s=_seconds(np.bincount(stage, idle) / held),
        bubble_fraction=float(idle.mean() / record.step_seconds) if record.step_seconds > 0 else 0.0,
        micro_batches=max(cost.micro_batches for cost in costs),
        chunks=1 + max((chunk for cost in costs for chunk in cost.chunk.values()), default=0),
        **schedule,
        rank_busy_s=_seconds(busy),
        **_places(ranks),
    )


def _step_event(record: IterationRecord, ranks: list[RankRecord]) -> dict[str, Any]:
    seconds = [sum(span.seconds for span in rank.spans if span.kind == "graph") for rank in ranks]
    return event(
        record.iteration,
        "layers",
        "step",
        imbalance_before=1.0,
        step_s=round(record.step_seconds, 7),
        graph_s=_seconds(np.array(seconds)),
        graphs=IN_GRAPH,
        **_places(ranks),
    )


def _places(ranks: list[RankRecord]) -> dict[str, Any]:
    names = ("rank", "memory_bytes", "stage", "node", "data", "tensor", "context", "expert")
    return {name: [int(getattr(rank, name)) for rank in ranks] for name in names}


def _layer_event(record: IterationRecord, ranks: list[RankRecord], costs: list[_RankCosts]) -> dict[str, Any]:
    total: dict[int | str, np.ndarray] = {}
    exposed: dict[int | str, float] = {}
    calls: dict[int | str, int] = {}  # micro-batches that passed the layer, summed over the ranks that hold it
    holder: dict[int | str, tuple[int, int]] = {}
    for rank, cost in zip(ranks, costs, strict=True):
        for layer, seconds in cost.seconds.items():
            waits = [cost.micro_batches * cost.exposed.get((layer, phase), 0.0) for phase in range(3)]
            total[layer] = total.get(layer, 0.0) + np.array(seconds) + waits
            exposed[layer] = exposed.get(layer, 0.0) + sum(waits)
            calls[layer] = calls.get(layer, 0) + cost.micro_batches
            holder.setdefault(layer, (rank.stage, cost.chunk[layer]))
    layers = sorted(total, key=_model_order)
    mean = np.array([total[layer] / calls[layer] for layer in layers])  # [layer, phase]
    numbered = [isinstance(layer, int) for layer in layers]
    kinds: dict[str, Any] = {}
    messages: dict[str, Any] = {}
    if any(exposed.values()):
        messages["exposed_s"] = _seconds(np.array([exposed[layer] / calls[layer] for layer in layers]))
    if record.kinds:
        kinds["kinds"] = [record.kinds[layer] if isinstance(layer, int) else layer for layer in layers]
    return event(
        record.iteration,
        "layers",
        "layer",
        imbalance_before=imbalance(mean.sum(1)[numbered]),
        layers=layers,
        forward_s=_seconds(mean[:, 0]),
        backward_s=_seconds(mean[:, 1]),
        recompute_s=_seconds(mean[:, 2]),
        **messages,
        stage=[holder[layer][0] for layer in layers],
        chunk=[holder[layer][1] for layer in layers],
        **kinds,
    )


def _sequence_event(iteration: int, ranks: list[RankRecord]) -> dict[str, Any]:
    tokens = [int(rank.tokens) for rank in ranks]
    area = [int(rank.attention_area) for rank in ranks]
    return event(
        iteration,
        "sequences",
        "rank",
        imbalance_before=imbalance(area),
        token_imbalance=imbalance(tokens),
        rank=[rank.rank for rank in ranks],
        tokens=tokens,
        attention_area=area,
        longest_sequence=[int(rank.longest_sequence) for rank in ranks],
    )


def _expert_event(iteration: int, layer: int, ranks: list[RankRecord], costs: list[_RankCosts]) -> dict[str, Any]:
    routed = [rank.expert_tokens[layer] for rank in ranks if layer in rank.expert_tokens]
    tokens = np.sum(routed, axis=0, dtype=np.int64)
    size = 1 + max(rank.expert for rank in ranks)
    assert tokens.size % size == 0, f"{tokens.size} experts cannot live in equal blocks on {size} ranks"
    per_rank = tokens.reshape(size, -1).sum(1)
    busy, calls = np.zeros(size), np.zeros(size)
    for rank, cost in zip(ranks, costs, strict=True):
        if layer in cost.seconds:
            busy[rank.expert] += sum(cost.seconds[layer])
            calls[rank.expert] += cost.micro_batches
    timed = {"busy_s": _seconds(busy / np.maximum(calls, 1))}
    return event(
        iteration,
        "experts",
        "rank",
        imbalance_before=imbalance(per_rank),
        expert_imbalance=imbalance(tokens),
        layer=layer,
        tokens_per_expert=tokens.tolist(),
        tokens_per_rank=per_rank.tolist(),
        **({"graphs": IN_GRAPH} if ranks[0].graphs == IN_GRAPH else timed),
    )


def _model_order(layer: int | str) -> tuple[int, int, str]:
    if isinstance(layer, int):
        return (1, layer, "")
    return ({"embedding": 0, "head": 3}.get(layer, 2), 0, layer)


def _seconds(values: np.ndarray) -> list[float]:
    return np.round(values, 7).tolist()


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"an event cannot hold {value!r}")
