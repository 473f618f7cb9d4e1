"""Observers of a run with CUDA graphs, which repeat kernels without any Python: a replay runs no hooks.

Modules of a graph get no hooks. Their tokens per expert are added up by captured code, in buffers on the device that
are set to 0 before a schedule and read after the step. Marks are outside of graphs:

- Graphs of layers, or of parts of layers (`--cuda-graph-impl transformer_engine` and `local`): marks are before and
  after a layer, and of its backward pass on the hidden states between layers.
- One graph of all passes (`full_iteration`): marks are before and after the graph. Iterations without a graph, before a
  capture, are measured as in any run. Documents are those of the captured iteration: a graph repeats the shapes of its
  micro-batches, and Megatron-LM does not capture packed ones.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.cuda_graphs import _CudagraphGlobalRecord
from megatron.core.transformer.moe.router import TopKRouter

from balancing.report import IN_GRAPH, RankRecord
from balancing.sequences import SequencePlan
from megatron.balanced.observe.observer import Observer
from megatron.balanced.observe.timing_hooks import Mark, Step, TimingHooks, between
from megatron.balanced.shared.captured_schedule import captures_next, graph_wrapper

__all__ = ["CapturedHooks", "CapturedObserver", "IterationObserver"]


class CapturedHooks(TimingHooks):
    """Marks outside of graphs, and tokens per expert that captured code counts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._counters: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self._layers: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def watch_layer(self, layer: torch.nn.Module, chunk: int) -> None:
        self._layers.add(layer)
        super().watch_layer(layer, chunk)

    def are_captured(self) -> bool:
        """Whether layers run in graphs from now on."""
        return _CudagraphGlobalRecord.cudagraph_created or any(
            getattr(layer, "cuda_graphs", None) for layer in self._layers
        )

    def _watch_passes(self, layer: torch.nn.Module, enter: Callable, leave: Callable) -> None:
        """Megatron-LM does not capture a layer with hooks."""
        if layer.config.cuda_graph_impl == "full_iteration":
            super()._watch_passes(layer, enter, leave)
        elif (manager := getattr(layer, "cudagraph_manager", None)) is not None:
            _time_manager(manager, enter, leave)
        else:
            for name in ("forward", "_te_cuda_graph_replay"):
                if hasattr(layer, name):
                    run = between(getattr(layer, name), partial(enter, layer), partial(leave, layer))
                    setattr(layer, name, run)

    def _watch_router(self, router: TopKRouter, number: int, layer: torch.nn.Module) -> None:
        counter = torch.zeros(layer.config.num_moe_experts, dtype=torch.int64, device=router.weight.device)
        # Where Megatron-LM runs a layer to capture it, it restores its buffers.
        router.register_buffer("counted_tokens", counter, persistent=False)
        self._counters[number] = counter
        is_first = self._first_passes(layer)
        its_router = weakref.ref(router)

        def count(args: tuple, kwargs: dict, output: Any) -> None:
            counted = its_router()
            if counted is not None and counted.training and is_first():
                counter.add_(output[1].detach().sum(dim=0, dtype=torch.int64))

        router.forward = between(router.forward, lambda *unused: None, count)

    def _watch_experts(self, experts: torch.nn.Module) -> None:
        config = experts.config
        whole = not config.cuda_graph_modules or any(each.name == "moe" for each in config.cuda_graph_modules)
        if config.cuda_graph_impl == "full_iteration" or (config.cuda_graph_impl != "local" and not whole):
            super()._watch_experts(experts)

    def begin_schedule(self) -> None:
        super().begin_schedule()
        for counter in self._counters.values():
            counter.zero_()

    def end_step(self) -> Step:
        assert self.step is not None
        self.step.expert_tokens = dict(sorted(self._counters.items()))
        return super().end_step()


def _time_manager(manager: Any, enter: Callable, leave: Callable) -> None:
    """Call `enter` before and `leave` after each pass of a layer that `manager`, a `CudaGraphManager`, runs."""
    original = type(manager)

    class TimedManager(original):  # type: ignore[valid-type, misc]
        def __call__(self, megatron_module: Any, args: tuple, kwargs: dict, cache_key: Any = None) -> Any:
            enter(megatron_module, args, kwargs)
            output = super().__call__(megatron_module, args, kwargs, cache_key)
            leave(megatron_module, args, kwargs, output)
            return output

    manager.__class__ = TimedManager


class CapturedObserver(Observer):
    """An `Observer` of layers that are captured, whole or in part."""

    hooks = CapturedHooks

    def begin_step(self, iteration: int, config: Any) -> None:
        super().begin_step(iteration, config)
        if self.step is not None and self._hooks.are_captured():  # type: ignore[attr-defined]
            self.step.graphs = "layers"


class IterationObserver(CapturedObserver):
    """An `Observer` of iterations whose passes are one graph. While it is captured or replayed, hooks do nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: Step | None = None  # the step in progress, while the graph runs
        self._began: Mark = None
        self._documents: Step | None = None  # their counts, in the captured iteration

    @property
    def step(self) -> Step | None:
        return self._held or super().step

    def documents(
        self, lengths_of: Callable[[], list[int]], chunk: int, plan: SequencePlan | None = None, place: int = 0
    ) -> None:
        if self._held is None:
            super().documents(lengths_of, chunk, plan, place)
        elif self._documents is not None and not chunk and self._writer is not None:
            self._count(self._documents, lengths_of(), plan, place)

    def begin_schedule(self) -> None:
        super().begin_schedule()
        captures = captures_next(graph_wrapper(self.run.schedule))
        if captures is None or self.step is None:
            return
        if captures:
            self._documents = Step(0, 0.0, None)
            self.set_aside()
        self._began = self._hooks.clock.mark()
        self._held, self._hooks.step = self._hooks.step, None

    def end_schedule(self) -> None:
        if (step := self._release()) is not None:
            step.graphs = IN_GRAPH
            step.spans.append(("graph", "", 0, 0, [(self._began, self._hooks.clock.mark())]))
            if (counted := self._documents) is not None:
                step.tokens, step.area, step.longest = counted.tokens, counted.area, counted.longest
        super().end_schedule()

    def abandon_schedule(self) -> None:
        self._release()
        super().abandon_schedule()

    def _release(self) -> Step | None:
        held, self._held = self._held, None
        if held is not None:
            self._hooks.step = held
        return held

    def _record(self, step: Step) -> RankRecord:
        record = super()._record(step)
        if step.graphs == IN_GRAPH:
            record.busy_seconds = 0.0  # the graph also waits for other ranks
        return record
