"""A run's report directory, read back.

Files of a training run are seldom whole: the job was killed in the middle of a line, a disk was full for a while, a
restart appended to the log and wrote some iterations twice. A damaged line is counted and left out, the last word on an
iteration wins, and what other programs add (unknown keys, units, actions) is no reason to stop.
"""

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from balancing.report.trace import TraceIteration, read_trace

__all__ = ["STEPS", "History", "read_history"]

# Keys that an observed line must have, by balancer and unit. Keys of one group are arrays of one length.
_GROUPS: dict[tuple[str, str], tuple[tuple[str, ...], ...]] = {
    ("layers", "stage"): (
        ("busy_s", "idle_s"),
        ("rank", "rank_busy_s", "memory_bytes", "stage", "node", "data", "tensor", "context", "expert"),
    ),
    ("layers", "layer"): (("layers", "forward_s", "backward_s", "recompute_s", "stage", "chunk"),),
    ("sequences", "rank"): (("rank", "tokens", "attention_area", "longest_sequence"),),
    ("experts", "rank"): (("tokens_per_expert",), ("tokens_per_rank", "busy_s")),
}
_NUMBERS: dict[tuple[str, str], tuple[str, ...]] = {
    ("layers", "stage"): ("step_s", "bubble_fraction", "micro_batches", "chunks"),
    ("sequences", "rank"): ("token_imbalance",),
    ("experts", "rank"): ("expert_imbalance",),
}
# Arrays that the line of an action may have.
_OF_ACTIONS = ("tokens_per_rank", "ordered_before", "ordered_after")
# Numbers that it may have.
STEPS = ("micro_batch_step_before", "micro_batch_step_after")
_STANDARD_NUMBERS = ("imbalance_before", "imbalance_after", "plan_ms", "apply_ms", "moved_bytes")


@dataclass
class History:
    """Everything DIR knows. Lines are as `observe` wrote them, with numpy arrays for lists.

    stages, layers, sequences    iteration -> its line
    experts      iteration -> layer -> its line
    actions      every line whose action is not "observe", in the order of the file
    layout       where the tokens of the last batch are that was written in full, and its `iteration`; None for none
    timelines    the iterations of the trace, oldest first; `no_timeline` says why there are none
    damaged      lines that could not be read
    """

    directory: Path
    stages: dict[int, dict[str, Any]] = field(default_factory=dict)
    layers: dict[int, dict[str, Any]] = field(default_factory=dict)
    sequences: dict[int, dict[str, Any]] = field(default_factory=dict)
    experts: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)
    actions: list[dict[str, Any]] = field(default_factory=list)
    layout: dict[str, Any] | None = None
    timelines: list[TraceIteration] = field(default_factory=list)
    no_timeline: str = ""
    damaged: int = 0

    @property
    def iterations(self) -> list[int]:
        """Every observed iteration, ascending."""
        return sorted(self.stages.keys() | self.layers.keys() | self.sequences.keys() | self.experts.keys())

    def keep(self, line: dict[str, Any]) -> None:
        """File one line. Raises KeyError, TypeError or ValueError if it is not what its balancer and unit say."""
        iteration, key = line["iteration"], (line["balancer"], line["unit"])
        if type(iteration) is not int:
            raise TypeError(iteration)
        observed = line["action"] == "observe"
        numbers = _STANDARD_NUMBERS + (_NUMBERS.get(key, ()) if observed else ())
        if not all(math.isfinite(line[name]) for name in numbers):
            raise ValueError("not a finite number")
        if not all(math.isfinite(line.get(name, 1)) for name in STEPS):
            raise ValueError("a step over another is not a finite number")
        if not observed:
            for name in _OF_ACTIONS:
                if name in line:
                    line[name] = np.asarray(line[name], dtype=float)
                    if (
                        line[name].ndim != 1
                        or not line[name].size
                        or not np.isfinite(line[name]).all()
                        or (line[name] < 0).any()
                    ):
                        raise ValueError(f"{name} is not a row of numbers from 0 up")
            if len(line.get("ordered_before", ())) != len(line.get("ordered_after", ())):
                raise ValueError("ranks before and after differ in number")
            if line.get("layout"):
                self.layout = _layout_of(line["layout"]) | {"iteration": iteration}
            self.actions.append(line)
            return
        for group in _GROUPS.get(key, ()):
            for name in group:
                if name != "layers":
                    line[name] = np.asarray(line[name], dtype=float if name.endswith("_s") else np.int64)
                    if not np.isfinite(line[name]).all() or (line[name] < 0).any():
                        raise ValueError(f"{name} is negative or not finite")
            lengths = {len(line[name]) for name in group}
            if len(lengths) != 1 or 0 in lengths:
                raise ValueError(f"{group} differ in length")
        match key:
            case "layers", "stage":
                if set(line["stage"].tolist()) != set(range(len(line["busy_s"]))) or line["step_s"] <= 0:
                    raise ValueError("ranks and stages do not fit, or the step took no time")
                group = line.get("microbatch_group_size", 1)
                if type(group) is not int or group < 1:
                    raise ValueError(f"microbatch_group_size is {group}")
                self.stages[iteration] = line
            case "layers", "layer":
                if not all(isinstance(name, int | str) for name in line["layers"]):
                    raise TypeError("a layer has no name")
                self.layers[iteration] = line
            case "sequences", "rank":
                self.sequences[iteration] = line
            case "experts", "rank":
                self.experts.setdefault(iteration, {})[int(line["layer"])] = line


def _layout_of(layout: dict[str, Any]) -> dict[str, Any]:
    """`layout` of a batch as `sequences` wrote it. Raises KeyError, TypeError or ValueError if it is not."""
    ranks, per_node = int(layout["ranks"]), int(layout["ranks_per_node"])
    shards = np.array(layout["shards"], dtype=np.int64)
    area, before = (np.array(layout[name], dtype=float) for name in ("area", "area_before"))
    if ranks < 1 or per_node < 1 or ranks % per_node or area.shape != (ranks,) or before.shape not in ((ranks,), (0,)):
        raise ValueError("ranks do not fit")
    if shards.ndim != 2 or shards.shape[1] != 4 or (shards < 0).any() or (shards[:, 3] >= ranks).any():
        raise ValueError("shards do not fit")
    return {
        "ranks": ranks,
        "ranks_per_node": per_node,
        "shards": shards.tolist(),
        "area": area,
        "area_before": before,
    }


def read_history(directory: str | os.PathLike[str]) -> History:
    """Read DIR/events.jsonl, and DIR/trace.json if it is there.

    Raises ValueError, in one line, if there is no directory, no event log, or no line in it that can be read.
    """
    directory = Path(directory)
    path = directory / "events.jsonl"
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory; give the one that --balance-report named")
    history = History(directory)
    try:
        with open(path, "rb") as file:
            for text in file:
                if text.strip():
                    try:
                        history.keep(json.loads(text))
                    except (KeyError, TypeError, ValueError, OverflowError):
                        history.damaged += 1
    except FileNotFoundError:
        raise ValueError(f"{directory} holds no events.jsonl; train with --balance-report {directory}") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    if not history.iterations and not history.actions:
        why = f"none of its {history.damaged} lines can be read" if history.damaged else "it is empty"
        raise ValueError(f"{path} holds no measurements, {why}; let the run finish at least one recorded iteration")
    try:
        history.timelines = read_trace(directory / "trace.json")
    except FileNotFoundError:
        history.no_timeline = "there is no trace.json in the directory"
    except (OSError, ValueError) as error:
        history.no_timeline = f"trace.json cannot be read ({error})"
    if not history.no_timeline and not any(any(t.spans.values()) for t in history.timelines):
        history.no_timeline = "the trace holds no timed work"
    return history
