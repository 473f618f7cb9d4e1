"""Reads a run's report directory.

Logs may be damaged: the job was killed in the middle of a line, the disk was full, or a restart wrote iterations again.
A damaged line is counted and left out. Of several lines for one iteration the last one counts. Unknown keys, units and
actions are accepted.
"""

import contextlib
import math
import os
import re
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from balancing.files import parse_json
from balancing.report.events import IN_GRAPH, MEASURED
from balancing.report.trace import TraceIteration, read_trace
from balancing.report.units import byte_count
from balancing.trials import ClockGain, Pair

__all__ = [
    "MEMORY",
    "MOST_MEASURED",
    "MOST_MICRO_BATCHES",
    "STEPS",
    "Damage",
    "History",
    "measured_lines",
    "read_history",
    "report_files",
]

# Bounds of the values of a line. Below them sums over all ranks are exact in float64 and fit int64.
MOST_LINE_BYTES = 64 << 20
MOST_MICRO_BATCHES = 100_000  # of a rank in a step
MOST_MEASURED = 1024  # lines of action "measured" that are read, the last ones
# Of lines that come in each iteration only the first and the last bytes are read: a log of weeks has gigabytes.
FIRST_BYTES, LAST_BYTES = 8 << 20, 256 << 20
_OFTEN = re.compile(rb'\{[^[{]*"iteration":(\d+),[^[{]*"action":"(?:observe|spread|replicate|keep|measured)"')
_BLOCK = 16 << 20  # bytes that are read at once
_MOST_COUNT = 2**53  # tokens, bytes, attention area, iterations
_MOST_NUMBER = 1e9  # seconds, and other numbers that are not counts
_MOST_PLACE = 2**20  # number of a rank, stage, node, layer
_MOST_CHUNKS = 4096

# Keys that a line of action "observe" must have, by balancer and unit. Keys of one group are arrays of one length.
_GROUPS: dict[tuple[str, str], tuple[tuple[str, ...], ...]] = {
    ("layers", "stage"): (
        ("busy_s", "idle_s"),
        ("rank", "rank_busy_s", "memory_bytes", "stage", "node", "data", "tensor", "context", "expert"),
    ),
    ("layers", "step"): (("rank", "graph_s", "memory_bytes", "stage", "node", "data", "tensor", "context", "expert"),),
    ("layers", "layer"): (("layers", "forward_s", "backward_s", "recompute_s", "stage", "chunk"),),
    ("sequences", "rank"): (("rank", "tokens", "attention_area", "longest_sequence"),),
    ("experts", "rank"): (("tokens_per_expert",), ("tokens_per_rank", "busy_s")),
}
_NUMBERS: dict[tuple[str, str], tuple[str, ...]] = {
    ("layers", "stage"): ("step_s", "bubble_fraction", "micro_batches", "chunks"),
    ("layers", "step"): ("step_s",),
    ("sequences", "rank"): ("token_imbalance",),
    ("experts", "rank"): ("expert_imbalance", "layer"),
}
# Arrays that a line of another action may have.
_OF_ACTIONS = ("tokens_per_rank", "ordered_before", "ordered_after")
# Numbers that a line of another action may have.
STEPS = ("micro_batch_step_before", "micro_batch_step_after")
# Bytes of a device's memory: held by a balancer, and the peak until a move of layers had ended.
MEMORY = ("slot_bytes", "peak_bytes")
_STANDARD_NUMBERS = ("imbalance_before", "imbalance_after", "plan_ms", "apply_ms", "moved_bytes")
# Bounds of whole numbers, and of arrays of numbers that are not counts.
_WHOLE = {
    "iteration": (0, _MOST_COUNT),
    "micro_batches": (0, MOST_MICRO_BATCHES),
    "microbatch_group_size": (1, MOST_MICRO_BATCHES),
    "chunks": (1, _MOST_CHUNKS),
    "layer": (0, _MOST_PLACE),
}
_PLACES = dict.fromkeys(("rank", "stage", "node", "data", "tensor", "context", "expert"), _MOST_PLACE)
_PLACES["chunk"] = _MOST_CHUNKS
_GAIN = ("gain", "gain_low", "gain_high")  # of trials
_DISTINCT = ("rank", "layers")  # arrays without repeated entries


@dataclass
class Damage:
    """Lines of a log that cannot be used.

    count: number of damaged lines.
    first: number of the first damaged line, and what is wrong with it.
    kinds: number of damaged lines of action "observe" by (balancer, unit), as far as they are JSON.
    """

    path: Path
    count: int = 0
    first: str = ""
    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, number: int, line: Any, why: str) -> None:
        self.count += 1
        self.first = self.first or f"line {number}: {' '.join(why.split()):.200}"
        if isinstance(line, dict) and line.get("action") == "observe":
            self.kinds[str(line.get("balancer")), str(line.get("unit"))] += 1

    def __bool__(self) -> bool:
        return self.count > 0

    def __str__(self) -> str:
        """One sentence without a full stop."""
        lines = f"{self.count} damaged line{'s' if self.count > 1 else ''}"
        return f"{lines} in {self.path.name} skipped, the first is {self.first}"


@dataclass
class History:
    """The contents of DIR. Lines are as `observe` wrote them, with numpy arrays for lists.

    stages, layers, sequences    iteration -> its line of action "observe"
    in_graphs    iteration -> the line of its step, if one CUDA graph ran all passes
    experts      iteration -> layer -> its line of action "observe"
    actions      every line whose action is not "observe", "trial" or "measured", in the order of the file
    by_the_clock balancer, or "together" -> what it gained in all trials so far (`balancing.trials`)
    pairs        balancer, or "together" -> the pairs of steps in these trials
    times        (what was measured, "forward" or "backward") -> how many times as long its calls took as by the
                 rates that planners had, by line
    row_seconds  seconds of a row in a rank's experts, forward, by line
    timelines    the iterations of the trace, oldest first
    no_timeline  why there is no timeline; "" if there is one
    left_out     bytes of lines between the first and the last iterations that were not read
    damage       lines that could not be used
    """

    directory: Path
    stages: dict[int, dict[str, Any]] = field(default_factory=dict)
    layers: dict[int, dict[str, Any]] = field(default_factory=dict)
    in_graphs: dict[int, dict[str, Any]] = field(default_factory=dict)
    sequences: dict[int, dict[str, Any]] = field(default_factory=dict)
    experts: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)
    actions: list[dict[str, Any]] = field(default_factory=list)
    by_the_clock: dict[str, ClockGain] = field(default_factory=dict)
    # Balancer that a trial left off -> iterations since: the last ones, and those in which it was on.
    _since_off: dict[str, tuple[deque[int], set[int]]] = field(default_factory=dict)
    times: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    row_seconds: list[float] = field(default_factory=list)
    pairs: dict[str, list[Pair]] = field(default_factory=dict)
    timelines: list[TraceIteration] = field(default_factory=list)
    no_timeline: str = ""
    left_out: int = 0
    damage: Damage = field(init=False)

    def __post_init__(self) -> None:
        self.damage = Damage(self.directory / "events.jsonl")

    @property
    def unread(self) -> str:
        """Sentences on what of the log was not used; "" if all was."""
        middle = [f"{byte_count(self.left_out)} in the middle of events.jsonl were not read"] if self.left_out else []
        return " ".join(f"{each}." for each in [*middle, *([str(self.damage)] if self.damage else [])])

    @property
    def switched_off(self) -> set[str]:
        """Balancers that were off after the last trial of them, and in most of the last iterations: a job may go on
        without trials, or from before the decision."""
        return {name for name, (seen, on) in self._since_off.items() if len(on & {*seen}) <= max(len(seen) // 2, 5)}

    @property
    def iterations(self) -> list[int]:
        """Every observed iteration, ascending."""
        observed = (self.stages, self.layers, self.in_graphs, self.sequences, self.experts)
        return sorted(set[int]().union(*observed))

    def lacks(self, balancer: str, unit: str, otherwise: str) -> ValueError:
        """The error for a log without lines of `balancer` and `unit`: all are damaged, else the text `otherwise`."""
        path, lost = self.damage.path, self.damage.kinds[balancer, unit]
        if lost:
            return ValueError(
                f"{path}: all {lost} lines of balancer {balancer!r} and unit {unit!r} are damaged "
                f"({self.damage}); restore the file from a copy, or record the run again"
            )
        return ValueError(f"{otherwise} ({self.damage})" if self.damage else otherwise)

    def keep(self, line: Any) -> None:
        """Add one line. Raises KeyError, TypeError or ValueError if it lacks a key of its kind or has wrong values."""
        if not isinstance(line, dict):
            raise TypeError(f"it is not a JSON object but {type(line).__name__}")
        iteration, key = _number(line, "iteration"), (line["balancer"], line["unit"])
        observed = line["action"] == "observe"
        for name in _STANDARD_NUMBERS + (_NUMBERS.get(key, ()) if observed else ()):
            _number(line, name)
        for name in (*STEPS, *MEMORY, "microbatch_group_size"):
            if name in line:
                _number(line, name)
        if line["action"] == "trial":
            ratio, low, high = (math.inf if line[name] is None else float(line[name]) for name in _GAIN)
            if not 0 <= low <= ratio <= high:
                raise ValueError("a gain is not within its interval, or not a number")
            if (iterations := line.get("pair_iterations", [])) or "pair_ratios" in line:
                ratios = line["pair_ratios"]
                numbers = all(type(iteration) is int for iteration in iterations)
                if not numbers or not all(type(ratio) in (int, float) and 0 < ratio < math.inf for ratio in ratios):
                    raise ValueError("a pair has no iteration or no ratio")
                pairs = [Pair(*pair) for pair in zip(iterations, ratios, strict=True)]
                self.pairs.setdefault(str(line["balancer"]), []).extend(pairs)
            name = str(line["balancer"])
            self.by_the_clock[name] = ClockGain(ratio, low, high, _number(line, "pairs"))
            self._since_off.pop(name, None)
            if not line.get("on", True):
                self._since_off[name] = (deque(maxlen=20), set())
            return
        if line["action"] == MEASURED:  # for planners, `measured_lines` reads them
            self._keep_measured(line)
            return
        if not observed:
            for name in _OF_ACTIONS:
                if name in line:
                    line[name] = _row(line, name)
            if len(line.get("ordered_before", ())) != len(line.get("ordered_after", ())):
                raise ValueError("ordered_before and ordered_after differ in length")
            if "tokens_per_rank" in line:
                _number(line, "layer")
            self.actions.append(line)
            if line["balancer"] in self._since_off:
                self._since_off[line["balancer"]][1].add(iteration)
            return
        for seen, _ in self._since_off.values():
            if iteration not in seen:
                seen.append(iteration)
        for group in _GROUPS.get(key, ()):
            if line.get("graphs") == IN_GRAPH:
                group = tuple(name for name in group if name != "busy_s")
            for name in group:
                line[name] = _names(line[name]) if name == "layers" else _row(line, name)
                if name in _DISTINCT and len(set(line[name])) < len(line[name]):
                    raise ValueError(f"{name} has one number twice")
            if len({len(line[name]) for name in group}) > 1:
                raise ValueError(f"{', '.join(group)} differ in length")
        match key:
            case "layers", "stage":
                if set(line["stage"].tolist()) != set(range(len(line["busy_s"]))):
                    raise ValueError("stage does not name the stages of busy_s")
                if line["step_s"] <= 0:
                    raise ValueError("step_s is 0")
                self.stages[iteration] = line
                self.in_graphs.pop(iteration, None)  # of a job that was killed
            case "layers", "step":
                if line["step_s"] <= 0:
                    raise ValueError("step_s is 0")
                self.in_graphs[iteration] = line
                for other in (self.stages, self.layers):
                    other.pop(iteration, None)
            case "layers", "layer":
                if "kinds" in line and len(_names(line["kinds"])) != len(line["layers"]):
                    raise ValueError("layers and kinds differ in length")
                self.layers[iteration] = line
            case "sequences", "rank":
                self.sequences[iteration] = line
            case "experts", "rank":
                self.experts.setdefault(iteration, {})[line["layer"]] = line

    def _keep_measured(self, line: dict[str, Any]) -> None:
        kind = str(line["kind"]), str(line["way"])
        if "times" in line:
            _number(line, "times")
            self.times.setdefault(kind, []).append(line["times"])
        if kind == ("experts", "forward"):
            calls = np.array(line["calls"], dtype=float)
            if calls.ndim != 2 or calls.shape[1] != 4 or not (np.isfinite(calls) & (calls > 0)).all():
                raise ValueError("calls of experts are not rows, groups, seconds and a number, all above 0")
            rows, _, seconds, number = calls.T
            self.row_seconds.append(float((seconds * number).sum() / (rows * number).sum()))


def _number(line: dict[str, Any], name: str) -> int:
    """A number of `line`, from 0 to its bound."""
    value = line[name]
    least, most = _WHOLE.get(name, (0, _MOST_COUNT if name.endswith("_bytes") else _MOST_NUMBER))
    if type(value) is not int and (type(value) is not float or name in _WHOLE):
        raise TypeError(f"{name} is {value!r:.40}, no {'whole ' if name in _WHOLE else ''}number")
    if not least <= value <= most:
        raise ValueError(f"{name} is {value:g}, not from {least} to {most:g}")
    return int(value)


def _row(line: dict[str, Any], name: str) -> np.ndarray:
    """A one-dimensional array of `line` with numbers from 0 to their bound: float64 or int64."""
    real = name.endswith("_s") or (name in _OF_ACTIONS and line["action"] != "observe")
    row = np.asarray(line[name])
    if row.ndim != 1 or not row.size or row.dtype.kind not in ("iuf" if real else "iu"):
        raise TypeError(f"{name} is no row of {'' if real else 'whole '}numbers")
    most = _MOST_NUMBER if name.endswith("_s") else _PLACES.get(name, _MOST_COUNT)
    if not ((row >= 0) & (row <= most)).all():
        raise ValueError(f"{name} has numbers that are not from 0 to {most:g}")
    return row.astype(np.float64 if real else np.int64)


def _names(names: Any) -> list[int | str]:
    """A list of layers: numbers, and names such as "embedding"."""
    if not isinstance(names, list) or not names:
        raise TypeError("layers is no list")
    for name in names:
        if type(name) is not str and not (type(name) is int and 0 <= name <= _MOST_PLACE):
            raise TypeError(f"layers has {name!r:.40}, which is no layer")
    return names


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, text) of each line that is not blank. Of a too long line only the beginning is read."""
    with open(path, "rb") as file:
        number = 0
        while text := file.readline(MOST_LINE_BYTES + 1):
            number += 1
            if text.strip():
                yield number, text
            while len(text) > MOST_LINE_BYTES and not text.endswith(b"\n"):
                text = file.readline(MOST_LINE_BYTES + 1)


def _backward(path: Path) -> Iterator[bytes]:
    """The lines of a file, the last one first: a log of weeks has gigabytes, of which the end is asked for."""
    with open(path, "rb") as file:
        at, rest = file.seek(0, os.SEEK_END), b""
        while at:
            size = min(at, _BLOCK)
            at = file.seek(at - size)
            rest, *lines = (file.read(size) + rest).split(b"\n")
            yield from reversed(lines)
            rest = rest if len(rest) <= MOST_LINE_BYTES else b""  # damaged
        yield rest


def report_files(directory: Path) -> list[Path]:
    """The files that a report is read from. Nothing else may be written over them."""
    return [directory / "events.jsonl", directory / "trace.json"]


def measured_lines(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The last lines of action "measured" in DIR/events.jsonl; none where there is no such file. Other lines are not
    looked at, and lines that are no JSON objects are left out.

    Raises ValueError, in one line, if the file cannot be read.
    """
    path, found = Path(directory) / "events.jsonl", deque[bytes]()
    if not path.is_file():
        return []
    try:
        for text in _backward(path):
            if f'"{MEASURED}"'.encode() in text:
                found.appendleft(text)
                if len(found) == MOST_MEASURED:
                    break
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; name a directory that can be read") from error
    lines = []
    for text in found:
        with contextlib.suppress(ValueError):
            line = parse_json(text)
            if isinstance(line, dict) and line.get("action") == MEASURED:
                lines.append(line)
    return lines


def read_history(directory: str | os.PathLike[str]) -> History:
    """Read DIR/events.jsonl, and DIR/trace.json if it exists. Of a long log, iterations in the middle are left out.

    Raises ValueError, in one line, if there is no directory, no event log, or no usable line in the log.
    """
    directory = Path(directory)
    path = directory / "events.jsonl"
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory; give the one that --balance-report named")
    if not path.exists():
        raise ValueError(f"{directory} holds no events.jsonl; train with --balance-report {directory}")
    if not path.is_file():
        raise ValueError(f"{path} is no regular file; give the directory that --balance-report named")
    history = History(directory)
    number_of: dict[int, int] = {}  # iteration -> line number of its layers
    try:
        at, last, kept, skipped = 0, path.stat().st_size - LAST_BYTES, b"", b""
        for number, text in _lines(path):
            at, line = at + len(text), None
            if often := _OFTEN.match(text):  # iterations are read whole or not at all
                if often[1] != kept and (FIRST_BYTES < at < last or often[1] == skipped):
                    skipped = often[1]
                    history.left_out += len(text)
                    continue
                kept = often[1]
            try:
                if len(text) > MOST_LINE_BYTES:
                    raise ValueError(f"it has more than {MOST_LINE_BYTES:,} bytes")
                line = parse_json(text)
                history.keep(line)
                if (line["balancer"], line["unit"], line["action"]) == ("layers", "layer", "observe"):
                    number_of[line["iteration"]] = number
            except KeyError as error:
                history.damage.add(number, line, f"it has no {error.args[0]!r}")
            except (TypeError, ValueError, OverflowError) as error:
                history.damage.add(number, line, str(error))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; name a directory that can be read") from error
    for iteration, layers in list(history.layers.items()):
        known = history.stages.get(iteration) or next(reversed(history.stages.values()), None)
        if known is not None and (stage := layers["stage"].max()) >= (stages := len(known["busy_s"])):
            del history.layers[iteration]
            history.damage.add(number_of[iteration], layers, f"stage names stage {stage} of {stages} from 0")
    if not history.iterations and not history.actions:
        if history.damage:
            raise ValueError(
                f"{path} is damaged: all of its {history.damage.count} lines ({history.damage.first}); restore it from "
                "a copy, or record the run again"
            )
        raise ValueError(f"{path} is empty; let the run finish at least one recorded iteration")
    if not (directory / "trace.json").exists():
        history.no_timeline = "there is no trace.json in the directory"
        return history
    try:
        history.timelines = read_trace(directory / "trace.json")
    except ValueError as error:
        history.no_timeline = f"trace.json cannot be read ({error})"
    if not history.no_timeline and not any(any(t.spans.values()) for t in history.timelines):
        history.no_timeline = "the trace holds no timed work"
    return history
