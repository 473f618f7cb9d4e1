"""The last iterations as a trace for Perfetto or chrome://tracing: DIR/trace.json.

Only a few iterations are kept, so that neither memory nor the file grows with the run: the last `KEEP` recorded
iterations, and for comparison the last one before layers moved between stages. All together have at most `MAX_SPANS`
spans, about 20 MB.

Each rank is a process of the trace, "rank 3 (stage 1)", with a track for the step, one for the stage's calls on
micro-batches, one for layers and one for all other spans. Times are in microseconds, as the format requires. Iterations
follow one another without a gap; time between recorded iterations is not shown.
"""

import json
import logging
import os
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from balancing.files import parse_json, read_text, write_text
from balancing.report.record import IterationRecord, RankRecord, Span

__all__ = ["KEEP", "MAX_SPANS", "TraceIteration", "TraceLog", "read_trace", "write_trace"]

KEEP = 3
MAX_SPANS = 100_000
_MOST_SECONDS = 1e9  # of a span; a file with longer spans is damaged

_TRACKS = ("step", "micro-batches", "layers", "other")
_TRACK_OF = {"forward-step": 1, "backward-step": 1, "forward": 2, "backward": 2, "recompute": 2}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TraceIteration:
    """One iteration read back from a trace.

    stage: rank -> its pipeline stage.
    spans: rank -> its spans; their starts are relative to the earliest start of the step on any rank.
    """

    iteration: int
    step_seconds: float
    stage: dict[int, int]
    spans: dict[int, list[Span]]

    @property
    def layers(self) -> dict[int, tuple[int, ...]]:
        """Stage -> the layers that it ran."""
        return _layers((self.stage[rank], spans) for rank, spans in self.spans.items())


def _layers(ranks: Iterable[tuple[int, list[Span]]]) -> dict[int, tuple[int, ...]]:
    found: dict[int, set[int]] = {}
    for stage, spans in ranks:
        found.setdefault(stage, set()).update(span.layer for span in spans if isinstance(span.layer, int))
    return {stage: tuple(sorted(layers)) for stage, layers in sorted(found.items())}


class TraceLog:
    """Holds the last `KEEP` records of a run and writes them to DIR/trace.json.

    If writing fails, for example on a full disk, one warning is logged, nothing is written afterwards, and training
    goes on.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = Path(directory) / "trace.json"
        self._records: deque[IterationRecord] = deque(maxlen=KEEP)
        self._before_move: IterationRecord | None = None
        self._layers: dict[int, tuple[int, ...]] = {}
        self._failed = False

    def add(self, record: IterationRecord) -> None:
        """Keep `record`; drop the oldest record if there are more than `KEEP`."""
        layers = _layers((rank.stage, rank.spans) for rank in record.ranks)
        if self._records and layers != self._layers:
            self._before_move = self._records[-1]
        self._layers = layers
        self._records.append(record)

    def write(self) -> None:
        """Replace DIR/trace.json by a trace of the kept records. Does nothing without records.

        Takes about 10 microseconds a span: call it now and then and at the end, not in every iteration.
        """
        if self._failed or not self._records:
            return
        try:
            earlier = self._before_move
            kept = list(self._records)
            if earlier is not None and all(record is not earlier for record in kept):
                kept.insert(0, earlier)
            write_trace(self.path, kept)
        except ValueError as error:
            self._failed = True
            logger.warning("%s; training goes on without a trace", error)


def write_trace(path: str | os.PathLike[str], records: Sequence[IterationRecord]) -> None:
    """Write `records`, oldest first, to `path`; if they have more than `MAX_SPANS` spans, only the last records.

    If the last record alone has more spans, only its lowest ranks that fit are written. A reader sees the old file or
    the new one, never a part of it.

    Raises ValueError if the file cannot be written.
    """
    kept: list[tuple[IterationRecord, list[RankRecord]]] = []
    left = MAX_SPANS
    for record in reversed(records):
        ranks = sorted(record.ranks, key=lambda rank: rank.rank)
        spans = sum(len(rank.spans) for rank in ranks)
        if spans > left:
            if kept:
                break
            ranks = _fitting(ranks, left)
        kept.insert(0, (record, ranks))
        left -= spans
    write_text(path, json.dumps(_trace(kept), separators=(",", ":")))  # not json.dump, which is ten times slower


def read_trace(path: str | os.PathLike[str]) -> list[TraceIteration]:
    """The iterations of a trace that `write_trace` wrote, oldest first.

    Raises ValueError, without the path, if the file cannot be read or is not such a trace.
    """
    text = read_text(path)
    try:
        trace = parse_json(text)
        stage = {rank["rank"]: rank["stage"] for rank in trace["otherData"]["ranks"]}
        iterations = {
            entry["iteration"]: TraceIteration(
                entry["iteration"], entry["seconds"], stage, {rank: [] for rank in stage}
            )
            for entry in trace["otherData"]["iterations"]
        }
        begin = {entry["iteration"]: entry["begin_us"] for entry in trace["otherData"]["iterations"]}
        for line in trace["traceEvents"]:
            if line["ph"] == "X" and line["cat"] != "step":
                args = line["args"]
                start = (line["ts"] - begin[args["iteration"]]) / 1e6
                seconds, busy = line["dur"] / 1e6, args["busy_us"] / 1e6
                if not all(abs(time) <= _MOST_SECONDS for time in (start, seconds, busy)):
                    raise ValueError(f"a span takes {seconds} seconds")
                iterations[args["iteration"]].spans[line["pid"]].append(
                    Span(line["cat"], args["layer"], args["chunk"], args["micro_batch"], start, seconds, busy)
                )
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise ValueError(f"it is not a trace written by balancing.report: {error!r}") from error
    return list(iterations.values())


def _fitting(ranks: list[RankRecord], limit: int) -> list[RankRecord]:
    kept = []
    for rank in ranks:
        limit -= len(rank.spans)
        if limit < 0:
            break
        kept.append(rank)
    return kept


def _trace(kept: list[tuple[IterationRecord, list[RankRecord]]]) -> dict[str, Any]:
    events: list[dict[str, Any]] = []
    iterations = []
    known: dict[int, RankRecord] = {}
    begin = 0.0  # microseconds
    for record, ranks in kept:
        iterations.append({"iteration": record.iteration, "begin_us": begin, "seconds": record.step_seconds})
        for rank in ranks:
            known[rank.rank] = rank
            own = begin + rank.start * 1e6
            events.append(
                {"name": f"iteration {record.iteration}", "cat": "step", "ph": "X", "pid": rank.rank, "tid": 0,
                 "ts": round(own, 3), "dur": round(rank.step_seconds * 1e6, 3),
                 "args": {"iteration": record.iteration, "busy_us": round(rank.busy_seconds * 1e6, 3),
                          "tokens": int(rank.tokens), "attention_area": int(rank.attention_area),
                          "memory_bytes": int(rank.memory_bytes)}}
            )  # fmt: skip
            events.extend(_line(span, record.iteration, rank.rank, own) for span in rank.spans)
        ends = [rank.start + rank.step_seconds for rank in ranks]
        begin = round(begin + 1e6 * max(record.step_seconds, *ends, 0.0), 3)
    return {
        "traceEvents": _names(known) + events,
        "displayTimeUnit": "ms",
        "otherData": {
            "iterations": iterations,
            "ranks": [
                {key: getattr(rank, key) for key in ("rank", "stage", "node", "data", "tensor", "context", "expert")}
                for rank in known.values()
            ],
        },
    }


def _line(span: Span, iteration: int, rank: int, begin: float) -> dict[str, Any]:
    kind, layer, chunk, micro_batch, start, seconds, busy = span
    where = f"layer {layer} " if isinstance(layer, int) else f"{layer} " if layer else ""
    return {
        "name": f"{where}{kind}", "cat": kind, "ph": "X", "pid": rank, "tid": _TRACK_OF.get(kind, 3),
        "ts": round(begin + start * 1e6, 3), "dur": round(seconds * 1e6, 3),
        "args": {"iteration": iteration, "layer": layer, "micro_batch": micro_batch, "chunk": chunk,
                 "busy_us": round(busy * 1e6, 3)},
    }  # fmt: skip


def _names(ranks: dict[int, RankRecord]) -> list[dict[str, Any]]:
    names: list[dict[str, Any]] = []
    for number, rank in ranks.items():
        process = {"name": f"rank {number} (stage {rank.stage})"}
        names.append({"name": "process_name", "ph": "M", "pid": number, "tid": 0, "args": process})
        names.append({"name": "process_sort_index", "ph": "M", "pid": number, "tid": 0, "args": {"sort_index": number}})
        names.extend(
            {"name": "thread_name", "ph": "M", "pid": number, "tid": tid, "args": {"name": track}}
            for tid, track in enumerate(_TRACKS)
        )
    return names
