"""Moves layers with their whole state between pipeline stages, between two training steps.

`train()` of Megatron-LM keeps references to the model chunks, the optimizer, the scheduler and their bound methods. So
a move keeps these objects and replaces their contents:

1. Look: see how the layers that leave differ from what their specs build (`megatron.balanced.layers.structure`).
   Nothing has changed yet if that cannot travel.
2. Take apart: finish an all-gather of parameters in flight, take the state out of the optimizer, and free the gradient
   buffers to make room for tensors that arrive.
3. Build: set the new layout and build missing layers (`megatron.balanced.layers.build`).
4. Transfer: exchange requests for tensors, then the tensors (`megatron.balanced.layers.layer_tensors`).
5. Put together: wrap the layers for data parallelism anew, build a new optimizer, and put the state back. Meanwhile
   main parameters are stashed in the new gradient buffers.
6. Tell all callbacks.

So the peak memory of a rank is that before or after the move, whichever is larger, plus one layer. With a distributed
optimizer, weights are copied to a new buffer in the memory that gradients had. Embedding, final norm and head stay on
their stages unless the pipeline gets shorter. In this case the last stages send everything to other stages, and their
ranks leave the job (`megatron.balanced.layers.shrink`).
"""

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core import mpu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import is_managed_by_layer_wise_optimizer
from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager
from megatron.core.utils import unwrap_model

from balancing.pipeline.fixed_parts import NAMES
from balancing.pipeline.stage_plan import StagePlan
from balancing.ranges import named
from megatron.balanced.layers.build import change_layers, complete_ends, groups_of, structures
from megatron.balanced.layers.layer_tensors import (
    Inventory,
    Request,
    Shards,
    find_weights,
    layer_of,
    make_request,
    named_parameters,
    take_inventory,
    transfer,
)
from megatron.balanced.layers.quantized import finish_weights, forget_initial, forget_modules, weight_tensors
from megatron.balanced.layers.shrink import Departure
from megatron.balanced.layers.source import LayerSource
from megatron.balanced.layers.stack import stack_of
from megatron.balanced.layers.structure import BY_HAND, HOOK_ATTRIBUTES, check_end
from megatron.balanced.layers.training_loop import TrainingLoop
from megatron.balanced.shared.callbacks import StepCallback
from megatron.balanced.shared.captured_schedule import on_capture_stream
from megatron.balanced.shared.optimizer_state import (
    ParameterState,
    Settings,
    Taken,
    bucket_layout,
    future_ranges,
    place_weights,
    placed_weights,
    put_back,
    stash_in_gradients,
    state_bytes,
    take,
)
from megatron.balanced.shared.tail import own_modules, tail_chunk, tail_layers

__all__ = ["LayerMover", "Moved"]


class Moved(NamedTuple):
    """The cost of a move.

    moved_bytes: bytes that all ranks together sent to other ranks.
    move_ms, rebuild_ms: milliseconds of the slowest rank to transfer tensors, and to rebuild buffers and optimizer.
    peak_bytes: peak memory of a device since the last move, on the rank where it is largest.
    """

    moved_bytes: int
    move_ms: float
    rebuild_ms: float
    peak_bytes: int


class _Before(NamedTuple):
    """A rank before a move.

    hooked: [chunk], whether forward passes overlap with the all-gather of its weights.
    taken: state from the optimizer.
    settings: of its parameter groups, of this rank and then of all.
    shards: the tensors of this rank.
    inventories: inventories of all ranks.
    """

    hooked: list[bool]
    taken: Taken
    settings: list[Settings]
    shards: Shards
    inventories: list[Inventory]


@dataclass
class _After:
    """A rank after a move; empty if the rank leaves the job.

    departure: the release of ranks, if there is one.
    ends: final norm and head, if they are new here.
    arrived: new layers, each with the number of its chunk.
    layouts, weights: [chunk], layout of its flat buffers, and its weight buffers (`place_weights`).
    request: the tensors that the rank needs.
    """

    departure: Departure | None
    ends: list[torch.nn.Module] = field(default_factory=list)
    arrived: list[tuple[torch.nn.Module, int]] = field(default_factory=list)
    layouts: list[Any] = field(default_factory=list)
    weights: list[list[torch.Tensor | None]] = field(default_factory=list)
    request: Request = field(default_factory=Request)


class LayerMover:
    """Moves layers between the stages of one job. One on each rank; all ranks call its methods together.

    chunks: the model chunks of this rank, wrapped for data parallelism.
    optimizer, scheduler: of the model. A move replaces their contents.
    new_optimizer: builds an optimizer from its config and the chunks, with the arguments that `optimizer` was built
        with.
    source: builds the layers of the model.
    loop: has the process groups.
    listeners: returns the callbacks that are told of every move.
    moves: whether layers will move. Otherwise the structure of layers is not looked at before a move.

    The attribute `plan` is the current plan.

    Raises ValueError on all ranks if a layer has what cannot move.
    """

    def __init__(
        self,
        chunks: list[DistributedDataParallel],
        optimizer: ChainedOptimizer,
        scheduler: Any,
        new_optimizer: Callable[[Any, list[DistributedDataParallel]], ChainedOptimizer],
        source: LayerSource,
        loop: TrainingLoop,
        listeners: Callable[[], list[StepCallback]],
        *,
        moves: bool = True,
    ) -> None:
        self._chunks, self._source, self._model = chunks, source, source.config
        self._optimizer, self._scheduler, self._new_optimizer = optimizer, scheduler, new_optimizer
        self._loop, self._listeners, self.gather = loop, listeners, loop.groups.gather
        self._nodes: dict[torch.nn.Parameter, Any] = {}
        loop.groups.connect()
        self._remember_nodes()
        mine = [tuple(layer.layer_number - 1 for layer in model.decoder.layers) for model in self.models()]
        stages = dict(self.gather((mpu.get_pipeline_model_parallel_rank(), tuple(mine))))
        self.plan = StagePlan(
            tuple(stages[stage] for stage in sorted(stages)),
            tail_layers=tail_layers(self._model),
            tail_chunk=tail_chunk(self._model),
        )
        self._knows_structures = False
        if moves:
            self._check_structures()

    def models(self) -> list[torch.nn.Module]:
        """The model chunks of this rank, unwrapped."""
        return unwrap_model(self._chunks)

    def travelling_bytes(self) -> np.ndarray:
        """[layers + fixed parts], bytes that a rank receives with each layer and each part of
        `balancing.pipeline.fixed_parts`: weights, main parameters and moments."""
        return self._sum_up(self._travelling)

    def resting_bytes(self) -> np.ndarray:
        """[layers + fixed parts], bytes of the same that a rank holds between steps: those of a move, and gradients."""
        weight = self._model.params_dtype.itemsize
        gradient = max(weight, 4 if self._chunks[0].ddp_config.grad_reduce_in_fp32 else 0)
        return self._sum_up(lambda parameter: self._travelling(parameter) + gradient * parameter.numel())

    def _travelling(self, parameter: torch.nn.Parameter) -> float:
        dtype, is_expert = self._model.params_dtype, not getattr(parameter, "allreduce", True)
        weight = sum(tensor.nbytes for tensor in weight_tensors(parameter).values())
        matrix = is_managed_by_layer_wise_optimizer(parameter)
        state = state_bytes(
            self._chunks[0], dtype, is_expert=is_expert, is_matrix=matrix, config=self._optimizer.config
        )
        return weight + state * parameter.numel()

    def _sum_up(self, bytes_of: Callable[[torch.nn.Parameter], float]) -> np.ndarray:
        """The sum of `of_parameter` over parameters, on a rank that holds them: [layers + fixed parts]."""
        sums = np.zeros(self.plan.layers + len(NAMES))
        for model in self.models():
            parts = {layer.layer_number - 1: layer for layer in model.decoder.layers}
            ends = getattr(model, "embedding", None), getattr(model, "output_layer", None)
            parts |= {number - len(NAMES): end for number, end in enumerate(ends) if end is not None}
            if own := own_modules(model):
                parts[-1] = torch.nn.ModuleList(own)
            for number, part in parts.items():
                sums[number] = sum(bytes_of(parameter) for parameter in part.parameters())
        return np.max(self.gather(sums), axis=0)

    @named("move of layers")
    def move(self, plan: StagePlan) -> Moved:
        """Move layers to `plan`, which may have fewer stages. All ranks call it between two steps.

        Raises RuntimeError if ranks have different plans, before anything has changed. Raises Released on ranks that
        leave the job, once no other rank needs them.
        """
        plan = plan.with_tail_of(self.plan)
        self.agree(plan)
        if not self._knows_structures:
            self._check_structures()
        begin = time.perf_counter()
        changes = self._look(plan)
        before = self._take_apart()
        after = self._build(plan, before, changes)
        sent = self._transfer(before, after)
        moved = time.perf_counter()
        self._put_together(before, after)
        self._tell(after)
        self.plan = plan
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()  # peaks from now on are those of the new layers
        took = self.gather((sent, (moved - begin) * 1e3, (time.perf_counter() - moved) * 1e3, peak))
        sent_bytes, move_ms, rebuild_ms, peaks = zip(*took, strict=True)
        return Moved(sum(sent_bytes), max(move_ms), max(rebuild_ms), max(peaks))

    def agree(self, plan: StagePlan) -> None:
        """Raise RuntimeError if ranks have other plans, ValueError for other layers. All ranks call it together."""
        if plan.layers != self.plan.layers:
            raise ValueError(f"the plan has {plan.layers} layers, and the model {self.plan.layers}")
        digest = hashlib.sha256(repr((self.plan.chunks, plan.chunks)).encode()).hexdigest()
        if len(set(self.gather(digest))) > 1:
            raise RuntimeError("ranks made different plans for the same layers")

    def _check_structures(self) -> None:
        """Note what specs build, and raise ValueError on all ranks if some layer has what cannot move."""
        self._knows_structures = True
        for model in self.models():
            for built in structures(model, self._source):
                _renew_replays(_replays([built]), [])
        told = _told(self.models())
        digests = {where: hashlib.sha256(repr(names).encode()).hexdigest() for where, names in told.items()}
        gathered = {pair for of_rank in self.gather(digests) for pair in of_rank.items()}
        if len({where for where, _ in gathered}) < len(gathered):
            self._agree_on(_check_replicas, self.gather(told))
        self._agree_on(lambda: self._changes(lambda chunk, number: True, first=True))

    def _agree_on(self, check: Callable, *args: Any) -> Any:
        """Return what `check` returns. If it raises ValueError on some rank, raise that on all."""
        result, error = None, None
        try:
            result = check(*args)
        except ValueError as refusal:
            error = refusal
        others = [other for other in self.gather(error and str(error)) if other is not None]
        if others:
            raise error or ValueError(others[0])
        return result

    def _changes(self, leaves: Callable[[int, int], bool], *, first: bool = False) -> dict[int, bytes]:
        """Layer -> how it differs from what its spec builds, for the layers of this rank that leave.

        leaves: whether a layer of a chunk does. first: as in `Structure.changes_of`.

        Raises ValueError for what cannot travel.
        """
        found: dict[int, bytes] = {}
        copied: dict[int, tuple[Any, str]] = {}  # holds the objects, since an `id` is an object's while it lives
        for chunk, model in enumerate(self.models()):
            if first:
                self._check_ends(model)
            for layer in model.decoder.layers:
                if not leaves(chunk, layer.layer_number - 1):
                    continue
                changes = layer.structure.changes_of(layer, model.decoder.config, groups_of(model.decoder), first=first)
                found[layer.layer_number - 1] = changes.data
                for key, (each, where) in changes.copied.items():
                    if key in copied:
                        raise ValueError(
                            f"a {type(each).__name__} belongs to {copied[key][1]} and to {where}, and a moved layer "
                            f"would arrive with a copy of it; give each layer its own, {BY_HAND}"
                        )
                copied |= changes.copied
        return found

    def _check_ends(self, model: torch.nn.Module) -> None:
        """Raise ValueError for a final norm or a head that may arrive with the last layer, or in a shorter pipeline, if
        it is not what its spec builds."""
        norm, shrinks = stack_of(self._source).norm, self._loop.shrinking is not None
        parts = {f"decoder.{norm}": getattr(model.decoder, norm, None)} if shrinks or self.plan.tail_layers else {}
        parts |= {"output_layer": getattr(model, "output_layer", None)} if shrinks else {}
        for name, part in parts.items():
            if part is not None:
                check_end(part, name)

    # The phases of a move.

    def _look(self, plan: StagePlan) -> dict[int, bytes]:
        """Layer -> how it differs from what its spec builds, for the layers that may arrive here."""
        stage = mpu.get_pipeline_model_parallel_rank()
        stays = plan.chunks[stage] if stage < plan.stages else tuple(() for _ in self._chunks)
        leaving = self._agree_on(lambda: self._changes(lambda chunk, number: number not in stays[chunk]))
        return {number: data for found in self._loop.groups.along_pipeline(leaving) for number, data in found.items()}

    def _take_apart(self) -> _Before:
        """Take the state out of the optimizer, exchange inventories with all ranks, and free the gradient buffers."""
        hooked = _finish_gathering(self._chunks, self._optimizer)
        taken = take(self._optimizer)
        settings = [taken.settings, *self.gather(taken.settings)]
        shards, inventory = take_inventory(self.models(), taken.states)
        inventories = self.gather(inventory)
        taken.states.clear()
        self._free_buffers()
        # Otherwise arriving tensors would fragment the cached memory of gradients, which the new buffers need whole.
        torch.cuda.empty_cache()
        return _Before(hooked, taken, settings, shards, inventories)

    def _build(self, plan: StagePlan, before: _Before, changes: dict[int, bytes]) -> _After:
        """Build the modules of `plan`, place weights in their new buffers, and request the tensors that are missing. A
        rank that leaves the job builds nothing."""
        departure = None
        ends: list[torch.nn.Module] = []
        if plan.stages < self.plan.stages:
            shrinking, sizes = self._loop.shrinking, (self.plan.stages, plan.stages)
            assert shrinking is not None
            departure = shrinking.begin(sizes, self._chunks, self._listeners(), self.gather)
            if departure.leaves:
                return _After(departure)
            ends = complete_ends(plan.stages, self.models()[0], self._source, shrinking.build)
        self._source.set_layout(plan, self._chunks)
        in_buffers = self._chunks[0].ddp_config.use_distributed_optimizer
        inventories, replays = before.inventories, _replays(self.models())
        arrived, norms = change_layers(
            plan, self.models(), self._source, inventories, changes, without_memory=in_buffers
        )
        _renew_replays(replays, _replays(self.models()))
        new = [*ends, *norms, *(layer for layer, _ in arrived)]
        layouts = [bucket_layout(ddp, chunk) for chunk, ddp in enumerate(self._chunks)]
        weights = [place_weights(layout, new) for layout in layouts]
        find_weights(self.models(), new, before.shards)
        ranges = {p: r for pair in zip(self._chunks, layouts, strict=True) for p, r in future_ranges(*pair).items()}
        request = make_request(self.models(), new, ranges, inventories)
        return _After(departure, ends, arrived, layouts, weights, request)

    def _transfer(self, before: _Before, after: _After) -> int:
        """Transfer all tensors, and drop references to their old memory. Ranks that leave the job end here. Returns the
        bytes that this rank sent."""
        requests = [piece for pieces in self.gather(after.request.pieces) for piece in pieces]
        groups = self._loop.groups
        sent = transfer(before.shards, after.request, before.inventories, requests, groups.tensors, groups.timeout)
        after.request.targets.clear()
        finish_weights(parameter for layer, _ in after.arrived for parameter in layer.parameters())
        forget_modules(self._chunks)
        if self._model.fine_grained_activation_offloading:
            _forget_offloaded(self.models())
        if after.departure is not None:
            assert self._loop.shrinking is not None
            self._loop.shrinking.finish(after.departure, groups)
        return sent

    def _put_together(self, before: _Before, after: _After) -> None:
        """Wrap the layers for data parallelism, build a new optimizer, and put the state back."""
        torch.cuda.empty_cache()
        for chunk, ddp in enumerate(self._chunks):
            with placed_weights(after.weights[chunk]), on_capture_stream(self._model):
                self._wrap(ddp, chunk, after.layouts[chunk], before.hooked[chunk])
        self._remember_nodes()
        self._renew(after.request.states, before)

    def _tell(self, after: _After) -> None:
        """Tell all callbacks what has changed."""
        for layer, chunk in after.arrived:
            for callback in self._listeners():
                callback.layer_arrived(layer, chunk)
        for callback in self._listeners() if after.ends else []:
            callback.head_arrived(self.models()[0])
        for callback in self._listeners():
            callback.layers_moved()

    def _free_buffers(self) -> None:
        """Free Megatron's flat buffers. A weight buffer is freed once its weights are in the new buffer or were sent.

        The schedule that runs layers in parts leaves an object on each layer that refers to the layer. It is removed,
        or the layer would stay in memory after its move.
        """
        for ddp in self._chunks:
            for module in ddp.module.modules():
                vars(module).pop("backward_dw_wrapper", None)
            for parameter in ddp.module.parameters():
                if hasattr(parameter, "main_grad"):
                    del parameter.main_grad
                forget_initial(parameter)
            ddp.bucket_groups, ddp.expert_parallel_bucket_groups = [], []
            ddp.buffers, ddp.expert_parallel_buffers = [], []
            ddp.param_to_bucket_group = {}

    # Data parallelism and the optimizer.

    def _wrap(self, ddp: DistributedDataParallel, chunk: int, layout: Any, hooked: bool) -> None:
        """Make buffers, buckets and hooks of `ddp` for its present layers.

        A hook on a parameter's gradient cannot be removed, and a second one would count the gradient twice. So each
        parameter keeps its hook (`_hooked`). The hook belongs to `ddp` and looks up buckets when it fires. Hooks of
        delayed weight gradients are in lists on modules, which are cleared. Hooks of others on `ddp` stay.
        """
        kept = {name: value for name, value in vars(ddp).items() if name == "training" or name in HOOK_ATTRIBUTES}
        for module in ddp.module.modules():
            getattr(module, "wgrad_accumulation_and_reduce_hooks", []).clear()
        with _hooked(self._nodes):
            DistributedDataParallel.__init__(
                ddp,
                config=ddp.config,
                ddp_config=ddp.ddp_config,
                module=ddp.module,
                disable_bucketing=chunk > 0,
                pg_collection=unwrap_model(ddp).pg_collection,
                full_param_layout=layout,
            )
        vars(ddp).update(kept)
        if ddp.use_forward_hook and not hooked:
            ddp.disable_forward_pre_hook(param_sync=False)

    def _remember_nodes(self) -> None:
        """Keep references to the graph nodes that hold Megatron's gradient hooks while their parameters are here."""
        present = {parameter for ddp in self._chunks for parameter in ddp.parameters()}
        seen = {node.variable: node for ddp in self._chunks for node in ddp.grad_accs}
        self._nodes = {parameter: node for parameter, node in (seen | self._nodes).items() if parameter in present}

    def _renew(self, states: dict[torch.nn.Parameter, ParameterState], before: _Before) -> None:
        stash_in_gradients(states)
        # Main parameters are made from weights. Autograd would record the conversion of 8-bit weights.
        quantized = any(is_float8tensor(parameter) for ddp in self._chunks for parameter in ddp.parameters())
        with torch.set_grad_enabled(not quantized):
            new = self._new_optimizer(self._optimizer.config, self._chunks)
        put_back(self._optimizer, new, states, before.taken.scalers, before.settings)
        for ddp in self._chunks:
            ddp.zero_grad_buffer()
        self._scheduler.step(0)  # gives the parameter groups their learning rate and weight decay


def _told(models: Iterable[torch.nn.Module]) -> dict[tuple[int, str], dict[str, Any]]:
    """(Stage, place of its shards) -> name of each parameter of layers -> its shape, type, and whether it trains."""
    told: dict[tuple[int, str], dict[str, Any]] = {}
    for name, parameter in named_parameters(list(models)):
        if layer_of(name) >= 0:
            name, _, place = name.partition("@")
            fact = tuple(parameter.shape), str(parameter.dtype), "trains" if parameter.requires_grad else "frozen"
            told.setdefault((mpu.get_pipeline_model_parallel_rank(), place), {})[f"decoder.layers.{name}"] = fact
    return told


def _check_replicas(told: list[dict[tuple[int, str], dict[str, Any]]]) -> None:
    """Raise ValueError if ranks that hold the same shards of layers have other parameters. told: [rank] (`_told`)."""
    first: dict[Any, tuple[int, dict[str, Any]]] = {}
    for rank, of_rank in enumerate(told):
        for where, parameters in of_rank.items():
            other, known = first.setdefault(where, (rank, parameters))
            for name in [name for name in {**known, **parameters} if known.get(name) != parameters.get(name)]:
                raise ValueError(
                    f"{name} is {known.get(name, 'absent')} on rank {other} and {parameters.get(name, 'absent')} on "
                    f"rank {rank}, which hold the same layer; change a layer on all of its ranks alike"
                )


def _forget_offloaded(models: Iterable[torch.nn.Module]) -> None:
    """Make the next iteration record which activations are offloaded (--fine-grained-activation-offloading), as the
    first one did. Megatron-LM identifies the activations of a micro-batch by their order."""
    PipelineOffloadManager.reset_instance()
    for model in models:
        model.disable_param_offloading = True  # in the next forward pass, where new weights are marked


def _replays(models: Iterable[torch.nn.Module]) -> list[Any]:
    """Where routers keep routing that is replayed (moe_enable_routing_replay), in the order of layers."""
    replays = [getattr(module, "router_replay", None) for model in models for module in model.modules()]
    return [replay for replay in replays if replay is not None]


def _renew_replays(before: list[Any], now: list[Any]) -> None:
    """Put the routers that a model has `now` into the place of those that it had `before` in the list from which
    Megatron-LM gives routers their routing, in this order. Other models of the process are in this list, too."""
    if not (before or now):
        return
    listed = type((before or now)[0]).global_router_replay_instances
    place = min((listed.index(replay) for replay in before), default=len(listed) - len(now))
    others = {id(replay) for replay in (*before, *now)}
    first, rest = ([replay for replay in part if id(replay) not in others] for part in (listed[:place], listed[place:]))
    listed[:] = [*first, *now, *rest]
    for replay in now:
        if before and replay.router_replay_action is None:
            replay.router_replay_action = before[0].router_replay_action


@contextlib.contextmanager
def _hooked(nodes: dict[torch.nn.Parameter, Any]) -> Iterator[None]:
    """While Megatron-LM asks parameters for the graph nodes of their gradients, it gets a stand-in for each node that
    has its hook. Otherwise hooks of all moves would add up, each a call in every backward pass.

    nodes: parameter -> its node.
    """
    for parameter in nodes:  # a class of quantized parameters has an `expand_as` of its own
        node = SimpleNamespace(variable=parameter, register_hook=lambda hook: None)
        expanded = SimpleNamespace(grad_fn=SimpleNamespace(next_functions=((node, 0),)))
        parameter.expand_as = lambda other, expanded=expanded: expanded  # type: ignore[method-assign]
    try:
        yield
    finally:
        for parameter in nodes:
            del parameter.expand_as


def _finish_gathering(chunks: list[DistributedDataParallel], optimizer: ChainedOptimizer) -> list[bool]:
    """Complete the all-gather of weights of a distributed optimizer. Returns for each chunk whether forward passes
    overlap with it."""
    hooked = [bool(ddp.remove_forward_pre_hook_handles) for ddp in chunks]
    if any(hooked):
        optimizer.prepare_model_params_for_param_sync()
    for ddp, overlaps in zip(chunks, hooked, strict=True):
        if overlaps:
            ddp.disable_forward_pre_hook(param_sync=True)
    return hooked
