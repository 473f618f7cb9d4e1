"""Gather the records of all ranks and write the report: events.jsonl, trace.json, and scalars for TensorBoard and W&B.

The last rank writes, because Megatron-LM's own TensorBoard and W&B writers are there.
"""

import argparse
import datetime
import time
from typing import Any

import torch.distributed as dist
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

from balancing.ranges import name_ranges
from balancing.report import EventLog, IterationRecord, RankRecord, TraceLog, observe, scalars

__all__ = ["ReportWriter"]

# A trace holds whole iterations of all ranks, so it is not rewritten after each of them.
_TRACE_SECONDS = 60.0


class ReportWriter:
    """Writes the report of a job into `directory`. One on each rank.

    Raises ValueError if the directory cannot be written to.
    """

    def __init__(self, args: argparse.Namespace, directory: str) -> None:
        self._args, self._directory = args, directory
        self._group: Any = None
        self._log: EventLog | None = None
        self._trace: TraceLog | None = None
        self._trace_written = time.monotonic()
        name_ranges()
        self._open()

    def _open(self) -> None:
        if self._args.rank == self._args.world_size - 1:
            self._log = EventLog(self._directory)
            self._trace = TraceLog(self._directory)

    def reopen(self) -> None:
        """Go on, after `close`, in a job with fewer ranks."""
        self._group = None
        self._open()

    def write(self, iterations: list[int], records: list[RankRecord]) -> None:
        """Gather this rank's `records`, one for each of `iterations` (from 0), on the last rank and write them there.

        All ranks call it together with the same iterations.
        """
        last = self._args.world_size - 1
        if self._group is None:
            timeout = datetime.timedelta(minutes=self._args.distributed_timeout_minutes)
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        gathered = [None] * self._args.world_size if self._args.rank == last else None
        dist.gather_object(records, gathered, dst=last, group=self._group)
        if gathered is None:
            return
        assert self._log is not None and self._trace is not None
        for iteration, *ranks in zip(iterations, *gathered, strict=True):
            record = self._joined(iteration, ranks)
            events = observe(record) + [line for rank in ranks for line in rank.events]
            self._log.write(events)
            self._trace.add(record)
            _write_scalars(iteration, scalars(events))
        if time.monotonic() - self._trace_written > _TRACE_SECONDS:
            self._trace.write()
            self._trace_written = time.monotonic()

    def _joined(self, iteration: int, ranks: list[RankRecord]) -> IterationRecord:
        """The record of an iteration, its ranks on one time axis, which begins when the first of them began."""
        first = min(rank.start for rank in ranks)
        for rank in ranks:
            rank.start -= first
        args, seconds = self._args, max(rank.start + rank.step_seconds for rank in ranks)
        if args.virtual_pipeline_model_parallel_size is None:
            return IterationRecord(iteration + 1, seconds, ranks)
        group = args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size
        return IterationRecord(iteration + 1, seconds, ranks, group, args.overlap_moe_expert_parallel_comm)

    def close(self) -> None:
        """Complete the files."""
        if self._log is not None and self._trace is not None:
            self._log.close()
            self._trace.write()
            if (tensorboard := get_tensorboard_writer()) is not None:
                tensorboard.flush()


def _write_scalars(iteration: int, values: dict[str, float]) -> None:
    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    for name, value in values.items():
        if tensorboard is not None:
            tensorboard.add_scalar(name, value, iteration + 1)
    if wandb is not None:
        wandb.log(values, iteration + 1)
