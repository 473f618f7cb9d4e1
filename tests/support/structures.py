"""The structure of real jobs as a table: every pair of values of these axes, in as few small runs as that takes.

Flags say what is on; structure says how many there are of everything: gradient buckets, expert-parallel groups that
plan apart, micro-batches, model chunks. A tiny model has one of each, and what goes wrong between two of them does not
show.

The table is a greedy set cover over all rows that can be. Of libraries, allpairspy leaves out 35 possible pairs where
values exclude each other as they do here.
"""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.support.settings import settings

__all__ = [
    "AXES",
    "REAL",
    "ROUTERS",
    "batch_of",
    "flags_of",
    "has_parts_of_micro_batches",
    "moves_of",
    "rows",
    "world_size",
]

Row = Mapping[str, Any]

# Flags of what routers add to the loss, or correct. Every run has a bias, which stays 0 unless it has a rate.
ROUTERS = {
    "a loss of micro-batches": "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2",
    "a loss of samples": "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-1",
    "losses of both and of logits": "--moe-router-load-balancing-type aux_loss seq_aux_loss "
    "--moe-aux-loss-coeff 1e-2 1e-1 --moe-z-loss-coeff 1e-2",
    "a loss of all micro-batches": "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-2",
    "a bias": "--moe-router-load-balancing-type none --moe-router-bias-update-rate 1e-2",
}

AXES: dict[str, tuple[Any, ...]] = {
    "pipeline": ("1", "2", "2 interleaved"),
    "tensor": ("1", "2", "2, experts too"),
    "context": (1, 2),
    "data": (1, 2),
    "expert data": (1, 2),
    "optimizer": ("whole", "sharded", "two instances"),
    "overlap": ("none", "gradients", "gradients and parameters"),
    "buckets": ("one", "many"),
    "micro-batches": (1, 2, 5),  # of a rank; five come in groups of three and two where chunks are interleaved
    "slots": ("resident", "shared"),
    "dispatcher": ("alltoall", "allgather"),
    "head": ("tied", "untied", "multi-token prediction"),
    "recompute": ("none", "experts", "layers"),
    "balancers": ("off", "on"),
    "samples": (1, 2),  # of a micro-batch
    "router": tuple(ROUTERS),
}


def _expert_ranks(row: Row) -> tuple[int, int]:
    """The ranks of a stage, and those that experts are spread over, 0 where they cannot be."""
    tensor = 1 if row["tensor"] == "1" else 2
    stage = tensor * row["context"] * row["data"]
    beside = (2 if row["tensor"] == "2, experts too" else 1) * row["expert data"]
    return stage, 0 if stage % beside else stage // beside


def world_size(row: Row) -> int:
    return _expert_ranks(row)[0] * (1 if row["pipeline"] == "1" else 2)


# Axes, and what must hold for their values in one row.
_CONDITIONS: tuple[tuple[tuple[str, ...], Any], ...] = (
    # Experts are spread over two or four ranks, of eight at most.
    (("tensor", "context", "data", "expert data"), lambda row: _expert_ranks(row)[1] in (2, 4)),
    (("pipeline", "tensor", "context", "data", "expert data"), lambda row: world_size(row) <= 8),
    # Upstream has no attention over context-parallel ranks without Transformer Engine.
    (("context", "balancers"), lambda row: row["context"] == 1 or row["balancers"] == "on"),
    # An instance is a part of the data-parallel ranks, of experts as well.
    (
        ("optimizer", "expert data", "context", "data"),
        lambda row: (
            row["optimizer"] != "two instances" or (row["expert data"] == 2 and row["context"] * row["data"] > 1)
        ),
    ),
    (("optimizer", "overlap"), lambda row: row["optimizer"] != "whole" or row["overlap"] != "gradients and parameters"),
    (("pipeline", "micro-batches"), lambda row: row["pipeline"] != "2 interleaved" or row["micro-batches"] > 1),
    # It adds up the micro-batches so far, which are others where data-parallel ranks have them at the same time.
    (("router", "data"), lambda row: row["router"] != "a loss of all micro-batches" or row["data"] == 1),
)

_USUAL = {
    "pipeline": "1",
    "tensor": "1",
    "context": 1,
    "data": 4,
    "expert data": 2,
    "optimizer": "sharded",
    "overlap": "gradients",
    "buckets": "many",
    "micro-batches": 2,
    "slots": "resident",
    "dispatcher": "alltoall",
    "recompute": "none",
    "head": "untied",
    "balancers": "on",
    "samples": 1,
    "router": "a loss of micro-batches",
}
_GATHERED = _USUAL | {"overlap": "gradients and parameters", "buckets": "one"}
# What a job looks like that somebody trains: rows of the table whatever the library chooses.
REAL: dict[str, Row] = {
    "experts' buckets reduced while groups plan apart": _USUAL,
    "parameters gathered as they are needed": _GATHERED | {"balancers": "off"},
    "the same, interleaved": _GATHERED | {"pipeline": "2 interleaved"},
    "a loss of samples, of which tensor-parallel ranks have parts": _USUAL
    | {"tensor": "2", "data": 2, "expert data": 1, "balancers": "off", "samples": 2, "router": "a loss of samples"},
}


def _possible() -> np.ndarray:
    """bool, a dimension for each axis: which rows meet all conditions."""
    names, shape = list(AXES), [len(values) for values in AXES.values()]
    possible = np.ones(shape, bool)
    for axes, condition in _CONDITIONS:
        asked = sorted(axes, key=names.index)
        parts = itertools.product(*(AXES[axis] for axis in asked))
        holds = np.array([condition(dict(zip(asked, part, strict=True))) for part in parts])
        possible &= holds.reshape([size if name in asked else 1 for name, size in zip(names, shape, strict=True)])
    return possible


def rows(strength: int) -> list[dict[str, Any]]:
    """Rows that together have every tuple of `strength` values of different axes that some row can have."""
    sizes = [len(values) for values in AXES.values()]
    candidates = np.argwhere(_possible())  # [row, axis]
    # Numbers of the tuples that each row has, a column for each set of axes, unique over all columns.
    columns, starts = [], [0]
    for axes in itertools.combinations(range(len(sizes)), strength):
        numbers = np.ravel_multi_index(candidates[:, axes].T, [sizes[axis] for axis in axes])
        columns.append((starts[-1] + numbers).astype(np.int32))
        starts.append(starts[-1] + math.prod(sizes[axis] for axis in axes))
    missing = np.zeros(starts[-1], bool)
    for column in columns:
        missing[column] = True
    random = np.random.default_rng(0)
    table = []
    while missing.any():
        # A sample of the rows that have the first missing tuple: the best of all rows is hardly better.
        first = np.argmax(missing)
        having = np.flatnonzero(columns[np.searchsorted(starts, first, "right") - 1] == first)
        sample = random.choice(having, min(2000, len(having)), replace=False)
        tuples = np.stack([column[sample] for column in columns], axis=1)
        best = np.argmax(missing[tuples].sum(axis=1))
        missing[tuples[best]] = False
        table.append({axis: AXES[axis][value] for axis, value in zip(AXES, candidates[sample[best]], strict=True)})
    return table


_LAYOUT = {"1": "", "2": "Et*3|t*2{}L", "2 interleaved": "Et*2|t|t|t{}L"}  # of five layers
_MOVES = {"2": ((2,), (3,)), "2 interleaved": ((1, 2), (1, 1))}


def moves_of(row: Row) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Layers of each chunk [stage][virtual] from an iteration on. Before it and after it, buckets are reduced under
    the backward pass: Megatron does so from the second iteration with a set of buckets on."""
    movable = row["balancers"] == "on" and row["head"] != "multi-token prediction" and row["pipeline"] != "1"
    return {2: _MOVES[row["pipeline"]]} if movable else {}


def has_parts_of_micro_batches(row: Row) -> bool:
    """Whether the loss has a part that depends on which samples are in one micro-batch."""
    routers = "a loss of micro-batches", "losses of both and of logits", "a loss of all micro-batches"
    return row["router"] in routers or row["head"] == "multi-token prediction"


def batch_of(row: Row) -> int:
    """Samples of a step."""
    return row["micro-batches"] * row["data"] * row["samples"]


def flags_of(row: Row) -> str:
    _, expert_ranks = _expert_ranks(row)
    tensor, is_mtp = row["tensor"], row["head"] == "multi-token prediction"
    many = row["micro-batches"]
    flags = [
        f"--num-layers 5 --expert-model-parallel-size {expert_ranks} --context-parallel-size {row['context']}",
        f"--micro-batch-size {row['samples']} --global-batch-size {batch_of(row)}",
        f"--moe-token-dispatcher-type {row['dispatcher']} {ROUTERS[row['router']]}",
    ]
    if row["pipeline"] != "1":
        layout = _LAYOUT[row["pipeline"]].format("m" if is_mtp else "")
        flags.append(f"--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout {layout}")
        if row["pipeline"] == "2 interleaved" and many == 5:
            flags.append("--microbatch-group-size-per-virtual-pipeline-stage 3")
    if tensor != "1":
        experts = 2 if tensor == "2, experts too" else 1
        flags.append(f"--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size {experts}")
    flags.append(head_of(row))
    if row["optimizer"] != "whole":
        flags.append("--use-distributed-optimizer")
    if row["optimizer"] == "two instances":
        flags.append("--num-distributed-optimizer-instances 2")
        if row["pipeline"] != "1":  # where aligned reductions are refused: upstream makes them twice
            flags.append("--no-align-grad-reduce")
    if row["overlap"] != "none":
        flags.append("--overlap-grad-reduce")
    if row["overlap"] == "gradients and parameters":
        flags.append("--overlap-param-gather")
    if row["buckets"] == "many":
        flags.append("--ddp-bucket-size 2000")
    if row["recompute"] == "experts":
        flags.append("--recompute-granularity selective --recompute-modules moe")
    elif row["recompute"] == "layers":
        flags.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    if row["balancers"] == "on":
        flags.append(f"--balance-experts {settings('experts', replica_mode=row['slots'])}")
        flags.append("--balance-sequences" if row["context"] > 1 else "")
        flags.append("--balance-layers" if moves_of(row) else "")
    return " ".join(flags)


def head_of(row: Row) -> str:
    """Flags that make another model, which has a reference of its own."""
    if row["head"] == "tied":
        return ""
    mtp = " --mtp-num-layers 1" if row["head"] == "multi-token prediction" else ""
    return f"--untie-embeddings-and-output-weights{mtp}"
