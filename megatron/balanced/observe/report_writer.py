"""Gather the records of all ranks and write the report: events.jsonl, trace.json, and scalars for TensorBoard and W&B.

The last rank writes, because a trainer's own TensorBoard and W&B writers are there.
"""

import datetime
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from megatron.core import ModelParallelConfig

from balancing.ranges import name_ranges
from balancing.report import MEASURED, EventLog, IterationRecord, RankRecord, TraceLog, observe, scalars

__all__ = ["ReportWriter"]

# Between two writes of trace.json. It holds whole iterations of all ranks, too much to rewrite after each of them.
_TRACE_SECONDS = 60.0


class ReportWriter:
    """Writes the report of a job into `directory`. One on each rank.

    is_last: whether this is the last rank. Process groups do not exist yet.
    timeout: timeout of each exchange.
    kinds: the kind of each layer by name, for a hybrid model.
    writers: returns the TensorBoard and W&B writers of this rank, None for each that it lacks.

    Raises ValueError if the directory is not writable.
    """

    def __init__(
        self,
        directory: str,
        *,
        is_last: bool,
        timeout: datetime.timedelta,
        kinds: tuple[str, ...] = (),
        writers: Callable[[], tuple[Any, Any]] = lambda: (None, None),
    ) -> None:
        self._directory, self._timeout, self._writers = directory, timeout, writers
        self._kinds = kinds
        self._group: Any = None
        self._log: EventLog | None = None
        self._trace: TraceLog | None = None
        self._trace_written = time.monotonic()
        name_ranges()
        if is_last:
            self._open()

    def _open(self) -> tuple[EventLog, TraceLog]:
        """The files. They go on where they ended."""
        if self._log is None or self._trace is None:
            self._log, self._trace = EventLog(self._directory), TraceLog(self._directory)
        return self._log, self._trace

    def write(
        self, iterations: list[int], records: list[RankRecord], config: ModelParallelConfig | None
    ) -> list[dict[str, Any]]:
        """Gather this rank's `records`, one for each of `iterations` (from 0), on the last rank and write them there.
        Returns the lines that were measured, there.

        config: the config of the model; None without records.

        All ranks call it together with the same iterations.
        """
        last = dist.get_world_size() - 1
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        gathered = [None] * (last + 1) if dist.get_rank() == last else None
        dist.gather_object(records, gathered, dst=last, group=self._group)
        if gathered is None:
            return []
        log, trace = self._open()
        measured, newest = [], dict[str, float]()
        tensorboard, wandb = self._writers()
        for iteration, *ranks in zip(iterations, *gathered, strict=True):
            record = replace(_joined(iteration, ranks, config), kinds=self._kinds)
            events = observe(record) + [line for rank in ranks for line in rank.events]
            log.write(events)
            measured += [line for line in events if line["action"] == MEASURED]
            trace.add(record)
            newest |= scalars(events)
        for name, value in newest.items() if tensorboard is not None else ():  # seven a layer: each step costs too much
            tensorboard.add_scalar(name, value, iterations[-1] + 1)
        # W&B drops what is of an earlier step than the trainer's last. The trainer ends its run before the last write.
        if newest and wandb is not None and wandb.run is not None:
            wandb.log(newest, iterations[-1] + 1)
        if time.monotonic() - self._trace_written > _TRACE_SECONDS:
            trace.write()
            self._trace_written = time.monotonic()
        return measured

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Of the last `write`, with all ranks."""
        return self._group

    def close(self) -> None:
        """Complete the files. A later `write` may have other ranks: it makes its group anew, and opens the files again
        on what is then the last rank."""
        self._group = None
        if self._log is not None and self._trace is not None:
            self._log.close()
            self._trace.write()
            self._log = self._trace = None
            tensorboard, _ = self._writers()
            if tensorboard is not None:
                tensorboard.flush()


def _joined(iteration: int, ranks: list[RankRecord], config: ModelParallelConfig | None) -> IterationRecord:
    """The record of an iteration on all ranks. Time 0 is when the first rank began."""
    assert config is not None
    first = min(rank.start for rank in ranks)
    for rank in ranks:
        rank.start -= first
    seconds = max(rank.start + rank.step_seconds for rank in ranks)
    if config.virtual_pipeline_model_parallel_size is None:
        return IterationRecord(iteration + 1, seconds, ranks)
    group = config.microbatch_group_size_per_vp_stage or config.pipeline_model_parallel_size
    return IterationRecord(iteration + 1, seconds, ranks, group, config.overlap_moe_expert_parallel_comm)
