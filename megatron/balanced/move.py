"""A layer moves to another pipeline stage while training goes on: everything of it, between two steps.

`train()` of Megatron-LM holds on to the model chunks, the optimizer, the scheduler and bound methods of them, so these
objects stay and are filled anew. In this order: parameters are gathered if that is under way, the optimizer's state is
taken out, the new layout is set, missing layers are built, every rank tells what it holds and what it will hold, tensors
travel one layer after the other (`balancing.layers.transfer`), data parallelism and optimizer are built around the new
layers, and state is put back. Gradient buffers go first and come back last, so they make room for what travels.

Embedding, final norm and head stay where they are.
"""

import argparse
import datetime
import hashlib
import inspect
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker, set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import _get_block_submodules
from megatron.core.utils import unwrap_model
from megatron.training.models.gpt import GPTModelConfig, default_layer_spec
from megatron.training.training import get_megatron_optimizer_config

from balancing.layers.layout import to_layout
from balancing.layers.stages import StagePlan
from balancing.layers.transfer import Piece, Transfer, exchange, plan_transfers
from megatron.balanced.optimizer_state import ParameterState, Taken, bucket_layout, future_ranges, put_back, take

__all__ = ["LayerMover", "Moved"]

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_HUNG = ("grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func", "finalize_model_grads_func", "timers")
_WEIGHT, _BUFFER = "weight", "buffer"


class Moved(NamedTuple):
    """What a move took on this rank. moved_bytes: sent to other ranks, by all ranks together."""

    moved_bytes: int
    move_ms: float
    rebuild_ms: float


@dataclass
class _Told:
    """What one rank tells the others before a move."""

    pieces: list[Piece] = field(default_factory=list)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)  # of parameters
    frozen: set[str] = field(default_factory=set)  # parameters
    buffers: dict[str, tuple[torch.Size, torch.dtype, bool]] = field(default_factory=dict)  # shape, dtype, persistent


class LayerMover:
    """Moves layers between the stages of one job. One on each rank; all ranks call its methods together.

    spec: what the model was built from. built: each is called with a layer that came to this rank and the number of its
    model chunk, once its weights are there.
    """

    def __init__(self, args: argparse.Namespace, spec: GPTModelConfig) -> None:
        self.built: list[Callable[[torch.nn.Module, int], None]] = []
        self._args, self._spec = args, spec
        self._timeout = datetime.timedelta(minutes=args.distributed_timeout_minutes)
        self._chunks: list[DistributedDataParallel] = []
        self._nodes: dict[torch.nn.Parameter, Any] = {}

    def attach(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Remember the wrapped model chunks of this rank. Returns them, as Megatron's model hooks must."""
        self._chunks = chunks
        self._objects = dist.new_group(backend="gloo", timeout=self._timeout)
        self._tensors = dist.new_group(timeout=self._timeout)
        self._remember_nodes()
        self.plan = self._present_plan()
        return chunks

    def _present_plan(self) -> StagePlan:
        mine = [tuple(layer.layer_number - 1 for layer in model.decoder.layers) for model in self._models()]
        stages = {stage: tuple(chunks) for stage, chunks in self.gather((_stage(), mine))}
        return StagePlan(tuple(stages[stage] for stage in sorted(stages)))

    def _models(self) -> list[torch.nn.Module]:
        return unwrap_model(self._chunks)

    def gather(self, told: Any) -> list[Any]:
        """What every rank of the job tells, in the order of ranks."""
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, told, group=self._objects)
        return every

    def _remember_nodes(self) -> None:
        """The nodes of the graph that hold Megatron's gradient hooks live as long as their parameters do: see `_wrap`."""
        present = {parameter for ddp in self._chunks for parameter in ddp.parameters()}
        seen = {node.variable: node for ddp in self._chunks for node in ddp.grad_accs}
        self._nodes = {parameter: node for parameter, node in (self._nodes | seen).items() if parameter in present}

    def parameters(self) -> np.ndarray:
        """Parameters of each layer, of the embedding and of the head on a rank that holds them: [layers + 2]."""
        counts = np.zeros(self.plan.layers + 2)
        for model in self._models():
            for layer in model.decoder.layers:
                counts[layer.layer_number - 1] = sum(parameter.numel() for parameter in layer.parameters())
            for place, name in ((-2, "embedding"), (-1, "output_layer")):
                part = getattr(model, name, None)
                if part is not None:
                    counts[place] = sum(parameter.numel() for parameter in part.parameters())
        return np.max(self.gather(counts), axis=0)

    # The move.

    def move(self, plan: StagePlan, optimizer: ChainedOptimizer, scheduler: Any) -> Moved:
        """Have the layers as `plan` says. To be called between two steps.

        Raises RuntimeError, before anything has changed, when ranks want different plans.
        """
        self._agree(plan)
        begin = time.perf_counter()
        hooked = [_finish_gathering(ddp) for ddp in self._chunks]
        taken = take(optimizer)
        held, told = self._inventory(taken)
        everyone = self.gather(told)
        self._free_buffers()
        self._set_layout(plan)
        arrived = self._change_layers(plan, everyone)
        layouts = [bucket_layout(ddp, chunk) for chunk, ddp in enumerate(self._chunks)]
        states, sent = self._exchange(held, everyone, arrived, layouts)
        del held
        moved = time.perf_counter()
        training = [ddp.training for ddp in self._chunks]
        for chunk, ddp in enumerate(self._chunks):
            self._wrap(ddp, chunk, layouts[chunk], hooked[chunk])
            ddp.training = training[chunk]
        self._remember_nodes()
        self._renew(optimizer, scheduler, states, taken)
        for layer, chunk in arrived:
            for tell in self.built:
                tell(layer, chunk)
        self.plan = plan
        end = time.perf_counter()
        return Moved(sum(self.gather(sent)), (moved - begin) * 1e3, (end - moved) * 1e3)

    def _agree(self, plan: StagePlan) -> None:
        digest = hashlib.sha256(repr((self.plan.chunks, plan.chunks)).encode()).hexdigest()
        if len(set(self.gather(digest))) > 1:
            raise RuntimeError("ranks made different plans for the same layers")
        dist.all_reduce(torch.zeros(1, device=torch.cuda.current_device()), group=self._tensors)

    # What there is.

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The parameters of this rank by a name that any rank that could hold the same tensor has for it, too."""
        for chunk, model in enumerate(self._models()):
            for name, parameter in model.named_parameters():
                found = _LAYER.fullmatch(name)
                where = f"stage {_stage()}.{chunk}.{name}"
                if found:
                    where = f"{model.decoder.layers[int(found[1])].layer_number - 1}.{found[2]}"
                yield f"{where}@{_coordinates(parameter)}", parameter

    def _buffers(self) -> Iterator[tuple[str, torch.nn.Module, str, torch.Tensor]]:
        """Name among all ranks, module, name within it, and tensor of each buffer of a layer."""
        for model in self._models():
            for layer in model.decoder.layers:
                for path, module in layer.named_modules():
                    for name, buffer in module.named_buffers(recurse=False):
                        whole = f"{path}.{name}" if path else name
                        yield f"{layer.layer_number - 1}.{whole}@{_coordinates(None)}", module, name, buffer

    def _inventory(self, taken: Taken) -> tuple[dict[str, tuple[int, torch.Tensor]], _Told]:
        """Tensor -> its first element on this rank, and those it has; and what the others need to know of it."""
        held: dict[str, tuple[int, torch.Tensor]] = {}
        told = _Told()
        for name, parameter in self._named():
            held[f"{name}:{_WEIGHT}"] = (0, parameter.data.view(-1))
            if not parameter.requires_grad:
                told.frozen.add(name)
            state = taken.states.get(parameter)
            if state is not None:
                told.scalars[name] = state.scalars
                for kind, tensor in state.tensors.items():
                    held[f"{name}:{kind}"] = (state.start, tensor)
        for name, module, own, buffer in self._buffers():
            held[f"{name}:{_BUFFER}"] = (0, buffer.data.reshape(-1))
            persistent = own not in module._non_persistent_buffers_set
            told.buffers[name] = (buffer.shape, buffer.dtype, persistent)
        for name, (start, tensor) in held.items():
            told.pieces.append(Piece(name, dist.get_rank(), start, start + tensor.numel()))
            told.dtypes[name] = tensor.dtype
        return held, told

    # The layers.

    def _free_buffers(self) -> None:
        """Let go of Megatron's flat buffers. Weights that lie in one keep it until the new one is there."""
        for ddp in self._chunks:
            for parameter in ddp.module.parameters():
                if hasattr(parameter, "main_grad"):
                    del parameter.main_grad
            ddp.bucket_groups, ddp.expert_parallel_bucket_groups = [], []
            ddp.param_to_bucket_group = {}
            ddp.buffers, ddp.expert_parallel_buffers = [], []

    def _set_layout(self, plan: StagePlan) -> None:
        text = to_layout(plan)
        layout = PipelineParallelLayerLayout(text, plan.stages)
        layout.validate_layer_layout(plan.layers, None)
        self._args.pipeline_model_parallel_layout = text
        self._spec.transformer.pipeline_model_parallel_layout = layout
        for ddp in self._chunks:
            for module in ddp.modules():
                config = getattr(module, "config", None)
                if hasattr(config, "pipeline_model_parallel_layout"):
                    config.pipeline_model_parallel_layout = layout

    def _change_layers(self, plan: StagePlan, everyone: list[_Told]) -> list[tuple[torch.nn.Module, int]]:
        """Put `plan`'s layers into the blocks. Returns the new ones, still without content, each with its chunk."""
        arrived = []
        for chunk, model in enumerate(self._models()):
            block = model.decoder
            present = {layer.layer_number - 1: layer for layer in block.layers}
            block.submodules = _get_block_submodules(block.config, self._layer_spec(model), block.vp_stage, _stage())
            layers = []
            for position, number in enumerate(plan.chunks[_stage()][chunk]):
                layer = present.get(number)
                if layer is None:
                    layer = self._build(block, position)
                    assert layer.layer_number == number + 1, "the layout gives another layer than the plan"
                    arrived.append((layer, chunk))
                layers.append(layer)
            block.layers = torch.nn.ModuleList(layers)
            block.num_layers_per_pipeline_rank = len(layers)
        self._give_form([layer for layer, _ in arrived], everyone)
        return arrived

    def _layer_spec(self, model: torch.nn.Module) -> Any:
        """The spec of the layers of a chunk under the layout that is set, found as Megatron-LM's builder finds it."""
        spec = self._spec.transformer_layer_spec
        if spec is None:
            spec = default_layer_spec(self._spec, model.vp_stage)
        elif not isinstance(spec, ModuleSpec) and callable(spec):
            takes_stage = "vp_stage" in inspect.signature(spec).parameters
            spec = spec(self._spec, vp_stage=model.vp_stage) if takes_stage else spec(self._spec)
        if self._spec.attention_backend == AttnBackend.local and hasattr(spec, "submodules"):
            spec.submodules.self_attention.submodules.core_attention = DotProductAttention
        return spec

    def _build(self, block: torch.nn.Module, position: int) -> torch.nn.Module:
        """A layer as Megatron-LM would build and cast it, uninitialized, without drawing a random number."""
        config = block.config
        # What train() hung on it since the model was built is not to be copied into layers, as some copy their config.
        hung = {name: getattr(config, name) for name in _HUNG if getattr(config, name, None) is not None}
        states = torch.get_rng_state(), torch.cuda.get_rng_state(), get_cuda_rng_tracker().get_states()
        hung["perform_initialization"] = config.perform_initialization
        for name in hung:
            setattr(config, name, None)
        try:
            layer = build_module(
                block.submodules.layer_specs[position],
                config=config,
                layer_number=position + 1,
                pg_collection=block.pg_collection,
                vp_stage=block.vp_stage,
            )
        finally:
            for name, value in hung.items():
                setattr(config, name, value)
            torch.set_rng_state(states[0])
            torch.cuda.set_rng_state(states[1])
            get_cuda_rng_tracker().set_states(states[2])
        for parameter in layer.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        layer.cuda(torch.cuda.current_device())
        if config.fp16 or config.bf16:
            layer.to(torch.float16 if config.fp16 else torch.bfloat16)
            for module in layer.modules():
                if hasattr(module, "_maintain_float32_expert_bias"):
                    module._maintain_float32_expert_bias()
        return layer.train(block.training)

    def _give_form(self, layers: list[torch.nn.Module], everyone: list[_Told]) -> None:
        """Buffers that others registered on a layer, and which of its parameters are frozen."""
        numbers = {layer.layer_number - 1: layer for layer in layers}
        frozen = set().union(*(told.frozen for told in everyone))
        for name, parameter in self._named():
            if name in frozen:
                parameter.requires_grad_(False)
        for name, (shape, dtype, persistent) in {
            n: form for told in everyone for n, form in told.buffers.items()
        }.items():
            number, _, path = name.rpartition("@")[0].partition(".")
            layer = numbers.get(int(number))
            if layer is not None:
                owner, _, own = path.rpartition(".")
                empty = torch.empty(shape, dtype=dtype, device=torch.cuda.current_device())
                layer.get_submodule(owner).register_buffer(own, empty, persistent=persistent)

    # What travels.

    def _exchange(
        self,
        held: dict[str, tuple[int, torch.Tensor]],
        everyone: list[_Told],
        arrived: list[tuple[torch.nn.Module, int]],
        layouts: list[Any],
    ) -> tuple[dict[torch.nn.Parameter, ParameterState], int]:
        """Bring everything to where it belongs. Returns the optimizer's new state, and the bytes this rank sent."""
        dtypes = {name: dtype for told in everyone for name, dtype in told.dtypes.items()}
        kinds: dict[str, set[str]] = {}
        for name in dtypes:
            parameter, _, kind = name.rpartition(":")
            kinds.setdefault(parameter, set()).add(kind)
        scalars = {name: numbers for told in everyone for name, numbers in told.scalars.items()}
        ranges = {
            parameter: covered
            for ddp, layout in zip(self._chunks, layouts, strict=True)
            for parameter, covered in future_ranges(ddp, layout).items()
        }
        coming = {layer.layer_number for layer, _ in arrived}
        states: dict[torch.nn.Parameter, ParameterState] = {}
        targets: dict[str, tuple[int, torch.Tensor]] = {}
        wanted: list[Piece] = []
        for name, parameter in self._named():
            if _round(name) + 1 in coming:
                targets[f"{name}:{_WEIGHT}"] = (0, parameter.data.view(-1))
                wanted.append(Piece(f"{name}:{_WEIGHT}", dist.get_rank(), 0, parameter.numel()))
            if parameter in ranges:
                start, stop = ranges[parameter]
                states[parameter] = ParameterState(start, stop, scalars=scalars.get(name, {}))
                for kind in sorted(kinds[name] - {_WEIGHT, _BUFFER}):
                    wanted.append(Piece(f"{name}:{kind}", dist.get_rank(), start, stop))
        for name, _, _, buffer in self._buffers():
            if _round(name) + 1 in coming:
                targets[f"{name}:{_BUFFER}"] = (0, buffer.data.view(-1))
                wanted.append(Piece(f"{name}:{_BUFFER}", dist.get_rank(), 0, buffer.numel()))
        by_name = {name: states[parameter] for name, parameter in self._named() if parameter in states}

        everybody = [piece for pieces in self.gather(wanted) for piece in pieces]
        rounds: dict[int, list[Transfer]] = {}
        for transfer in plan_transfers((piece for told in everyone for piece in told.pieces), everybody):
            rounds.setdefault(_round(transfer.tensor), []).append(transfer)
        sent = 0
        for number in sorted(rounds):
            for piece in (piece for piece in wanted if _round(piece.tensor) == number and piece.tensor not in targets):
                targets[piece.tensor] = self._place(piece, held, dtypes[piece.tensor])
            sent += exchange(
                [t for t in rounds[number] if t.source != t.target or _differ(held, targets, t)],
                lambda transfer: _part(held[transfer.tensor], transfer),
                lambda transfer: _part(targets[transfer.tensor], transfer),
                self._tensors,
                self._timeout,
            )
            for name in [name for name in held if _round(name) == number]:
                del held[name]
        for piece in wanted:
            name, _, kind = piece.tensor.rpartition(":")
            if kind not in (_WEIGHT, _BUFFER):
                by_name[name].tensors[kind] = targets[piece.tensor][1]
        return states, sent

    @staticmethod
    def _place(piece: Piece, held: dict[str, tuple[int, torch.Tensor]], dtype: torch.dtype) -> tuple[int, torch.Tensor]:
        """Memory for `piece`: where it lies already, if exactly these elements lie on this rank."""
        start, tensor = held.get(piece.tensor, (0, None))
        if tensor is not None and (start, start + tensor.numel()) == (piece.start, piece.stop):
            return start, tensor
        return piece.start, torch.empty(piece.stop - piece.start, dtype=dtype, device=torch.cuda.current_device())

    # Data parallelism and the optimizer.

    def _wrap(self, ddp: DistributedDataParallel, chunk: int, layout: Any, hooked: bool) -> None:
        """Give `ddp` buffers, buckets and hooks for the layers that it has now.

        A hook on a parameter's gradient cannot be taken off, so those that have one keep it: it is the same object's
        and looks up buckets when it fires.
        """
        nodes = self._nodes

        def make_backward_post_hook(parameter: torch.nn.Parameter) -> Callable:
            if parameter in nodes:
                return _do_nothing
            return DistributedDataParallel._make_backward_post_hook(ddp, parameter)

        ddp._make_backward_post_hook = make_backward_post_hook
        DistributedDataParallel.__init__(
            ddp,
            config=ddp.config,
            ddp_config=ddp.ddp_config,
            module=ddp.module,
            disable_bucketing=chunk > 0,
            pg_collection=unwrap_model(ddp).pg_collection,
            full_param_layout=layout,
        )
        del ddp._make_backward_post_hook
        if ddp.use_forward_hook and not hooked:
            ddp.disable_forward_pre_hook(param_sync=False)

    def _renew(
        self,
        optimizer: ChainedOptimizer,
        scheduler: Any,
        states: dict[torch.nn.Parameter, ParameterState],
        taken: Taken,
    ) -> None:
        _, overrides = get_megatron_optimizer_config(self._args)
        new = get_megatron_optimizer(
            optimizer.config,
            self._chunks,
            config_overrides=overrides,
            use_gloo_process_groups=self._args.use_gloo_process_groups,
        )
        put_back(optimizer, new, states, taken.scalers, taken.group_step)
        scheduler.step(0)  # gives the groups their learning rate and weight decay


def _do_nothing(*unused: Any) -> None:
    """In the place of a hook that is there already."""


def _stage() -> int:
    return mpu.get_pipeline_model_parallel_rank()


def _coordinates(parameter: torch.Tensor | None) -> str:
    """Which part of a sharded tensor this rank holds: ranks of one stage with the same answer hold the same."""
    if parameter is not None and not getattr(parameter, "allreduce", True):
        return f"{mpu.get_expert_tensor_parallel_rank()},{mpu.get_expert_model_parallel_rank()}"
    return str(mpu.get_tensor_model_parallel_rank())


def _finish_gathering(ddp: DistributedDataParallel) -> bool:
    """Have all weights on all ranks of a distributed optimizer. True if they are gathered under forward passes."""
    hooked = bool(ddp.remove_forward_pre_hook_handles)
    if hooked:
        ddp.disable_forward_pre_hook(param_sync=True)
    return hooked


def _round(name: str) -> int:
    """The layer that a tensor belongs to, -1 for those of no layer."""
    number = name.partition(".")[0]
    return int(number) if number.isdecimal() else -1


def _part(tensor: tuple[int, torch.Tensor], transfer: Transfer) -> torch.Tensor:
    start, flat = tensor
    return flat[transfer.start - start : transfer.stop - start]


def _differ(
    held: dict[str, tuple[int, torch.Tensor]], targets: dict[str, tuple[int, torch.Tensor]], t: Transfer
) -> bool:
    """Whether a transfer of this rank to itself copies anything."""
    if t.source != dist.get_rank():
        return True
    return held[t.tensor][1].data_ptr() != targets[t.tensor][1].data_ptr()
