"""Analysis of a recorded run: which ranks are slow, why, by how much, and what perfect balance would gain.

A run makes an `IterationRecord` for each iteration. From the records it writes DIR/events.jsonl (`EventLog`,
`observe`), a trace of the last iterations for Perfetto (`TraceLog`) and a few scalars for dashboards (`scalars`).
Afterwards `python -m balancing.report DIR` prints the slow stages, ranks, layers and experts, and writes
DIR/report.html.
"""

from balancing.report.events import (
    IN_GRAPH,
    MEASURED,
    STANDARD_KEYS,
    WARM_UP,
    EventLog,
    event,
    imbalance,
    measured_event,
    observe,
)
from balancing.report.history import (
    MOST_MEASURED,
    MOST_MICRO_BATCHES,
    History,
    measured_lines,
    read_history,
    report_files,
)
from balancing.report.record import IterationRecord, RankRecord, Span
from balancing.report.scalars import scalars
from balancing.report.summary import Summary, summarize
from balancing.report.trace import TraceLog, read_trace, write_trace

__all__ = [
    "IN_GRAPH",
    "MEASURED",
    "MOST_MEASURED",
    "MOST_MICRO_BATCHES",
    "STANDARD_KEYS",
    "WARM_UP",
    "EventLog",
    "History",
    "IterationRecord",
    "RankRecord",
    "Span",
    "Summary",
    "TraceLog",
    "event",
    "imbalance",
    "measured_event",
    "measured_lines",
    "observe",
    "read_history",
    "read_trace",
    "report_files",
    "scalars",
    "summarize",
    "write_trace",
]
