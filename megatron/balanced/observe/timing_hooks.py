"""Hooks that mark when each part of a model begins and ends, forward and backward, in every micro-batch.

A mark is a point in time on the device; the host does not wait for it. Parts are the layers, the embedding and the
head. Router hooks count tokens per expert. Wrapped timers of Megatron-LM's schedule mark the calls of a whole stage.

Backward passes are marked by hooks on hidden states. The gradient of a layer's output exists when its backward pass
begins, and the gradient of its input when it ends. Backward hooks on modules would not work: under recompute they fire
early, and they keep a stage from freeing its outputs.

With `--overlap-moe-expert-parallel-comm` no layer runs as a whole. Megatron-LM's schedule plan of a micro-batch
consists of nodes, which alternate with the nodes of another micro-batch. Compute nodes are marked, and so are the nodes
of the token all-to-all, on their own stream. The part of an all-to-all that no computation hides counts as a cost of
its layer (`balancing.report.exposed`).
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from megatron.core.pipeline_parallel.utils import ScheduleNode
from megatron.core.timers import DummyTimer
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter

from balancing.clock import DeviceClock
from balancing.pipeline.fixed_parts import NAMES
from balancing.report import RankRecord
from megatron.balanced.shared.recompute import Replays
from megatron.balanced.shared.tail import computations, part_of, tail_of

__all__ = ["Mark", "Step", "TimingHooks", "between"]

Mark = Any
_MOST_CALLS = 128  # of experts that are timed in a step


@dataclass
class Step:
    """One iteration on this rank, in marks that are read once the device has passed them.

    iteration: from 0.
    began: seconds since the epoch.
    origin, end: marks.
    spans: (kind, layer or part, model chunk, micro-batch, [(begin, end) of each piece of work]).
    messages: token all-to-alls of layers that run in parts: (kind, layer, model chunk, micro-batch, begin, end).
    tokens: of this rank in all micro-batches.
    area: query-key pairs that attention computes on this rank.
    longest: tokens of the longest document.
    expert_tokens: by layer, int64 [experts]; on the host once the device has passed the end of the step.
    expert_calls: of a rank's experts, forward: FLOPs of a row, rows, groups, begin, end.
    events: of balancers, or functions that return them once the device has passed the end of the step.
    record: made from the marks when they are read.
    aside: whether the step ran otherwise than the others, as trials let it.
    graphs: which CUDA graphs ran the passes, as in `RankRecord`.
    """

    iteration: int
    began: float
    origin: Mark
    end: Mark = None
    spans: list[tuple[str, int | str, int, int, list[tuple[Mark, Mark]]]] = field(default_factory=list)
    messages: list[tuple[str, int | str, int, int, Mark, Mark]] = field(default_factory=list)
    tokens: int = 0
    area: int = 0
    longest: int = 0
    expert_tokens: dict[int, torch.Tensor] = field(default_factory=dict)
    expert_calls: list[tuple[float, float, float, Mark, Mark]] = field(default_factory=list)
    events: list[dict[str, Any] | Callable[[], dict[str, Any] | None]] = field(default_factory=list)
    record: RankRecord | None = None
    aside: bool = False
    graphs: str = ""


class TimingHooks:
    """Records spans and expert tokens in `step`, the iteration in progress. `step` is None when nothing is measured.

    clock: the clock of the device.
    counts_tokens: whether to count tokens per expert. Only a report reads them.
    """

    def __init__(self, clock: DeviceClock, counts_tokens: bool = True) -> None:
        self.clock, self._counts_tokens = clock, counts_tokens
        self.step: Step | None = None
        self.micro_batch: dict[int, int] = {}  # chunk -> micro-batch in its forward pass
        self._chunk = 0  # the chunk that is in its forward pass
        self._backward_of = (0, 0)  # chunk and micro-batch
        self._open: dict[_Part, tuple[int, Mark]] = {}  # part in its backward pass -> micro-batch, begin
        # The latest output, the parts whose input it is (None if it has no gradient), and when it was there.
        self.boundary: tuple[Callable[[], torch.Tensor | None], list[_Part] | None, Mark] = (lambda: None), None, None
        self._call_begin: Mark = None
        self._latest: dict[bool, Any] = {}  # whether of a whole stage -> the last span that nodes were added to
        self._config: Any = None
        self._replays: weakref.WeakSet[Replays] = weakref.WeakSet()

    # The model.

    def watch_model(self, model: torch.nn.Module, chunk: int) -> None:
        """Put hooks on everything in model chunk `chunk`."""
        for layer in model.decoder.layers:
            self.watch_layer(layer, chunk)
        if model.config.overlap_moe_expert_parallel_comm:
            return
        tail = None if (module := tail_of(model)) is None else self._watch_tail(module, chunk)
        if model.pre_process:
            self._watch_embedding(model.embedding, chunk, tail)
        if model.post_process:
            self.watch_head(model, chunk)

    def watch_layer(self, layer: torch.nn.Module, chunk: int) -> None:
        """Put hooks on a layer of model chunk `chunk`."""
        for module in layer.modules() if self._counts_tokens else ():
            if isinstance(module, TopKRouter):
                self._watch_router(module, layer.layer_number - 1, layer)
            if isinstance(module, MoELayer):
                self._watch_experts(module.experts)
        if layer.config.overlap_moe_expert_parallel_comm:
            return
        part = _Part(self, layer.layer_number - 1, chunk)

        def leave(module: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            hidden_in = args[0] if args else kwargs["hidden_states"]
            part.leave(hidden_in, output[0] if isinstance(output, tuple) else output)

        self._watch_passes(layer, part.enter, leave)

    def _watch_passes(self, layer: torch.nn.Module, enter: Callable, leave: Callable) -> None:
        layer.register_forward_pre_hook(enter, with_kwargs=True)
        layer.register_forward_hook(leave, with_kwargs=True)

    def _watch_router(self, router: TopKRouter, number: int, layer: torch.nn.Module) -> None:
        is_first = self._first_passes(layer)

        def count(module: torch.nn.Module, args: tuple, output: Any) -> None:
            if self.step is None or not module.training or not is_first():
                return
            tokens = output[1].detach().sum(dim=0, dtype=torch.int64)
            counted = self.step.expert_tokens.get(number)
            self.step.expert_tokens[number] = tokens if counted is None else counted.add_(tokens)

        router.register_forward_hook(count)

    def _first_passes(self, layer: torch.nn.Module) -> Callable[[], bool]:
        """Returns a function that a module of `layer` calls in each pass: whether this pass is no recomputation."""
        replays: Replays[None] = self.replays()
        its_layer = weakref.ref(layer)  # weak, so that a layer that leaves is freed at once
        # A frozen layer runs without gradients as well, but is not recomputed.
        return lambda: getattr(its_layer(), "frozen", False) or not replays.decide(lambda: None)[1]

    def _watch_experts(self, experts: torch.nn.Module) -> None:
        """Put hooks on a rank's experts. A pass with replicas may wait for weights; medians are taken of many."""
        flops = 2.0 * sum(weight.numel() for weight in experts.parameters()) / max(1, experts.num_local_experts)
        begins: list[Mark] = []

        def enter(module: torch.nn.Module, *unused: Any) -> None:
            if self.step is not None and len(self.step.expert_calls) < _MOST_CALLS and module.training:
                begins[:] = [self.clock.mark()]

        def leave(module: torch.nn.Module, args: tuple, output: Any) -> None:
            if begins and self.step is not None:
                call = flops, float(args[0].shape[0]), float(args[1].shape[0]), begins.pop(), self.clock.mark()
                self.step.expert_calls.append(call)

        experts.register_forward_pre_hook(enter)
        experts.register_forward_hook(leave)

    def _watch_embedding(self, embedding: torch.nn.Module, chunk: int, tail: "_Part | None") -> None:
        """Put hooks on the embedding. Its passes inside the tail are part of `tail`."""
        part = _Part(self, "embedding", chunk)

        def enter(module: torch.nn.Module, *unused: Any) -> None:
            if tail is None or tail.begin is None:
                part.enter(module)

        embedding.register_forward_pre_hook(enter)
        embedding.register_forward_hook(lambda module, args, output: part.leave(None, output))

    def _watch_tail(self, tail: torch.nn.Module, chunk: int) -> "_Part":
        """Put hooks on the tail. Its logits and losses belong to the head."""
        part = _Part(self, NAMES[-1], chunk)

        def leave(module: torch.nn.Module, args: tuple, kwargs: dict, output: torch.Tensor) -> None:
            part.leave(kwargs["hidden_states"], output)

        tail.register_forward_pre_hook(part.enter, with_kwargs=True)
        tail.register_forward_hook(leave, with_kwargs=True)
        return part

    def watch_head(self, model: torch.nn.Module, chunk: int) -> None:
        """Put hooks on the head. It begins with the first call of the output layer and ends with the model's loss.
        With a tail the output layer is called more than once."""
        part = _Part(self, "head", chunk)
        hidden_in: list[torch.Tensor] = []

        def enter(module: torch.nn.Module, args: tuple) -> None:
            if not hidden_in:
                part.enter(module, args)
                hidden_in[:] = args[:1]

        def leave(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> None:
            part.leave(hidden_in.pop() if hidden_in else None, output)

        model.output_layer.register_forward_pre_hook(enter)
        model.register_forward_hook(leave)

    # Parts of a model that alternate with parts of another micro-batch.

    def watch_plan(self, plan: Any, chunk: int) -> None:
        """Mark the nodes of the micro-batch that enters its forward pass in model chunk `chunk`.

        plan: Megatron-LM's `TransformerModelChunkSchedulePlan` of it.
        """
        if self.step is None:
            return
        model = plan.state.model
        nodes = [("embedding", plan.pre_process)] if model.pre_process else []
        for number in range(plan.num_layers()):
            of = plan.get_layer(number)
            part = part_of(of.layer)
            nodes += [(part, node) for node in computations(of)]
            for node in (of.moe_dispatch, of.moe_combine):
                if isinstance(node, ScheduleNode):  # a dense layer has none
                    self._watch_node(node, part, chunk, self._add_message)
        nodes += [("head", plan.post_process)] if model.post_process else []
        for part, node in nodes:
            if isinstance(node, ScheduleNode):  # other nodes do nothing
                self._watch_node(node, part, chunk, self._add_piece)

    def _watch_node(self, node: ScheduleNode, part: int | str, chunk: int, add: Callable[..., None]) -> None:
        """Call `add` after each run of `node`. Marks are on the node's stream, behind what this stream waits for."""
        micro_batch = self.micro_batch.get(chunk, 0)

        def timed(run: Callable, kind: str) -> Callable:
            def run_timed(*args: Any) -> Any:
                begin = self.clock.mark()
                result = run(*args)
                add(kind, part, chunk, micro_batch, begin)
                return result

            return run_timed

        node.forward_func = timed(node.forward_func, "forward")
        node.backward_func = timed(node.backward_func, "backward")
        if getattr(node, "delay_wgrad_compute", False):
            weight_gradients = weakref.WeakMethod(node.backward_dw)  # weak, else the node would refer to itself
            node.backward_dw = timed(lambda: weight_gradients()(), "backward")

    def _add_piece(self, kind: str, part: int | str, chunk: int, micro_batch: int, begin: Mark) -> None:
        """Add the computation since `begin` to the span of its part and to the span of the stage's forward or backward
        pass. If another span came in between, begin a new one."""
        if self.step is None:
            return
        piece = begin, self.clock.mark()
        for span in ((kind, part, chunk, micro_batch), (f"{kind}-step", "", chunk, micro_batch)):
            latest = self._latest.get(span[1] == "")
            if latest is None or latest[:-1] != span:
                latest = self._latest[span[1] == ""] = (*span, [])
                self.step.spans.append(latest)
            latest[-1].append(piece)

    def _add_message(self, kind: str, part: int | str, chunk: int, micro_batch: int, begin: Mark) -> None:
        """Add the token all-to-all since `begin`."""
        if self.step is not None:
            self.step.messages.append((kind, part, chunk, micro_batch, begin, self.clock.mark()))

    @contextmanager
    def weight_gradients(self, layer: torch.nn.Module, chunk: int) -> Iterator[None]:
        """A context that times deferred weight gradients of `layer`."""
        begin = self.clock.mark()
        yield
        if self.step is not None:
            span = [(begin, self.clock.mark())]
            self.step.spans.append(("backward", layer.layer_number - 1, chunk, self._backward_of[1], span))

    # The step and its schedule.

    def begin_step(self, step: Step, config: Any) -> None:
        """Measure `step`. config: the model's config, from which the schedule takes its timers."""
        self._config, self.step = config, step
        self._latest.clear()
        if not config.overlap_moe_expert_parallel_comm:
            config.timers = _StageTimers(config.timers, self)

    def begin_schedule(self) -> None:
        self.micro_batch.clear()
        # A schedule that has failed leaves these behind.
        self._open.clear()
        self._call_begin = None
        for replays in self._replays:
            replays.clear()

    def replays(self) -> Replays:
        """The decisions of a module of the model."""
        self._replays.add(replays := Replays())
        return replays

    def begin_micro_batch(self, chunk: int) -> None:
        """The next micro-batch enters its forward pass in model chunk `chunk`."""
        self._chunk = chunk
        self.micro_batch[chunk] = self.micro_batch.get(chunk, -1) + 1

    def begin_call(self) -> None:
        """A stage begins a forward or backward call, or the optimizer its step."""
        if self.step is not None:
            self._call_begin = self.clock.mark()

    def end_forward_call(self) -> None:
        self._end_call("forward-step", self._chunk, self.micro_batch.get(self._chunk, 0))

    def end_backward_call(self) -> None:
        for part in list(self._open):  # parts whose input has no gradient, such as the embedding
            self.close_backward(part)
        self._end_call("backward-step", *self._backward_of)

    def _end_call(self, kind: str, chunk: int, micro_batch: int) -> None:
        if self.step is not None and self._call_begin is not None:
            self.step.spans.append((kind, "", chunk, micro_batch, [(self._call_begin, self.clock.mark())]))
            self._call_begin = None

    def end_step(self) -> Step:
        """End the step in progress and the optimizer's part of it. Returns the step."""
        assert self.step is not None
        self._end_call("optimizer", 0, 0)
        self._copy_expert_tokens(self.step)
        self.step.end = self.clock.mark()
        step, self.step = self.step, None
        if isinstance(self._config.timers, _StageTimers):
            self._config.timers = self._config.timers.timers
        return step

    @staticmethod
    def _copy_expert_tokens(step: Step) -> None:
        """Start one copy of all counts to the host, which does not wait for it."""
        if step.expert_tokens:
            counts = torch.stack(list(step.expert_tokens.values())).to("cpu", non_blocking=True)
            step.expert_tokens = dict(zip(step.expert_tokens, counts, strict=True))

    def open_backward(self, part: "_Part", micro_batch: int, following: "list[_Part]") -> None:
        """The backward pass of `part` begins, and those of `following` end."""
        now = self.clock.mark()
        for other in following:
            self._close(other, now)
        self._backward_of = (part.chunk, micro_batch)
        self._open[part] = (micro_batch, now)

    def close_backward(self, part: "_Part") -> None:
        """The backward pass of `part` ends."""
        self._close(part, self.clock.mark())

    def _close(self, part: "_Part", end: Mark) -> None:
        micro_batch, begin = self._open.pop(part, (0, None))
        if begin is not None and self.step is not None:
            self.step.spans.append(("backward", part.layer, part.chunk, micro_batch, [(begin, end)]))


def between(run: Callable, enter: Callable, leave: Callable) -> Callable:
    """`run` with calls before and after it, like the forward hooks of a module."""

    @wraps(run)
    def run_between(*args: Any, **kwargs: Any) -> Any:
        enter(args, kwargs)
        output = run(*args, **kwargs)
        leave(args, kwargs, output)
        return output

    return run_between


def _once_there(hidden: torch.Tensor, call: Callable[[], None]) -> None:
    """Call `call` when the gradient of `hidden` is there."""
    if hidden.grad_fn is None:
        hidden.register_hook(lambda gradient: call())
    else:  # a graph returns one tensor in every replay, and a hook of it would stay with the first
        hidden.grad_fn.register_prehook(lambda gradients: call())


class _Part:
    """The timing of one part of a model chunk: a layer, the embedding, the tail or the head."""

    def __init__(self, hooks: TimingHooks, layer: int | str, chunk: int) -> None:
        self.hooks, self.layer, self.chunk = hooks, layer, chunk
        self.replays: Replays[int] = hooks.replays()
        self.begin: Mark = None

    def enter(self, module: torch.nn.Module, args: tuple = (), kwargs: dict[str, Any] | None = None) -> None:
        """Begin a forward pass: now, or when the part before it has ended, if nothing came in between."""
        hooks = self.hooks
        if hooks.step is None or not module.training:
            return
        hidden = args[0] if args else (kwargs or {}).get("hidden_states")
        before, _, end = hooks.boundary
        self.begin = end if hidden is not None and before() is hidden else hooks.clock.mark()

    def leave(self, hidden_in: torch.Tensor | None, hidden_out: torch.Tensor) -> None:
        """End a forward pass, and mark its backward pass by the gradients of `hidden_out` and `hidden_in` (None for a
        part without input)."""
        hooks = self.hooks
        step, begin = hooks.step, self.begin
        if step is None or begin is None:
            return
        self.begin = None
        micro_batch, is_replay = self.replays.decide(lambda: hooks.micro_batch.get(self.chunk, 0))
        kind, end = "recompute" if is_replay else "forward", hooks.clock.mark()
        step.spans.append((kind, self.layer, self.chunk, micro_batch, [(begin, end)]))
        before, following, _ = hooks.boundary
        if hidden_in is not None and hidden_in.requires_grad:
            if following is not None and before() is hidden_in:  # one hook ends this part and begins the one before it
                following.append(self)
            else:
                _once_there(hidden_in, lambda: hooks.close_backward(self))
        after: list[_Part] | None = None
        # Megatron-LM adds residuals with gradients even where it will recompute; that graph has no backward pass.
        if hidden_out.requires_grad and torch.is_grad_enabled():
            after = parts = []
            _once_there(hidden_out, lambda: hooks.open_backward(self, micro_batch, parts))
        hooks.boundary = weakref.ref(hidden_out), after, end


class _StageTimer:
    """One of Megatron-LM's timers that also calls `start` and `stop`."""

    def __init__(self, timer: Any, start: Any, stop: Any) -> None:
        self._timer, self._start, self._stop = timer, start, stop

    def start(self, *args: Any, **kwargs: Any) -> None:
        self._timer.start(*args, **kwargs)
        self._start()

    def stop(self, *args: Any, **kwargs: Any) -> None:
        self._stop()
        self._timer.stop(*args, **kwargs)


class _StageTimers:
    """Megatron-LM's timers, wrapped for the schedule: the timers of whole stages also call the hooks."""

    def __init__(self, timers: Any, hooks: TimingHooks) -> None:
        self.timers, self._hooks = timers, hooks

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        # Other loops than Megatron-LM's may have no timers.
        timer = DummyTimer() if self.timers is None else self.timers(name, log_level=log_level)
        if name == "forward-compute":
            return _StageTimer(timer, self._hooks.begin_call, self._hooks.end_forward_call)
        if name == "backward-compute":
            return _StageTimer(timer, self._hooks.begin_call, self._hooks.end_backward_call)
        return timer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.timers, name)
