"""Deferred weight gradients fill the bubbles of the pipeline (`--fill-with-weight-gradients`).

A stage computes the input gradient of a micro-batch and sends it. It defers the weight gradients to times when it would
wait. A simulation plans how many of them to compute at each point of Megatron-LM's schedule
(`balancing.layers.simulated_fill`), since the host of a GPU does not know whether the device waits. All ranks of a
stage follow the same plan, so their collectives keep one order.

Megatron-LM's schedule runs unchanged. Hooks on the model chunks follow its progress. Before it waits for a message, the
planned weight gradients are computed. The remaining ones are computed before gradients are finalized.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.utils import unwrap_model

from balancing.layers.simulated_fill import SplitPasses, kept_share, simulate_fill
from balancing.pipeline.schedule import Schedule, operations
from megatron.balanced.fill.weight_gradients import WeightGradients, deferring
from megatron.balanced.shared.callbacks import StepCallback
from megatron.balanced.shared.process_groups import duplicate_group, gather_objects, pipeline_group

__all__ = ["FilledSchedule", "WeightGradientFill", "use_filled_schedule", "with_filled_waits"]

_Passes = Sequence[tuple[str, int]]


class FilledSchedule:
    """The progress of a schedule, and the weight gradients to compute while it waits.

    passes: the passes of this rank in their order, each ("forward" or "backward", model chunk).
    pieces: int [pass + 1], pieces of weight gradients to compute before each pass and at the end.
    compute: computes the given number of pieces, the oldest first.
    """

    def __init__(self, passes: _Passes, pieces: Sequence[int], compute: Callable[[int], None]) -> None:
        self._passes, self._pieces, self._compute, self._next = passes, list(pieces), compute, 0
        self._left_out: set[tuple[str, int]] = set()

    def wait(self) -> None:
        """The rank is about to wait for messages."""
        pieces, self._pieces[self._next] = self._pieces[self._next], 0
        self._compute(pieces)

    def begin_forward(self, chunk: int) -> None:
        """A forward pass begins. Pieces planned before it are computed first, since it needs their memory."""
        self._reach(("forward", chunk))
        self.wait()
        self._next += 1

    def begin_backward(self, chunk: int) -> None:
        """A backward pass begins. Pieces planned before it are postponed, since other stages wait for its result."""
        self._reach(("backward", chunk))
        self._postpone()

    def has_no_backward(self, chunk: int) -> None:
        """Megatron-LM leaves out the backward passes of a chunk whose output needs no gradient: its layers, and all
        before it, are frozen."""
        self._left_out.add(("backward", chunk))

    def _reach(self, begins: tuple[str, int]) -> None:
        while self._next < len(self._passes) and self._passes[self._next] in self._left_out:
            self._postpone()
        following = self._passes[self._next : self._next + 1]
        assert [*following] == [begins], f"{begins} begins in place of {following}"

    def _postpone(self) -> None:
        self._pieces[self._next + 1] += self._pieces[self._next]
        self._next += 1


def use_filled_schedule(config: Any, schedule: FilledSchedule | None) -> None:
    """Compute weight gradients of `schedule` before waits for pipeline messages of the model with this config; None for
    Megatron-LM's own waits."""
    config.filled_schedule = schedule


class WeightGradientFill(StepCallback):
    """Defers weight gradients and computes them in pipeline bubbles. One on each rank.

    timeout_minutes: timeout of messages between the hosts of a pipeline.
    timed: (layer, model chunk) -> a context manager that times weight gradients of the layer.
    """

    def __init__(self, timeout_minutes: float, timed: Callable[[Any, int], Any] | None = None) -> None:
        self._timeout_minutes, self._timed = timeout_minutes, timed
        self._chunks: list[Any] = []
        self._finalize: Callable | None = None
        self._schedule: FilledSchedule | None = None
        self._planned: dict[int, tuple[_Passes, Sequence[int]]] = {}  # by micro-batches, for current layers

    def attach(self, chunks: list[Any]) -> None:
        self._chunks = chunks
        self._hosts = duplicate_group(pipeline_group(), self._timeout_minutes, on_host=True)
        self.gradients = WeightGradients(chunks, self._timed)
        for number, chunk in enumerate(chunks):
            chunk.register_forward_pre_hook(functools.partial(self._begin_forward, number))
            chunk.register_forward_hook(functools.partial(self._end_forward, number))
            for layer in unwrap_model(chunk).decoder.layers:
                self.gradients.watch(layer, number)
        self.layers_moved()

    def layer_arrived(self, layer: Any, chunk: int) -> None:
        self.gradients.watch(layer, chunk)

    def layers_moved(self) -> None:
        """Gather what the chunks of all stages compute, since one plan covers them."""
        for chunk in self._chunks:
            self.gradients.watch_rest(chunk)
        self._planned.clear()
        work = [_work(chunk) for chunk in self._chunks]
        self._work = np.array(gather_objects(work, self._hosts))  # [stage, chunk, part]: see `_work`

    # Around a step and its schedule.

    def begin_step(self, iteration: int, config: Any) -> None:
        self._config = config
        config.batch_p2p_comm = False  # so that each message has a wait of its own
        # A bucket is reduced when its last gradient is complete, which is after the last backward pass.
        config.grad_sync_func = None

    def begin_schedule(self) -> None:
        # Another callback may have set it, to run when all gradients have been computed.
        self._finalize = self._config.finalize_model_grads_func
        self._config.finalize_model_grads_func = self._finalize_all
        self._schedule = FilledSchedule(*self._plan(self.run.micro_batches), self.gradients.compute)
        use_filled_schedule(self._config, self._schedule)
        self.gradients.defer(True)

    def end_schedule(self) -> None:
        self._schedule = None
        use_filled_schedule(self._config, None)
        self.gradients.defer(False)
        self._config.finalize_model_grads_func = self._finalize

    def _finalize_all(self, *args: Any, **kwargs: Any) -> Any:
        self.gradients.compute_all()
        assert self._finalize is not None
        return self._finalize(*args, **kwargs)

    # Moments of the schedule.

    def _begin_forward(self, chunk: int, module: Any, args: Any) -> None:
        if self._schedule is not None:
            self._schedule.begin_forward(chunk)

    def _end_forward(self, chunk: int, module: Any, args: Any, output: Any) -> None:
        if self._schedule is None:
            return
        if output.requires_grad:
            # Not a tensor hook: it is not called if the tensor got another one before a checkpointed layer returned it.
            output.grad_fn.register_prehook(functools.partial(self._begin_backward, chunk))
        else:
            self._schedule.has_no_backward(chunk)

    def _begin_backward(self, chunk: int, gradients: Any) -> None:
        assert self._schedule is not None
        self._schedule.begin_backward(chunk)

    # The plan.

    def _plan(self, micro_batches: int) -> tuple[_Passes, Sequence[int]]:
        """The passes of this rank, and the pieces before each and at the end."""
        if micro_batches not in self._planned:
            self._planned[micro_batches] = self._simulate(micro_batches)
        return self._planned[micro_batches]

    def _gathering_ranks(self) -> int:
        """The number of tensor-parallel ranks whose parts of a layer's input stay in memory until the weight gradient
        is computed. Transformer Engine keeps the gathered input. Megatron-LM's own linear layers gather it again."""
        config = self._config
        whole = config.sequence_parallel and config.transformer_impl != "local"
        return mpu.get_tensor_model_parallel_world_size() if whole else 1

    def _simulate(self, micro_batches: int) -> tuple[_Passes, Sequence[int]]:
        layers, work, deferred, head = (self._work[:, :, part] for part in range(4))
        stages, chunks = layers.shape
        rank = mpu.get_pipeline_model_parallel_rank()
        schedule = Schedule(group=self._config.microbatch_group_size_per_vp_stage if chunks > 1 else None)
        backward = 2 * (work + head) - deferred
        passes = SplitPasses(
            work + head,
            backward,
            deferred,
            activation=layers,
            pieces=np.maximum(layers, 1),
            kept=kept_share(gathered_by=self._gathering_ranks()),
        )
        step = simulate_fill(passes, micro_batches, schedule=schedule)
        order = operations(stages, micro_batches, chunks=chunks, schedule=schedule)[rank]
        return tuple((operation.kind, operation.chunk) for operation in order), step.fills[rank]


def _work(chunk: Any) -> tuple[float, float, float, float]:
    """Four numbers of a chunk: trained layers; weights in them that multiply a token; those of these weights whose
    gradients are deferred; and weights of the head."""
    model = unwrap_model(chunk)
    layers = [layer for layer in model.decoder.layers if any(p.requires_grad for p in layer.parameters())]
    head = 0.0
    if model.post_process:
        head = model.config.hidden_size * model.vocab_size / mpu.get_tensor_model_parallel_world_size()
    all_of_them = sum(_products(layer, layer.modules()) for layer in layers)
    return float(len(layers)), all_of_them, sum(_products(layer, deferring(layer)) for layer in layers), head


def _products(layer: torch.nn.Module, modules: Iterable[torch.nn.Module]) -> float:
    """The number of weights of `modules` in `layer` that multiply a token. Only experts that the token chooses
    count."""
    shares = {
        id(parameter): layer.config.moe_router_topk / module.num_local_experts
        for module in layer.modules()
        if isinstance(module, SequentialMLP | TEGroupedMLP)
        for parameter in module.parameters()
    }
    weights = [weight for module in modules for weight in module.parameters(recurse=False) if weight.ndim > 1]
    return sum(weight.numel() * shares.get(id(weight), 1.0) for weight in weights if weight.requires_grad)


class _FilledWait:
    """A message in flight. Planned weight gradients are computed before the wait for it."""

    def __init__(self, request: Any, schedule: FilledSchedule) -> None:
        self._request, self._schedule = request, schedule

    def wait(self) -> None:
        self._schedule.wait()
        self._request.wait()


def with_filled_waits(original: Callable) -> Callable:
    """Megatron's `P2PCommunicator._communicate`, which computes weight gradients before it waits."""

    @functools.wraps(original)
    def _communicate(self: Any, *, wait_on_reqs: bool = True, **rest: Any) -> tuple[Any, Any, Any]:
        schedule = getattr(self.config, "filled_schedule", None)
        if schedule is None:
            return original(self, wait_on_reqs=wait_on_reqs, **rest)
        received_prev, received_next, requests = original(self, wait_on_reqs=False, **rest)
        waits = {name: _FilledWait(request, schedule) for name, request in requests.items()}
        if not wait_on_reqs:
            return received_prev, received_next, waits
        for wait in waits.values():
            wait.wait()
        return received_prev, received_next, None

    return _communicate
