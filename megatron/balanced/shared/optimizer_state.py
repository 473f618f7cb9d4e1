"""Find, take out and put back the state that Megatron-LM's optimizers keep for a parameter.

The FP32 optimizer keeps moments for the parameter itself. The mixed-precision optimizer keeps them for a main parameter
in float32. The distributed optimizer keeps them for this data-parallel rank's shard of either. This module represents
all three as flat tensors that cover elements start to stop of a parameter. A new optimizer leaves out parameters that
require no gradient, so their state is dropped.

With --use-precision-aware-optimizer, Transformer Engine's FusedAdam may keep moments in bfloat16. It may store a main
parameter in float32 as the 16 bits that the bfloat16 weight lacks. State moves as it is stored. State with a scale for
each tensor (float16 or 8 bits) is refused, and so is state on the host.

Muon keeps one momentum for each matrix. Adam updates the other parameters. The layer-wise distributed optimizer gives
each data-parallel rank whole parameters: it assigns the parameters of a stage round-robin in the order of their size.
So a move may change the owner of parameters whose layers stay. Megatron-LM assigns them when it builds the new
optimizer; until then every rank gets the whole state. The buffers of this optimizer are not sharded, since
`pretrain_gpt.py` of 0.19.2 does not use the layout for that.
"""

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.fp8_utils import is_float8tensor, is_mxfp8tensor, modify_underlying_storage
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, param_group_identifier_keys
from megatron.core.optimizer.param_layout import FullParamLayout
from torch.overrides import TorchFunctionMode

__all__ = [
    "ParameterState",
    "Part",
    "Settings",
    "Taken",
    "bucket_layout",
    "future_ranges",
    "parts",
    "place_weights",
    "placed_weights",
    "put_back",
    "stash_in_gradients",
    "state_bytes",
    "states_of",
    "take",
]

# Kind of optimizer and Megatron-LM's identity of a parameter group -> its entries that are plain values, such as betas.
# Transformer Engine's and Apex's Adam count the steps of a group there.
Settings = dict[tuple, dict[str, Any]]
MAIN = "main"  # kind of the main parameter; other kinds have the names that torch's optimizer uses


@dataclass
class ParameterState:
    """The state that this rank's optimizer keeps for one parameter.

    start, stop: the elements of the flat parameter that it covers.
    tensors: kind -> flat tensor [stop - start], as it is stored.
    scalars: kind -> one number, such as the number of steps, as torch's optimizer keeps it.
    """

    start: int
    stop: int
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)


class Part(NamedTuple):
    """The part of a parameter that this rank's optimizer steps.

    parameter: a parameter of the model.
    main: the tensor that torch's `optimizer` updates instead of the parameter. It is a view of the parameter if
        Transformer Engine keeps main parameters as state.
    start, stop: the elements of the flat parameter that `main` covers.
    """

    parameter: torch.nn.Parameter
    main: torch.Tensor
    start: int
    stop: int
    optimizer: torch.optim.Optimizer

    @property
    def state(self) -> dict[str, Any]:
        return self.optimizer.state[self.main]

    @property
    def has_main(self) -> bool:
        """Whether `main` is a main parameter with memory of its own."""
        return self.main.dtype != self.parameter.dtype


def parts(optimizer: ChainedOptimizer) -> Iterator[Part]:
    """The parts of all parameters that `optimizer` steps on this rank."""
    for member in _chained(optimizer):
        for parameter, main in _main_parameters(member):
            start, stop = 0, parameter.numel()
            if isinstance(member, DistributedOptimizer):
                covered = member._get_model_param_range_map(parameter)["param"]
                start, stop = covered.start, covered.end
            yield Part(parameter, main, start, stop, member.optimizer)


def _chained(optimizer: ChainedOptimizer) -> Iterator[Any]:
    """The optimizers of a chain and of nested chains, except those without parameters."""
    for member in optimizer.chained_optimizers:
        if isinstance(member, ChainedOptimizer):
            yield from _chained(member)
        elif not member.is_stub_optimizer:
            yield member


def _main_parameters(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Each parameter of one optimizer of the chain, with the tensor that torch's optimizer steps in its place."""
    if isinstance(optimizer, DistributedOptimizer):
        in_state = optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        main_groups = optimizer.shard_float16_groups if in_state else optimizer.shard_fp32_from_float16_groups
        pairs = [
            (optimizer.model_float16_groups, main_groups),
            (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        ]
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        pairs = [
            (optimizer.float16_groups, optimizer.fp32_from_float16_groups),
            (optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups),
        ]
    else:
        stepped = [param_group["params"] for param_group in optimizer.optimizer.param_groups]
        pairs = [(stepped, stepped)]
    for param_groups, main_groups in pairs:
        for parameters, mains in zip(param_groups, main_groups, strict=True):
            yield from zip(parameters, mains, strict=True)


class Taken(NamedTuple):
    """The state taken out of an optimizer.

    states: parameter -> its state on this rank.
    scalers: the gradient scaler of each chained optimizer, or None.
    settings: of each parameter group.
    """

    states: dict[torch.nn.Parameter, ParameterState]
    scalers: list[Any]
    settings: Settings


def state_bytes(
    ddp: DistributedDataParallel,
    dtype: torch.dtype,
    *,
    is_expert: bool = False,
    is_matrix: bool = False,
    config: OptimizerConfig | None = None,
) -> float:
    """Bytes that the optimizer keeps on this rank's device for each element of a parameter of `ddp`.

    Adam keeps two moments. Muon keeps one for each matrix except the embedding and the head. If weights have fewer bits
    than float32, there is also a main parameter. A distributed optimizer shards all of these over data-parallel ranks.

    config: the config of the optimizer; it may set other types than float32.
    """
    moments = 1 if is_matrix and config is not None and config.optimizer == "muon" else 2
    whole = moments * max(dtype.itemsize, 4) + (4 if dtype.itemsize < 4 else 0)
    if config is not None and config.use_precision_aware_optimizer:
        main = config.main_params_dtype.itemsize
        if config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 and config.store_param_remainders and main == 4:
            main -= dtype.itemsize if dtype == torch.bfloat16 else 0
        whole = config.exp_avg_dtype.itemsize + config.exp_avg_sq_dtype.itemsize + main
    if config is not None and config.optimizer_cpu_offload:
        whole *= 1 - config.optimizer_offload_fraction
    layer_wise = config is not None and config.use_layer_wise_distributed_optimizer
    if not (ddp.ddp_config.use_distributed_optimizer or layer_wise):
        return whole
    return whole / (ddp.intra_expt_dp_group if is_expert else ddp.intra_dp_cp_group).size()


def states_of(optimizer: ChainedOptimizer) -> dict[torch.nn.Parameter, ParameterState]:
    """The state of each parameter that this rank steps a part of. The tensors are the optimizer's own, not copies."""
    states = {}
    for part in parts(optimizer):
        state = ParameterState(part.start, part.stop)
        if part.has_main:
            state.tensors[MAIN] = part.main.detach().view(-1)
        for kind, value in part.optimizer.state.get(part.main, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == part.main.shape:
                state.tensors[kind] = value.view(-1)
            else:
                state.scalars[kind] = value.cpu() if isinstance(value, torch.Tensor) else value
        states[part.parameter] = state
    return states


def take(optimizer: ChainedOptimizer) -> Taken:
    """Take the state out of `optimizer`, which is empty afterwards and holds no memory."""
    scalers = [getattr(part, "grad_scaler", None) for part in optimizer.chained_optimizers]
    states = states_of(optimizer)
    settings = {
        key: {name: value for name, value in group.items() if isinstance(value, int | float | str | tuple | None)}
        for key, group in _groups(optimizer)
    }
    for member in _chained(optimizer):
        member.optimizer.state.clear()
    optimizer.chained_optimizers = []
    for parameter in states:
        parameter.grad = None
        for name in ("main_param", "main_grad"):
            if hasattr(parameter, name):
                delattr(parameter, name)
    return Taken(states, scalers, settings)


def _groups(optimizer: ChainedOptimizer) -> Iterator[tuple[tuple, dict[str, Any]]]:
    """The parameter groups of all optimizers of a chain, each with its key in `Settings`."""
    for inner in [member.optimizer for member in _chained(optimizer)]:
        for group in inner.param_groups:
            yield (type(inner).__name__, *(group.get(name) for name in param_group_identifier_keys)), group


def stash_in_gradients(states: Mapping[torch.nn.Parameter, ParameterState]) -> None:
    """Store main parameters in the memory of gradients, which is unused between two steps.

    The new optimizer allocates its main parameters before the old ones can be copied to them. Without the stash, both
    would be in memory at once.
    """
    for parameter, state in states.items():
        main, gradient = state.tensors.get(MAIN), getattr(parameter, "main_grad", None)
        if main is not None and gradient is not None and gradient.dtype == main.dtype:
            place = gradient.view(-1)[state.start : state.stop]
            state.tensors[MAIN] = place.copy_(main)


def put_back(
    optimizer: ChainedOptimizer,
    new: ChainedOptimizer,
    states: Mapping[torch.nn.Parameter, ParameterState],
    scalers: list[Any],
    settings: Sequence[Settings],
) -> None:
    """Fill `new` with the given state, then give its contents to `optimizer`, to which other objects refer.

    optimizer: emptied by `take`.
    new: built for the current parameters.
    states: parameter -> state of the elements that `new` steps on this rank.
    scalers: as `take` returned them.
    settings: as `take` returned them on all ranks, this one's first. Others have those of groups that this one lacked.

    Gradients are undefined afterwards.
    """
    for part in parts(new):
        state = states[part.parameter]
        assert (state.start, state.stop) == (part.start, part.stop), "a bucket was sharded in another way than planned"
        kinds = dict(state.tensors)
        if part.has_main:
            part.main.data.copy_(kinds.pop(MAIN).view(part.main.shape))
        if kinds or state.scalars:
            # Copies of scalars: torch's optimizers increment the tensor that they are given.
            part.optimizer.state[part.main] = copy.deepcopy(state.scalars)
        for kind, tensor in kinds.items():
            _store(part, kind, tensor.view(part.main.shape))
    for number, part in enumerate(new.chained_optimizers):
        scaler = scalers[number] if number < len(scalers) else copy.deepcopy(scalers[0])
        if scaler is not None:
            part.grad_scaler = scaler
    # An optimizer does not count steps in a group without parameters, so the largest number counts.
    steps: dict[str, int] = {}
    for (kind, *_), entries in [pair for of_rank in settings for pair in of_rank.items()]:
        if "step" in entries:
            steps[kind] = max(steps.get(kind, 0), entries["step"])
    for key, group in _groups(new):
        group.update(next((of_rank[key] for of_rank in settings if key in of_rank), {}))
        if key[0] in steps:
            group["step"] = steps[key[0]]
    optimizer.__dict__.update(new.__dict__)


def _store(part: Part, kind: str, tensor: torch.Tensor) -> None:
    """Make `tensor` state of `part`, as its optimizer stores it."""
    part.state[kind] = tensor
    scales = getattr(part.optimizer, "_scales", None)
    if scales is not None and tensor.dtype == torch.bfloat16:  # FusedAdam asks for a scale, and does not use it
        scales.setdefault(part.main, {})[kind] = torch.ones(1, dtype=torch.float32, device=tensor.device)


def bucket_layout(ddp: DistributedDataParallel, chunk: int) -> FullParamLayout | None:
    """The layout that Megatron-LM will give the flat buffers of `ddp` when it wraps the model anew.

    chunk: the number of this model chunk on the rank.

    Returns None for the default layout.
    """
    if not ddp.ddp_config.use_distributed_optimizer:
        return None
    unbroken = chunk > 0 or ddp.pp_group.rank() > 0
    return DistributedOptimizer.compute_full_param_layout(
        [parameter for parameter in ddp.module.parameters() if parameter.requires_grad],
        None if unbroken else ddp.ddp_config.bucket_size,
        ddp.intra_dp_cp_group.size(),
        ddp.ddp_config,
        expert_data_parallel_world_size=ddp.intra_expt_dp_group.size(),
    )


def future_ranges(
    ddp: DistributedDataParallel, layout: FullParamLayout | None
) -> dict[torch.nn.Parameter, tuple[int, int]]:
    """Parameter -> (start, stop), the elements whose state this rank will hold. Parameters without any are absent."""
    if layout is None:
        return {p: (0, p.numel()) for p in ddp.module.parameters() if p.requires_grad}
    ranges = {}
    for key, buffer in layout.layouts.items():
        sharing = ddp.intra_expt_dp_group if key.is_expert_parallel else ddp.intra_dp_cp_group
        for parameter, (begin, end, bucket) in buffer.param_index_map.items():
            bucket_begin, bucket_end = buffer.bucket_indices[bucket]
            size = (bucket_end - bucket_begin) // sharing.size()
            first = bucket_begin + sharing.rank() * size
            start, stop = max(begin, first), min(end, first + size)
            if start < stop:
                ranges[parameter] = (start - begin, stop - begin)
    return ranges


def place_weights(layout: FullParamLayout | None, arrived: Iterable[torch.nn.Module]) -> list[torch.Tensor | None]:
    """Allocate the flat weight buffers of `layout` and move parameters into them. Returns the buffers in the order of
    `layout`; None for weights in MXFP8, which are gathered through the gradient buffer.

    arrived: modules whose weights have no content yet.

    Megatron-LM allocates weight and gradient buffers together. The weights would then be in memory twice, next to the
    gradients. Here weights move before gradient buffers exist; `placed_weights` then passes the buffers to Megatron-LM.
    """
    empty = {parameter for module in arrived for parameter in module.parameters()}
    buffers: list[torch.Tensor | None] = []
    for key, buffer in {} if layout is None else layout.layouts.items():
        if any(map(is_mxfp8tensor, buffer.param_index_map)):
            buffers.append(None)
            continue
        flat = torch.zeros(buffer.bucket_indices[-1][1], dtype=key.param_dtype, device=torch.cuda.current_device())
        for parameter, (begin, end, _) in buffer.param_index_map.items():
            place = flat[begin:end].view(parameter.shape)
            if is_float8tensor(parameter):
                modify_underlying_storage(parameter, place)
                continue
            if parameter not in empty:
                place.copy_(parameter.data)
            parameter.data = place
        buffers.append(flat)
    return buffers


@contextlib.contextmanager
def placed_weights(buffers: list[torch.Tensor | None]) -> Iterator[None]:
    """A context in which Megatron-LM uses the `buffers` of `place_weights` instead of allocating weight buffers. When
    it copies the weights there, it copies each tensor to itself."""
    # For each buffer it allocates weights and then gradients, or one memory for both.
    allocations = [memory for weights in buffers for memory in ((None,) if weights is None else (weights, None))]
    with _Allocations(allocations):
        yield
    assert not allocations, "Megatron-LM made other buffers than planned"


class _Allocations(TorchFunctionMode):
    """Megatron-LM's buffers take their memory from a list. For an entry of None they allocate it.

    The constructor of a buffer takes no memory and does not separate weights from gradients, so the only place between
    the two is its call of `torch.zeros`.
    """

    def __init__(self, allocations: list[torch.Tensor | None]) -> None:
        super().__init__()
        self._allocations = allocations

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and "requires_grad" in kwargs and self._allocations:
            memory = self._allocations.pop(0)
            if memory is not None:
                assert (args, kwargs["dtype"]) == ((memory.numel(),), memory.dtype), "a buffer is not as planned"
                return memory
        return func(*args, **kwargs)
