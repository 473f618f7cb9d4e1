"""Measures a run, for the report (`--balance-report`) and for the layer balancer, without changing the run.

Hooks mark when each part of the model begins and ends (`megatron.balanced.observe.timing_hooks`). Marks are read one
step later, so that the host does not wait for the device, and become one `RankRecord` an iteration. Every few
iterations the records of all ranks are gathered and written (`megatron.balanced.observe.report_writer`).
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.utils import unwrap_model

from balancing.clock import CpuClock, CudaClock
from balancing.cluster import Cluster
from balancing.cluster.job_rates import Calls
from balancing.launch import detect_launch
from balancing.report import WARM_UP, RankRecord, Span, measured_event
from balancing.report.exposed import exposed_spans
from balancing.sequences import SequencePlan, causal_area, zigzag_area
from megatron.balanced.cpu.device import is_cpu
from megatron.balanced.observe.own_rates import OwnRates
from megatron.balanced.observe.report_writer import ReportWriter
from megatron.balanced.observe.timing_hooks import Step, TimingHooks
from megatron.balanced.shared.callbacks import StepCallback

__all__ = ["Observer"]


class Observer(StepCallback):
    """Makes one `RankRecord` an iteration on every rank.

    writer: writes the report. None: nothing is gathered or written.
    interval: iterations from one write to the next.
    measures: whether the layer balancer uses the records.
    splits_rows: whether context-parallel ranks split a packed row as a whole, and not each document by itself.
    watches_entry: whether a micro-batch begins when it enters a model chunk, in a loop that does not call `documents`.
    own_rates: gives planners what the report has measured.
    machine: what planners of replicas have; None without one.

    The attribute `measured` is (iteration from 0, record of this rank) of the last iteration that the device has
    finished. It is None unless `measures`, and for an iteration that was set aside.
    """

    hooks = TimingHooks

    def __init__(
        self,
        writer: ReportWriter | None = None,
        *,
        interval: int = 1,
        measures: bool,
        splits_rows: bool = False,
        watches_entry: bool = False,
        own_rates: OwnRates | None = None,
        machine: Cluster | None = None,
    ) -> None:
        self.measured: tuple[int, RankRecord] | None = None
        self._machine = machine
        self._writer, self._interval = writer, interval
        self._measures, self._splits_rows, self._own_rates = measures, splits_rows, own_rates
        self._watches_entry, self._entries = watches_entry, []  # handles of hooks
        self._config: Any = None  # of the model
        clock = CpuClock() if is_cpu() else CudaClock()
        self._hooks = self.hooks(clock, counts_tokens=self._writer is not None)
        self._steps: list[Step] = []  # not written yet
        self._aside = False  # whether the step in progress is set aside
        self._ended = 0  # steps of this run

    @property
    def weight_gradients(self) -> Callable[[torch.nn.Module, int], AbstractContextManager[None]]:
        """(layer, model chunk) -> a context manager that times the deferred weight gradients of the layer."""
        return self._hooks.weight_gradients

    @property
    def step(self) -> Step | None:
        """The step in progress, if it is measured."""
        return self._hooks.step

    # The model.

    def attach(self, chunks: list[torch.nn.Module]) -> None:
        """Put the hooks on the model chunks of this rank."""
        for number, model in enumerate(unwrap_model(chunks)):
            self._hooks.watch_model(model, number)
            if self._watches_entry:
                self._entries.append(model.register_forward_pre_hook(partial(self._enter, number)))

    def _enter(self, number: int, *unused: Any) -> None:
        self.documents(list, number)

    def layer_arrived(self, layer: torch.nn.Module, chunk: int) -> None:
        self._hooks.watch_layer(layer, chunk)

    def head_arrived(self, model: torch.nn.Module) -> None:
        self._hooks.watch_head(model, 0)

    def flush(self) -> None:
        self._close()

    # Called by balancers and when a micro-batch begins.

    def note(self, event: dict[str, Any] | Callable[[], dict[str, Any] | None]) -> None:
        """Add an event of a balancer to the step in progress. If it is a function, it is called for the event once the
        device has passed the end of the step; None for no event."""
        if self.step is not None:
            self.step.events.append(event)

    def documents(
        self, lengths_of: Callable[[], list[int]], chunk: int, plan: SequencePlan | None = None, place: int = 0
    ) -> None:
        """A micro-batch enters its forward pass.

        lengths_of: returns the tokens of each document. The host may wait for the device here, so it is called only for
            a report.
        chunk: the model chunk of this rank.
        plan: how the documents are spread over ranks; None if Megatron-LM splits them.
        place: index of this rank among the ranks of the plan.
        """
        step = self.step
        if step is None:
            return
        self._hooks.begin_micro_batch(chunk)
        if chunk or self._writer is None:  # the same documents pass through every chunk of the rank
            return
        self._count(step, lengths_of(), plan, place)

    def _count(self, step: Step, lengths: list[int], plan: SequencePlan | None, place: int) -> None:
        """Add the documents of a micro-batch."""
        step.longest = max([step.longest, *lengths])  # a micro-batch may have no document
        if plan is not None:
            step.tokens += int(plan.linear_tokens[place])
            step.area += int(plan.area[place])
            return
        rank, ranks = mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size()
        step.tokens += sum(lengths) // ranks
        if ranks == 1:
            step.area += causal_area(lengths)
        elif self._splits_rows:
            step.area += zigzag_area(lengths, rank, ranks)
        else:  # each document, or each sample that is one, is split over the ranks by itself
            step.area += sum(zigzag_area([length], rank, ranks) for length in lengths)

    def parts(self, plan: Any, chunk: int) -> None:
        """A micro-batch enters model chunk `chunk`, whose layers run in parts by Megatron-LM's schedule plan `plan`."""
        self._hooks.watch_plan(plan, chunk)

    # The step, and the record of it.

    def use_cluster(self, machine: Cluster) -> None:
        self._machine = machine

    def set_aside(self) -> None:
        """The step that has just begun, or begins next, runs otherwise than the others. It is only for the report."""
        self._aside = True

    def stop_measuring(self) -> None:
        """From now on, measure only for the report."""
        self._measures = False
        while self._entries:
            self._entries.pop().remove()

    def begin_step(self, iteration: int, config: Any) -> None:
        self._config = config
        if self._writer is not None or self._measures:
            self._hooks.begin_step(Step(iteration, time.time(), self._hooks.clock.mark()), config)

    def begin_schedule(self) -> None:
        self._hooks.begin_schedule()

    def end_schedule(self) -> None:
        self._hooks.begin_call()

    def end_step(self) -> None:
        aside, self._aside = self._aside, False
        if self.step is None:
            return
        self.step.aside = aside
        self._ended += 1
        first = not (mpu.get_expert_model_parallel_rank() or mpu.get_expert_data_parallel_rank())
        if self.step.expert_calls and first and self._ended > WARM_UP:
            self.note(partial(self._expert_calls, self.step.iteration, self.step.expert_calls))
        self._steps.append(self._hooks.end_step())
        # The step that just ended may still be running on the device; the ones before it are not.
        self.measured = None
        if self._measures and len(self._steps) > 1 and not self._steps[-2].aside:
            before = self._steps[-2]
            before.record = self._record(before)
            self.measured = before.iteration, before.record
        if self._writer is None:
            del self._steps[:-1]
        elif len(self._steps) > self._interval:
            lines = self._write(self._steps[:-1])
            del self._steps[:-1]
            if self._own_rates is not None:
                self._own_rates.agree(lines, self._writer.process_group)

    def _expert_calls(self, iteration: int, calls: list[Any]) -> dict[str, Any]:
        """The event of a step's calls of this rank's experts, of layers with experts of the first one's size."""
        of_size = [call[1:] for call in calls if call[0] == calls[0][0]]
        timed = [
            (rows, groups, self._hooks.clock.seconds(begin, begin, end)[2]) for rows, groups, begin, end in of_size
        ]
        timed = [each for each in timed if min(each) > 0]
        told = Calls("experts", "forward", calls[0][0], [each[:2] for each in timed], [each[2] for each in timed])
        return measured_event(iteration, told.line(self._machine))

    def abandon_schedule(self) -> None:
        """Drop what was measured of a step that has failed."""
        self._aside = False
        if self.step is not None:
            self._hooks.end_step()

    def end_training(self) -> None:
        """Write all measurements and complete the report's files."""
        self._close()

    def _close(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if self._writer is not None:
            self._write(self._steps)
            self._writer.close()
        self._steps.clear()

    def _write(self, steps: list[Step]) -> list[dict[str, Any]]:
        """Returns the lines that were measured, on the last rank."""
        assert self._writer is not None
        records = [step.record or self._record(step) for step in steps]
        return self._writer.write([step.iteration for step in steps], records, self._config)

    def _record(self, step: Step) -> RankRecord:
        rank, seconds = dist.get_rank(), self._hooks.clock.seconds
        timed = [(of, [seconds(step.origin, *piece) for piece in pieces]) for *of, pieces in step.spans]
        spans = [Span(*of, *_whole(pieces)) for of, pieces in timed]
        if step.messages:
            computed = [piece[:2] for of, pieces in timed if of[1] == "" for piece in pieces]
            messages = [Span(*of, *seconds(step.origin, begin, end)) for *of, begin, end in step.messages]
            spans += exposed_spans(messages, computed)
        return RankRecord(
            rank=rank,
            stage=mpu.get_pipeline_model_parallel_rank(),
            node=rank // detect_launch().ranks_per_node,
            data=mpu.get_data_parallel_rank(),
            tensor=mpu.get_tensor_model_parallel_rank(),
            expert=mpu.get_expert_model_parallel_rank(),
            context=mpu.get_context_parallel_rank(),
            start=step.began,
            busy_seconds=sum(span.busy for span in spans if span.layer == ""),
            step_seconds=seconds(step.origin, step.origin, step.end)[1],
            memory_bytes=torch.cuda.max_memory_allocated(),
            tokens=step.tokens,
            attention_area=step.area,
            longest_sequence=step.longest,
            spans=spans,
            events=[line for each in step.events if (line := each() if callable(each) else each) is not None],
            expert_tokens={layer: tokens.numpy() for layer, tokens in step.expert_tokens.items()},
            graphs=step.graphs,
        )


def _whole(pieces: list[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Start, seconds and busy seconds of a span, from those of its pieces, in order."""
    if len(pieces) == 1:
        return pieces[0]
    (start, _, _), (last, lasts, _) = pieces[0], pieces[-1]
    return start, last - start + lasts, sum(busy for _, _, busy in pieces)
