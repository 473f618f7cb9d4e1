"""A layer's attention as CUDA graphs, which the layers that follow one program replay.

The host spends longer on a pass than on a replay, and all layers of a micro-batch follow one program. The first layer
runs as without graphs: it loads kernels and plans them, which a capture cannot. The second captures the pass, and it
and all later ones copy their tensors into the graph, replay it, and copy the results out. So L layers cost the host two
passes, an instantiation and L - 1 replays instead of L passes. The backward pass has a graph of its own.

Between a replay's last copy and the next one's first, nothing in a graph's memory is needed. So all graphs share one
memory pool, and `Graphs` keeps the latest few alone, however many micro-batches are in flight: one that is needed again
is captured again. Which are kept depends on the order of calls, which is the same on all ranks of a program. So all
capture and replay a transfer group together, as NCCL requires.
"""

import contextlib
import gc
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from balancing.kernels.base import Kernel, generators
from balancing.sequences.engine.attention import AttentionCall, SequenceAttention
from balancing.sequences.engine.latents import Projection
from balancing.sequences.engine.transport import Statistics

__all__ = ["CapturedAttention", "CapturedCall", "Graphs"]

Tensors = Sequence[torch.Tensor | None]
Run = Callable[..., Tensors]  # a call and the inputs of a pass -> its results

_KEPT = 4  # both passes of two kinds of layers
_CAPTURES = 1000  # of one memory pool, in which pieces of many sizes are left


class CapturedAttention(SequenceAttention):
    """`SequenceAttention` whose passes are captured and replayed. Latents run without graphs.

    graphs: those of this process. All ranks of the process group have the same number of calls with graphs.
    Other arguments: as for `SequenceAttention`. Waits in graphs are not timed.
    """

    def __init__(self, *arguments: Any, graphs: "Graphs", **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._graphs, self._captured = graphs, dict[tuple[int, float], CapturedCall]()

    def upload(self, device: torch.device, more: Sequence[np.ndarray] = ()) -> list[torch.Tensor]:
        self._captured.clear()  # their rows are replaced
        return super().upload(device, more)

    def call(self, kernel: Kernel, scale: float) -> "CapturedCall":  # type: ignore[override]
        key = id(kernel), scale
        if key not in self._captured:
            self._captured[key] = CapturedCall(super().call(kernel, scale), self._graphs)
        return self._captured[key]


class CapturedCall:
    """An `AttentionCall` whose passes are captured."""

    def __init__(self, call: AttentionCall, graphs: "Graphs") -> None:
        self.plain, self._graphs = call, graphs
        self._ran: set[Any] = set()  # passes that have run without a graph

    def forward(
        self, q: Any, k: Any, v: Any, sink: Any, latent: torch.Tensor | None, weight: torch.Tensor | None
    ) -> tuple[Any, Tensors, Projection | None]:
        """As `AttentionCall.forward`."""
        if latent is not None:
            return self.plain.forward(q, k, v, sink, latent, weight)
        out, *saved = self._run(_forward, (q, k, v, sink))
        return out, saved, None

    def backward(self, grad: Any, saved: Sequence[Any], projection: Projection | None, needs_sink: bool) -> Tensors:
        """As `AttentionCall.backward`."""
        if projection is not None:
            return self.plain.backward(grad, saved, projection, needs_sink)
        return self._run(_backward_with_sink if needs_sink else _backward, (grad, *saved))

    def _run(self, run: Run, inputs: Tensors) -> Tensors:
        key = run, tuple(None if one is None else (one.shape, one.dtype) for one in inputs)
        if key not in self._ran:
            self._ran.add(key)
            # In the layout of a graph's inputs, which decides which kernels are loaded.
            return run(self.plain, *(None if one is None else one.contiguous() for one in inputs))
        return self._graphs.run(self.plain, key, inputs)


def _forward(call: AttentionCall, q: Any, k: Any, v: Any, sink: Any) -> Tensors:
    out, saved, _ = call.forward(q, k, v, sink, None, None)
    return out, *saved


def _backward(call: AttentionCall, grad: torch.Tensor, *saved: Any) -> Tensors:
    return call.backward(grad, saved, None, False)


def _backward_with_sink(call: AttentionCall, grad: torch.Tensor, *saved: Any) -> Tensors:
    return call.backward(grad, saved, None, True)


class Graphs:
    """The graphs of the latest passes of this process, at most four, and their memory pool.

    Replays of all of them follow one another, on whichever streams they are started. Raises what a pass or its capture
    raises; no rank may then go on.
    """

    def __init__(self) -> None:
        self._latest: OrderedDict[Any, _Graph] = OrderedDict()
        self._memory: _Memory | None = None
        self._stream: torch.cuda.Stream | None = None  # of the latest replay

    def run(self, call: AttentionCall, key: tuple[Run, Any], inputs: Tensors) -> Tensors:
        """The results of a pass that has run before without a graph, from its graph.

        key: the pass, and the shapes and types of its inputs.
        """
        stream = torch.cuda.current_stream()
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)  # graphs share memory
        self._stream = stream
        graph = self._latest.pop((id(call), key), None)
        if graph is None:
            while len(self._latest) >= _KEPT:
                self._latest.popitem(last=False)
            self._memory = self._memory or _Memory()
            graph = _Graph(call, key[0], inputs, self._memory)
        self._latest[id(call), key] = graph
        return graph.replay(inputs)

    def clear(self) -> None:
        """Drop all graphs. Memory stays with the pool, unless it has served many captures."""
        self._latest.clear()
        if self._memory is not None and self._memory.captures >= _CAPTURES:
            self._memory = None
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Drop all graphs and their memory, before process groups end."""
        self._latest.clear()
        self._memory = None


class _Memory:
    """A memory pool of graphs. captures: how many have been made in it."""

    def __init__(self) -> None:
        self._pool, self._stream, self.captures = torch.cuda.graph_pool_handle(), torch.cuda.Stream(), 0
        self._keeper = torch.cuda.CUDAGraph()  # a pool ends with its last graph
        with self.capture(self._keeper):
            torch.zeros(1, device=torch.cuda.current_device())

    @contextlib.contextmanager
    def capture(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Capture what is launched. `torch.cuda.graph` would wait for the device and return all free memory first."""
        collects = gc.isenabled()
        gc.disable()  # what it frees may call what a capture does not allow
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    yield
                except BaseException:
                    with contextlib.suppress(Exception):  # says only that the capture is broken
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            if collects:
                gc.enable()
        self.captures += 1


class _Graph:
    """A captured pass. It keeps the call, whose rows the graph reads."""

    def __init__(self, call: AttentionCall, run: Run, inputs: Tensors, memory: _Memory) -> None:
        self._call, self._sent = call, Statistics(timed=False)
        self._graph = torch.cuda.CUDAGraph()
        for generator in generators(call.kernel):
            self._graph.register_generator_state(generator)
        with memory.capture(self._graph):
            self._inputs = [
                None if one is None else torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in inputs
            ]
            self._results = run(replace(call, statistics=self._sent), *self._inputs)

    def replay(self, inputs: Tensors) -> Tensors:
        """The results for `inputs`: tensors of their own, or of `inputs` where the pass returns one of these."""
        made: dict[int, torch.Tensor] = {}
        for into, given in zip(self._inputs, inputs, strict=True):
            if into is not None and given is not None:
                into.copy_(given)
                made[id(into)] = given
        self._graph.replay()
        self._call.statistics.add_bytes(self._sent)
        for result in self._results:
            if result is not None and id(result) not in made:
                made[id(result)] = result.clone(memory_format=torch.contiguous_format)
        return [made.get(id(result)) for result in self._results]
