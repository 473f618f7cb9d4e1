"""Where each of Megatron-LM's optimizers keeps the state of a parameter, and how it is taken out and put back.

The FP32 optimizer keeps moments for the parameter itself, the mixed-precision one for a main parameter in float32, and
the distributed one for the piece of either that this data-parallel rank got when flat buckets were cut. Taken out, all
three look alike: flat tensors that cover elements start to stop of a parameter. A parameter that does not require a
gradient any more is in no new optimizer, and its state is dropped.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.optimizer.param_layout import FullParamLayout

__all__ = [
    "ParameterState",
    "Taken",
    "bucket_layout",
    "future_ranges",
    "park",
    "put_back",
    "state_bytes",
    "states_of",
    "take",
]

MAIN = "main"  # the main parameter; all other kinds of state are named as torch's optimizer names them


@dataclass
class ParameterState:
    """What this rank's optimizer knows of one parameter.

    start, stop: the elements of the flat parameter that it covers. tensors: kind -> flat tensor of these elements.
    scalars: kind -> a single number, such as the count of steps, as torch's optimizer keeps it.
    """

    start: int
    stop: int
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)


class _Share(NamedTuple):
    """The elements start to stop of `parameter`, for which torch's optimizer `inner` knows `holder`."""

    parameter: torch.nn.Parameter
    holder: torch.Tensor
    start: int
    stop: int
    inner: torch.optim.Optimizer


def _shares(optimizer: ChainedOptimizer) -> Iterator[_Share]:
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        for parameter, holder in _holders(part):
            start, stop = 0, parameter.numel()
            if isinstance(part, DistributedOptimizer):
                covered = part._get_model_param_range_map(parameter)["param"]
                start, stop = covered.start, covered.end
            yield _Share(parameter, holder, start, stop, part.optimizer)


def _holders(part: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Each parameter of one optimizer of the chain, with what torch's optimizer knows in its place."""
    if isinstance(part, DistributedOptimizer):
        pairs = [
            (part.model_float16_groups, part.shard_fp32_from_float16_groups),
            (part.model_fp32_groups, part.shard_fp32_groups),
        ]
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        pairs = [
            (part.float16_groups, part.fp32_from_float16_groups),
            (part.fp32_from_fp32_groups, part.fp32_from_fp32_groups),
        ]
    else:
        groups = [group["params"] for group in part.optimizer.param_groups]
        pairs = [(groups, groups)]
    for parameters, holders in pairs:
        for own, held in zip(parameters, holders, strict=True):
            yield from zip(own, held, strict=True)


def _has_main(parameter: torch.Tensor) -> bool:
    return parameter.dtype in (torch.float16, torch.bfloat16)


class Taken(NamedTuple):
    """All that an optimizer knew. groups: the step that some optimizers count once a group, None for others."""

    states: dict[torch.nn.Parameter, ParameterState]
    scalers: list[Any]
    group_step: int | None


def state_bytes(ddp: DistributedDataParallel, dtype: torch.dtype, *, of_expert: bool = False) -> float:
    """Bytes that Adam keeps on this rank for an element of a parameter of `ddp`: a main parameter if weights are of a
    smaller type than float32, and two moments, shared among data-parallel ranks by a distributed optimizer."""
    whole = 2 * max(dtype.itemsize, 4) + (4 if dtype.itemsize < 4 else 0)
    if not ddp.ddp_config.use_distributed_optimizer:
        return whole
    return whole / (ddp.intra_expt_dp_group if of_expert else ddp.intra_dp_cp_group).size()


def states_of(optimizer: ChainedOptimizer) -> dict[torch.nn.Parameter, ParameterState]:
    """What `optimizer` knows of each parameter that this rank has a part in. The tensors are the optimizer's own."""
    states = {}
    for share in _shares(optimizer):
        state = ParameterState(share.start, share.stop)
        if _has_main(share.parameter):
            state.tensors[MAIN] = share.holder.detach().view(-1)
        for kind, value in share.inner.state.get(share.holder, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == share.holder.shape:
                state.tensors[kind] = value.view(-1)
            else:
                state.scalars[kind] = value
        states[share.parameter] = state
    return states


def take(optimizer: ChainedOptimizer) -> Taken:
    """Take the state out of `optimizer`, which is empty afterwards and lets go of all memory."""
    steps = [group["step"] for group in optimizer.param_groups if "step" in group]
    scalers = [getattr(part, "grad_scaler", None) for part in optimizer.chained_optimizers]
    states = states_of(optimizer)
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer:
            part.optimizer.state.clear()
    optimizer.chained_optimizers = []
    for parameter in states:
        parameter.grad = None
        for name in ("main_param", "main_grad"):
            if hasattr(parameter, name):
                delattr(parameter, name)
    return Taken(states, scalers, max(steps, default=None))


def park(states: Mapping[torch.nn.Parameter, ParameterState]) -> None:
    """Have main parameters wait in the gradients' memory, which is of no use between two steps.

    A new optimizer makes main parameters of its own before they can be put back, which would be as many again.
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
    group_step: int | None,
) -> None:
    """Make `optimizer`, which others hold on to, what `new` is, with the given state in it. Gradients are undefined."""
    for share in _shares(new):
        state = states[share.parameter]
        assert (state.start, state.stop) == (share.start, share.stop), "a bucket was cut in another way than planned"
        kinds = dict(state.tensors)
        if _has_main(share.parameter):
            share.holder.data.copy_(kinds.pop(MAIN).view(share.holder.shape))
        if kinds or state.scalars:
            share.inner.state[share.holder] = {
                **{kind: _own(value) for kind, value in state.scalars.items()},
                **{kind: tensor.view(share.holder.shape) for kind, tensor in kinds.items()},
            }
    for number, part in enumerate(new.chained_optimizers):
        scaler = scalers[number] if number < len(scalers) else copy.deepcopy(scalers[0])
        if scaler is not None:
            part.grad_scaler = scaler
    if group_step is not None:
        for group in new.param_groups:
            group["step"] = group_step
    optimizer.__dict__.update(new.__dict__)


def _own(value: Any) -> Any:
    """torch's optimizers count up in the very tensor that they are given."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def bucket_layout(ddp: DistributedDataParallel, chunk: int) -> FullParamLayout | None:
    """How the flat buffers of `ddp`, the `chunk`-th model chunk of the rank, will be laid out; None for the default.

    As Megatron-LM lays them out when it wraps a new model.
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
    """Parameter -> the elements of it, start and stop, whose state this rank will hold. Those it holds none of lack."""
    if layout is None:
        return {p: (0, p.numel()) for p in ddp.module.parameters() if p.requires_grad}
    ranges = {}
    for key, buffer in layout.layouts.items():
        group = ddp.intra_expt_dp_group if key.is_expert_parallel else ddp.intra_dp_cp_group
        for parameter, (begin, end, bucket) in buffer.param_index_map.items():
            bucket_begin, bucket_end = buffer.bucket_indices[bucket]
            size = (bucket_end - bucket_begin) // group.size()
            own = bucket_begin + group.rank() * size
            start, stop = max(begin, own), min(end, own + size)
            if start < stop:
                ranges[parameter] = (start - begin, stop - begin)
    return ranges
