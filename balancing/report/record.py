"""The record of one iteration that rank 0 gathers from every rank.

All other modules of this package start from these records. They hold only plain Python and numpy, so a record can be
made, pickled and read without a process group or a GPU.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

__all__ = ["IterationRecord", "RankRecord", "Span"]


class Span(NamedTuple):
    """One timed piece of work of one rank. A tuple, since an iteration has thousands of spans.

    kind         "forward", "backward" or "recompute" of one layer; "forward-step" or "backward-step" for the whole call
                 of a stage on one micro-batch; "forward-exposed" or "backward-exposed" for messages of one layer that
                 no computation hides; any other kind ("plan", "apply", "optimizer") is shown under its name
    layer        global layer number from 0, a part of `balancing.pipeline.fixed_parts`, or "" for no layer
    chunk        virtual pipeline chunk of the rank, from 0
    micro_batch  number of the micro-batch in this iteration, from 0
    start        wall-clock seconds after the rank's own step began (`RankRecord.start` puts ranks on one axis)
    seconds      wall-clock seconds from start to end, waiting included
    busy         device seconds of work in it; a recompute inside a backward pass counts only in the recompute

    A pass that runs in parts, alternating with parts of another micro-batch, has several spans.
    """

    kind: str
    layer: int | str
    chunk: int
    micro_batch: int
    start: float
    seconds: float
    busy: float


@dataclass(slots=True)
class RankRecord:
    """One rank's share of one iteration.

    rank              global rank
    stage             its pipeline rank
    node              its node
    data, tensor, expert, context    its rank in these process groups
    start             wall-clock seconds from the earliest start of the step on any rank to this rank's start
    busy_seconds      device seconds of work in the step
    step_seconds      wall-clock seconds of the step on this rank
    memory_bytes      peak memory of the rank
    tokens            tokens it processed
    attention_area    query-key pairs it computed under the causal mask: a whole document of l tokens has l (l + 1) / 2
    longest_sequence  tokens of its longest document
    spans             its timed work; spans of one layer are in the order of time
    expert_tokens     layer -> int array [expert], tokens that this rank's router sent to each logical expert
    events            lines for the event log from the balancers of this rank, see `balancing.report.event`
    graphs            which CUDA graphs ran the passes: "" for none, "layers" for graphs of layers or less, "iteration"
                      for one graph. Of that only its begin and end are seen: `busy_seconds` is 0, `spans` has no passes
    """

    rank: int
    stage: int
    node: int
    data: int
    tensor: int
    expert: int
    context: int
    start: float
    busy_seconds: float
    step_seconds: float
    memory_bytes: int
    tokens: int
    attention_area: int
    longest_sequence: int
    spans: list[Span] = field(default_factory=list)
    expert_tokens: dict[int, np.ndarray] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    graphs: str = ""


@dataclass(slots=True)
class IterationRecord:
    """One iteration of the whole job: wall-clock seconds of the step, and one record for each rank.

    microbatch_group_size               with several chunks a stage, micro-batches that pass through a chunk before the
                                        next chunk runs; else None
    overlap_moe_expert_parallel_comm    whether a forward and a backward pass overlap, Megatron-LM's option
    kinds                               of a hybrid model, the name of each layer's kind, in the order of the model
    """

    iteration: int
    step_seconds: float
    ranks: list[RankRecord]
    microbatch_group_size: int | None = None
    overlap_moe_expert_parallel_comm: bool = False
    kinds: tuple[str, ...] = ()
