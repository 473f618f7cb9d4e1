"""The structure of real jobs as a table: every pair of values of these axes, in as few small runs as that takes.

Flags say what is on; structure says how many there are of everything: gradient buckets, expert-parallel groups that
plan apart, micro-batches, model chunks. A tiny model has one of each, and what goes wrong between two of them does not
show.

A second table has options of different balancers, with every triple of them and of the parts that a model may have.
"""

from collections.abc import Mapping
from typing import Any

from tests.support.covering import Axes, covering
from tests.support.settings import settings

__all__ = [
    "AXES",
    "REAL",
    "ROUTERS",
    "balancers_of",
    "batch_of",
    "flags_of",
    "has_parts_of_micro_batches",
    "model_of",
    "moves_of",
    "option_rows",
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


def rows(strength: int) -> list[dict[str, Any]]:
    """Rows that together have every tuple of `strength` values of different axes that some row can have."""
    return covering(AXES, _CONDITIONS, strength)


# Options of different balancers, each with the others and with the parts that a model may have.
_OPTION_AXES: Axes = {
    "replicas": ("none", "resident", "shared"),
    "documents": ("whole", "over context ranks", "over data ranks"),
    "layers": ("stay", "move"),
    "weight gradients": ("at once", "deferred"),
    "head": ("untied", "multi-token prediction"),
    "shared experts": ("none", "some"),
    "frozen": ("none", "two layers"),
    "recompute": ("none", "experts", "layers"),
    "pipeline": ("2", "2 interleaved"),
}
_ON = {"experts": "replicas", "sequences": "documents", "layers": "layers", "fill": "weight gradients"}  # axis of each


def _balancers(row: Row) -> tuple[str, ...]:
    """Those that are not as the first value of their axis."""
    return tuple(name for name, axis in _ON.items() if row[axis] != _OPTION_AXES[axis][0])


def option_rows() -> list[Row]:
    """Rows with at least two balancers that have every triple of `_OPTION_AXES`, the first like a job with
    `--balance all`. All overlaps are on, with many buckets."""
    like_deepseek_v3 = {"documents": "whole", "frozen": "none", "recompute": "none", "pipeline": "2"}
    first = {axis: values[-1] for axis, values in _OPTION_AXES.items()} | {"replicas": "resident"} | like_deepseek_v3
    several = tuple(_ON.values()), lambda row: len(_balancers(row)) > 1
    # Else it is refused.
    freezes = (
        ("frozen", "recompute", "head"),
        lambda row: row["frozen"] == "none" or (row["recompute"] != "layers" and row["head"] == "untied"),
    )
    drawn = covering(_OPTION_AXES, (several, freezes), 3)
    return [_of_options(row) for row in (first, *drawn)]


def _of_options(drawn: Row) -> Row:
    several = drawn["documents"] == "over context ranks"
    fixed = {
        "data": 1 if several else 2,
        "context": 2 if several else 1,
        "expert data": 1,
        "overlap": "gradients and parameters",
        "micro-batches": 4,
        "slots": drawn["replicas"],
        "router": "a loss of samples",
        "balancers": _balancers(drawn),
    }
    return _USUAL | drawn | fixed


_LAYOUT = {"1": "", "2": "Et*3|t*2{}L", "2 interleaved": "Et*2|t|t|t{}L"}  # of five layers
_MOVES = {"2": ((2,), (3,)), "2 interleaved": ((1, 2), (1, 1))}


def moves_of(row: Row) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Layers of each chunk [stage][virtual] from an iteration on. Before it and after it, buckets are reduced under
    the backward pass: Megatron does so from the second iteration with a set of buckets on."""
    return {2: _MOVES[row["pipeline"]]} if "layers" in balancers_of(row) else {}


def balancers_of(row: Row) -> tuple[str, ...]:
    """The balancers of a row, which it names, or all that apply to it if they are on."""
    if not isinstance(row["balancers"], str):
        return row["balancers"]
    movable = row["head"] != "multi-token prediction" and row["pipeline"] != "1"
    applies = {"experts": True, "sequences": row["context"] > 1, "layers": movable}
    return tuple(name for name, does in applies.items() if does and row["balancers"] == "on")


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
    flags.append(model_of(row))
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
    late = {"late_slots": 1} if row["slots"] == "shared" and "fill" not in balancers_of(row) else {}
    flags_of_balancers = {
        "experts": f"--balance-experts {settings('experts', replica_mode=row['slots'], **late)}",
        "sequences": f"--balance-sequences --sequence-domain {'context' if row['context'] > 1 else 'data'}",
        "layers": "--balance-layers",
        "fill": "--fill-with-weight-gradients",
    }
    return " ".join(flags + [flags_of_balancers[name] for name in balancers_of(row)])


def model_of(row: Row) -> str:
    """Flags that make another model, or train it otherwise. Each has a reference of its own."""
    flags = [] if row["head"] == "tied" else ["--untie-embeddings-and-output-weights"]
    if row["head"] == "multi-token prediction":
        flags.append("--mtp-num-layers 1")
    if row.get("shared experts") == "some":
        flags.append("--moe-shared-expert-intermediate-size 32")
    if row.get("frozen") == "two layers":
        flags.append("--freeze-layers 2 --freeze-layers-start 2")
    return " ".join(flags)
