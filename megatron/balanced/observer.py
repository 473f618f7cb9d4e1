"""Measures a run without changing it: who is busy, who waits, and with what (`--balance-report`).

Hooks on layers, embedding, head and routers mark when each begins and ends, forward and backward, in every micro-batch.
The schedule's own timers, tapped, mark a stage's whole calls. No mark waits for the device: they are read one step
later, when the device has passed them. Every few iterations the last rank, which also writes Megatron's TensorBoard and
W&B scalars, gathers the records of all ranks and writes DIR/events.jsonl and DIR/trace.json.

Module-level backward hooks cannot be used: under recompute they fire early, and they keep a stage from freeing its
outputs. Hooks on the hidden states do: the gradient of a layer's output arrives when its backward pass begins, that of
its input when it ends.
"""

import argparse
import datetime
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

from balancing.clock import CpuClock, CudaClock, DeviceClock
from balancing.launch import detect_launch
from balancing.report import EventLog, IterationRecord, RankRecord, Span, TraceLog, observe, scalars
from balancing.sequences import SequencePlan, causal_area, zigzag_area
from megatron.balanced.arguments import BalanceConfig
from megatron.balanced.callbacks import StepCallback
from megatron.balanced.data import is_packed
from megatron.balanced.recompute import Replays

__all__ = ["Observer"]

Mark = Any

# A trace holds whole iterations of all ranks: worth writing when somebody may look, not after each step.
_TRACE_SECONDS = 60.0


@dataclass
class _Step:
    """One iteration on this rank, in marks that are read later."""

    iteration: int
    began: float  # seconds since the epoch
    origin: Mark
    end: Mark = None
    spans: list[tuple[str, int | str, int, int, Mark, Mark]] = field(default_factory=list)
    tokens: int = 0
    area: int = 0
    longest: int = 0
    expert_tokens: dict[int, torch.Tensor] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    record: RankRecord | None = None  # once the marks have been read


class _Part:
    """A layer, the embedding or the head of one model chunk, as it is timed."""

    def __init__(self, observer: "Observer", layer: int | str, chunk: int) -> None:
        self.observer, self.layer, self.chunk = observer, layer, chunk
        self.replays: Replays[int] = Replays()
        self.begin: Mark = None

    def enter(self, module: torch.nn.Module, *unused: Any) -> None:
        if module.training and self.observer.step is not None:
            self.begin = self.observer.clock.mark()

    def leave(self, hidden_in: torch.Tensor | None, hidden_out: torch.Tensor) -> None:
        """Close a forward pass and wait for the gradients of its ends: `hidden_in` None means the pass has no input."""
        observer = self.observer
        step, begin = observer.step, self.begin
        if step is None or begin is None:
            return
        self.begin = None
        micro_batch, is_replay = self.replays.decide(lambda: observer.micro_batch.get(self.chunk, 0))
        kind = "recompute" if is_replay else "forward"
        step.spans.append((kind, self.layer, self.chunk, micro_batch, begin, observer.clock.mark()))
        if hidden_out.requires_grad:
            hidden_out.register_hook(lambda gradient: observer.open_backward(self, micro_batch))
        if hidden_in is not None and hidden_in.requires_grad:
            hidden_in.register_hook(lambda gradient: observer.close_backward(self))


class _Tapped:
    """One of Megatron's timers, with its start and stop passed on."""

    def __init__(self, timer: Any, start: Any, stop: Any) -> None:
        self._timer, self._start, self._stop = timer, start, stop

    def start(self, *args: Any, **kwargs: Any) -> None:
        self._timer.start(*args, **kwargs)
        self._start()

    def stop(self, *args: Any, **kwargs: Any) -> None:
        self._stop()
        self._timer.stop(*args, **kwargs)


class _TappedTimers:
    """Megatron's timers as the schedule sees them: everything is passed through, two of them are listened to."""

    def __init__(self, timers: Any, observer: "Observer") -> None:
        self.timers, self._observer = timers, observer

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        timer = self.timers(name, log_level=log_level)
        if name == "forward-compute":
            return _Tapped(timer, self._observer.begin_forward_step, self._observer.end_forward_step)
        if name == "backward-compute":
            return _Tapped(timer, self._observer.begin_backward_step, self._observer.end_backward_step)
        return timer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.timers, name)


class Observer(StepCallback):
    """Collects one `RankRecord` an iteration on every rank, and writes the job's records on the last one.

    Without --balance-report nothing is gathered or written. measured: where layers are balanced, the last iteration
    (from 0) that the device has finished, and this rank's record of it. Raises ValueError if the directory cannot be
    written to.
    """

    def __init__(self, args: argparse.Namespace, config: BalanceConfig) -> None:
        self.args = args
        self.measured: tuple[int, RankRecord] | None = None
        self._measures = config.layers.on
        self._writes = config.balance_report is not None
        self.interval = config.balance_report_interval
        self.clock: DeviceClock = CpuClock() if config.device == "cpu" else CudaClock()
        self.step: _Step | None = None
        self.micro_batch: dict[int, int] = {}  # chunk -> micro-batch in its forward pass
        self._chunk = 0
        self._config: Any = None
        self._open: dict[_Part, tuple[int, Mark]] = {}
        self._step_begin: Mark = None
        self._backward_of = (0, 0)  # chunk and micro-batch
        self._steps: list[_Step] = []
        self._group: Any = None
        self._log: EventLog | None = None
        self._trace: TraceLog | None = None
        self._trace_written = time.monotonic()
        self._directory = config.balance_report
        self._open_logs()

    def _open_logs(self) -> None:
        if self._directory is not None and self.args.rank == self.args.world_size - 1:
            self._log = EventLog(self._directory)
            self._trace = TraceLog(self._directory)

    # What is watched.

    def attach(self, chunks: list[torch.nn.Module]) -> None:
        """Put the hooks on the model chunks of this rank."""
        for number, model in enumerate(unwrap_model(chunks)):
            for layer in model.decoder.layers:
                self.layer_arrived(layer, number)
            if getattr(model, "embedding", None) is not None:
                self._watch_embedding(model.embedding, number)
            if model.post_process:
                self._watch_head(model, number)

    def before_release(self) -> None:
        """Write what has not been written yet, while all ranks are there."""
        self._close()

    def after_release(self, headed: torch.nn.Module | None) -> None:
        """Go on with the ranks that are left."""
        self._group = None
        self._open_logs()
        if headed is not None:
            self._watch_head(headed, 0)

    def layer_arrived(self, layer: torch.nn.Module, chunk: int) -> None:
        """Put the hooks on a layer of model chunk `chunk`."""
        part = _Part(self, layer.layer_number - 1, chunk)

        def leave(module: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            hidden_in = args[0] if args else kwargs["hidden_states"]
            part.leave(hidden_in, output[0] if isinstance(output, tuple) else output)

        layer.register_forward_pre_hook(part.enter)
        layer.register_forward_hook(leave, with_kwargs=True)
        for module in layer.modules():
            if isinstance(module, TopKRouter):
                self._watch_router(module, part, layer)

    def _watch_router(self, router: TopKRouter, part: _Part, layer: torch.nn.Module) -> None:
        assert isinstance(part.layer, int)
        number = part.layer
        replays: Replays[None] = Replays()

        def count(module: torch.nn.Module, args: tuple, output: Any) -> None:
            if self.step is None or not module.training:
                return
            # A frozen layer has no gradients either, but is not run again.
            if not getattr(layer, "frozen", False) and replays.decide(lambda: None)[1]:
                return
            tokens = output[1].detach().sum(dim=0, dtype=torch.int64)
            counted = self.step.expert_tokens.get(number)
            self.step.expert_tokens[number] = tokens if counted is None else counted.add_(tokens)

        router.register_forward_hook(count)

    def _watch_embedding(self, embedding: torch.nn.Module, chunk: int) -> None:
        part = _Part(self, "embedding", chunk)
        embedding.register_forward_pre_hook(part.enter)
        embedding.register_forward_hook(lambda module, args, output: part.leave(None, output))

    def _watch_head(self, model: torch.nn.Module, chunk: int) -> None:
        """The head: from the output layer's beginning to the end of the model's loss, and back."""
        part = _Part(self, "head", chunk)
        hidden_in: list[torch.Tensor] = []

        def enter(module: torch.nn.Module, args: tuple) -> None:
            part.enter(module)
            hidden_in[:] = args[:1]

        def leave(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> None:
            part.leave(hidden_in.pop() if hidden_in else None, output)

        model.output_layer.register_forward_pre_hook(enter)
        model.register_forward_hook(leave)

    def note(self, event: dict[str, Any]) -> None:
        """Add a line of a balancer to the log of the step at hand."""
        if self.step is not None:
            self.step.events.append(event)

    # What the schedule does.

    def documents(self, lengths: list[int], chunk: int, plan: SequencePlan | None = None) -> None:
        """A micro-batch with documents of `lengths` tokens enters its forward pass in model chunk `chunk`.

        plan: how they are spread over context-parallel ranks, None where Megatron-LM cuts them.
        """
        if self.step is None:
            return
        self._chunk = chunk
        self.micro_batch[chunk] = self.micro_batch.get(chunk, -1) + 1
        if chunk:  # the same documents pass through every chunk of the rank
            return
        rank, ranks = mpu.get_context_parallel_rank(), self.args.context_parallel_size
        self.step.longest = max(self.step.longest, *lengths)
        if plan is not None:
            self.step.tokens += int(plan.linear_tokens[rank])
            self.step.area += int(plan.area[rank])
            return
        self.step.tokens += sum(lengths) // ranks
        if ranks == 1:
            self.step.area += causal_area(lengths)
        elif is_packed(self.args) and not self.args.sft:
            self.step.area += zigzag_area(lengths, rank, ranks)
        else:  # each document, or each sample that is one, is cut over the ranks by itself
            self.step.area += sum(zigzag_area([length], rank, ranks) for length in lengths)

    def begin_forward_step(self) -> None:
        self._step_begin = self.clock.mark()

    def end_forward_step(self) -> None:
        self._end_of_call("forward-step", self._chunk, self.micro_batch.get(self._chunk, 0))

    def begin_backward_step(self) -> None:
        self._step_begin = self.clock.mark()

    def end_backward_step(self) -> None:
        for part in list(self._open):  # what has no input that asks for a gradient, as the embedding
            self.close_backward(part)
        self._end_of_call("backward-step", *self._backward_of)

    def _end_of_call(self, kind: str, chunk: int, micro_batch: int) -> None:
        if self.step is not None and self._step_begin is not None:
            self.step.spans.append((kind, "", chunk, micro_batch, self._step_begin, self.clock.mark()))
            self._step_begin = None

    def open_backward(self, part: _Part, micro_batch: int) -> None:
        self._backward_of = (part.chunk, micro_batch)
        self._open[part] = (micro_batch, self.clock.mark())

    def close_backward(self, part: _Part) -> None:
        micro_batch, begin = self._open.pop(part, (0, None))
        if begin is not None and self.step is not None:
            self.step.spans.append(("backward", part.layer, part.chunk, micro_batch, begin, self.clock.mark()))

    # The step, and what is made of it.

    def begin_step(self, iteration: int, config: Any) -> None:
        if not (self._writes or self._measures):
            return
        self._config = config
        config.timers = _TappedTimers(config.timers, self)
        self.step = _Step(iteration, time.time(), self.clock.mark())

    def begin_schedule(self) -> None:
        self.micro_batch.clear()

    def end_schedule(self) -> None:
        self._step_begin = self.clock.mark()

    def end_step(self) -> None:
        if self.step is None:
            return
        self._end_of_call("optimizer", 0, 0)
        self.step.end = self.clock.mark()
        self._steps.append(self.step)
        self.step = None
        self._config.timers = self._config.timers.timers
        # The step that just ended may still be running on the device; the ones before it are not.
        self.measured = None
        if self._measures and len(self._steps) > 1:
            before = self._steps[-2]
            before.record = self._record(before)
            self.measured = before.iteration, before.record
        if not self._writes:
            del self._steps[:-1]
        elif len(self._steps) > self.interval:
            self._write(self._steps[:-1])
            del self._steps[:-1]

    def stop_measuring(self) -> None:
        """From now on, measure for the report alone."""
        self._measures = False

    def end_training(self) -> None:
        """Write what has not been written yet."""
        self._close()

    def _close(self) -> None:
        """Write what has not been written yet. Collective."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if self._writes:
            self._write(self._steps)
        self._steps.clear()
        if self._log is not None and self._trace is not None:
            self._log.close()
            self._trace.write()
            if (tensorboard := get_tensorboard_writer()) is not None:
                tensorboard.flush()

    def _write(self, steps: list[_Step]) -> None:
        """Gather `steps` of all ranks on the last one, and write them there."""
        last = self.args.world_size - 1
        if self._group is None:
            timeout = datetime.timedelta(minutes=self.args.distributed_timeout_minutes)
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        gathered = [None] * self.args.world_size if self.args.rank == last else None
        dist.gather_object([step.record or self._record(step) for step in steps], gathered, dst=last, group=self._group)
        if gathered is None:
            return
        assert self._log is not None and self._trace is not None
        for step, *ranks in zip(steps, *gathered, strict=True):
            record = _align(step.iteration, ranks)
            events = observe(record) + [line for rank in ranks for line in rank.events]
            self._log.write(events)
            self._trace.add(record)
            self._write_scalars(step.iteration, scalars(events))
        if time.monotonic() - self._trace_written > _TRACE_SECONDS:
            self._trace.write()
            self._trace_written = time.monotonic()

    def _record(self, step: _Step) -> RankRecord:
        seconds = self.clock.seconds
        spans = [
            Span(kind, layer, chunk, micro_batch, *seconds(step.origin, begin, end))
            for kind, layer, chunk, micro_batch, begin, end in step.spans
        ]
        return RankRecord(
            rank=self.args.rank,
            stage=mpu.get_pipeline_model_parallel_rank(),
            node=self.args.rank // detect_launch().ranks_per_node,
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
            events=step.events,
            expert_tokens={layer: tokens.cpu().numpy() for layer, tokens in step.expert_tokens.items()},
        )

    def _write_scalars(self, iteration: int, values: dict[str, float]) -> None:
        tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
        for name, value in values.items():
            if tensorboard is not None:
                tensorboard.add_scalar(name, value, iteration + 1)
        if wandb is not None:
            wandb.log(values, iteration + 1)


def _align(iteration: int, ranks: list[RankRecord]) -> IterationRecord:
    """Put the ranks of one iteration on one axis, which begins when the first of them began."""
    first = min(rank.start for rank in ranks)
    for rank in ranks:
        rank.start -= first
    return IterationRecord(iteration + 1, max(rank.start + rank.step_seconds for rank in ranks), ranks)
