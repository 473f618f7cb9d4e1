"""Whether the experts of a loop's model can have replicas.

A replica runs the modules of a home expert on other parameters. So the experts of a layer must have the same structure
on all ranks, and compute the same from the same parameters, whatever a loop has done to them: wrapped their linear
layers in adapters, added parameters, frozen some. A parameter must belong to one expert, or be that of an adapter for
all experts of a layer, which Megatron-Bridge keeps alike on all ranks.

Experts with modules that this file does not know are tried: with made-up parameters, a replica must compute what its
home computes. What would not travel is refused when the balancer is made, by the module's name.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron.balanced.experts.parameters import (
    BRIDGE,
    home_parameters,
    is_grouped_linear,
    is_packed,
    named_parameters,
    owner,
)
from megatron.balanced.experts.twins import with_further_experts
from megatron.balanced.shared.process_groups import gather_objects

__all__ = ["why_no_replicas"]

# Hooks of Megatron-Bridge that add up the gradients of an adapter over all ranks of the expert-parallel group.
_SUMS_OVER_RANKS = (
    "ParallelLinearAdapter._allreduce_shared_expert_grad",
    "_make_cross_ep_replicated.<locals>._all_reduce_grad",
)
_NO_CHANGE = ("megatron.core.", "megatron.balanced.", "transformer_engine.")  # whose hooks on modules change no tensor
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_TOKENS = 4  # of a trial


class _Description(NamedTuple):
    """What the experts of a layer must have alike on all ranks.

    name: name of the experts' module in the model.
    parameters: (name, shape, type) of those of an expert.
    trained: whether they train; None if this may differ from expert to expert.
    outputs: that made-up parameters gave, if the experts were tried.
    """

    name: str
    parameters: list[tuple[str, tuple[int, ...], str]]
    trained: list[bool] | None
    outputs: list[float]


def why_no_replicas(layers: Sequence[tuple[str, MoELayer]], hosts: dist.ProcessGroup) -> str | None:
    """Why the experts of MoE layers cannot have replicas; None if they can. All ranks of the expert-parallel group call
    it together and get the same answer.

    layers: (name in the model, layer), the same layers on all ranks.
    hosts: the ranks of the group on gloo.
    """
    here: list[Any] = []
    for name, layer in layers:
        try:
            here.append(_describe(layer, name))
        except ValueError as error:
            here.append(str(error))
    by_rank, ranks = gather_objects(here, hosts), dist.get_process_group_ranks(hosts)
    for text in (each for rank in by_rank for each in rank if isinstance(each, str)):
        return text
    for number, first in enumerate(by_rank[0]):
        for rank, other in zip(ranks, (each[number] for each in by_rank), strict=True):
            which = f"{first.name} of ranks {ranks[0]} and {rank}"
            if first.parameters != other.parameters:
                return _differ(f"experts in {which}", first.parameters, other.parameters)
            if first.trained != other.trained:
                return _mixed(which)
            if not _are_close(first.outputs, other.outputs):
                return _computes_otherwise(which)
    return None


def _describe(layer: Any, name: str) -> _Description:
    """Raises ValueError for experts that cannot have replicas. name: of the layer in the model."""
    experts, name = layer.experts, f"{name}.experts"
    grouped = type(experts) is TEGroupedMLP
    if not grouped and type(experts) is not SequentialMLP:
        raise ValueError(
            f"{name} of class {type(experts).__name__} cannot have replicas; use SequentialMLP with linear layers of "
            "megatron.core, or grouped GEMM with Transformer Engine (moe_grouped_gemm)"
        )
    for path, module in experts.named_modules():
        if path:
            _check_module(f"{name}.{path}", module, grouped)
    for module in (layer, experts):
        if "forward" in vars(module):
            raise ValueError(
                f"the forward of a {type(module).__name__}, {name}, was replaced, so that it would not use replicas; "
                "wrap the layer's inputs or outputs by hooks"
            )
    homes = home_parameters(experts)
    if any(p.requires_grad and not hasattr(owner(p), "main_grad") for expert in homes for p in expert):
        raise ValueError(
            f"a parameter of {name} trains and is in no gradient buffer; add it before DistributedDataParallel"
        )
    described = [
        [(path, tuple(p.shape), str(p.dtype)) for path, p in named_parameters(experts, number)]
        for number in range(len(homes))
    ]
    for parameters in described:
        if parameters != described[0]:
            raise ValueError(_differ(f"experts of {name}", described[0], parameters))
    trained = [[p.requires_grad for p in expert] for expert in homes]
    if grouped and any(expert != trained[0] for expert in trained):
        raise ValueError(_mixed(name))
    return _Description(name, described[0], trained[0] if grouped else None, _outputs(experts, name))


def _check_module(name: str, module: torch.nn.Module, grouped: bool) -> None:
    """Raise ValueError if `module`, a part of experts, has something that replicas would not have."""
    if not grouped and hasattr(module, "fuse_wgrad_accumulation"):
        raise ValueError(  # it adds gradients to buffers that replicas do not have
            f"{name} of class {type(module).__name__} cannot have replicas: it is a linear layer of Transformer Engine "
            "outside of grouped experts; use grouped GEMM (moe_grouped_gemm), or linear layers of megatron.core"
        )
    for hook in (hook for kind in _HOOKS for hook in getattr(module, kind, {}).values()):
        if not (getattr(hook, "__module__", None) or "").startswith(_NO_CHANGE):
            raise ValueError(
                f"{name} has a hook, {_named(hook)}, which would miss tokens that replicas compute on other ranks; "
                "remove it, or put it on the MoE layer"
            )
    for buffer in (buffer for buffer, value in module._buffers.items() if value is not None):
        raise ValueError(f"{name} has a buffer, {buffer}, which replicas would not get; make it a frozen parameter")
    belongs = not grouped or is_grouped_linear(module) or is_packed(module)
    for own, parameter in ((own, p) for own, p in module._parameters.items() if p is not None):
        hooks = [
            *(parameter._backward_hooks or {}).values(),
            *(getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values(),
        ]
        sums = [hook for hook in hooks if _sums_over_ranks(hook)]
        if others := [hook for hook in hooks if hook not in sums]:
            raise ValueError(
                f"{name}.{own} has a gradient hook, {_named(others[0])}, which would miss those of replicas; remove "
                "it, and change gradients before the optimizer's step"
            )
        if belongs == bool(sums):
            raise ValueError(
                f"{name}.{own} is not known to belong to one expert, or to be the same on all ranks; use the adapters "
                "of Megatron-Bridge, or adapt other layers than experts"
            )


def _sums_over_ranks(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith(BRIDGE) and hook.__qualname__ in _SUMS_OVER_RANKS


def _outputs(experts: Any, name: str) -> list[float]:
    """What each home expert computes from made-up tokens and parameters, if it has modules that are not known.

    Raises ValueError if a replica would compute something else: a module computes with more than its own parameters,
    such as one whose `forward` was replaced by a function that holds the module.
    """
    known = (MLP, ColumnParallelLinear, RowParallelLinear, torch.nn.ModuleList)
    within = [module for module in experts.modules() if module is not experts]
    if all((type(module) in known or is_grouped_linear(module)) and "forward" not in vars(module) for module in within):
        return []
    config = experts.config
    if config.fp8 or config.fp4:  # a trial would change what scales of quantization are made from
        for module in within:
            kind = type(module)
            if "forward" in vars(module) or not kind.__module__.startswith((*_NO_CHANGE, BRIDGE, "torch.nn.")):
                raise ValueError(
                    f"{name} has a module of class {kind.__name__}, which is not known to work with replicas in 8 bits "
                    "or less; use the adapters of Megatron-Bridge, or train in bf16"
                )
        return []
    random = torch.Generator().manual_seed(1)
    homes = home_parameters(experts)
    device, dtype = homes[0][0].device, config.params_dtype

    def draw(shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return (torch.randn(shape, generator=random) / 8).to(device, dtype)

    made = [draw(p.shape, p.dtype) for p in homes[0]]
    hidden = draw((_TOKENS, config.moe_latent_size or config.hidden_size), dtype)
    probs = torch.ones(_TOKENS, dtype=dtype, device=device)

    def run(module: Any, number: int) -> torch.Tensor:
        counts = torch.zeros(module.num_local_experts, dtype=torch.int64)
        counts[number] = _TOKENS
        torch.manual_seed(1)  # for dropout
        try:
            output: torch.Tensor = module.forward(hidden, counts, probs)[0]
        except Exception as error:
            raise ValueError(
                f"experts of {name} fail where one has all tokens and the others none, as may be with replicas "
                f"({error}); use adapters that can do without tokens, such as LoRA"
            ) from error
        return output

    devices = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices), _unchanged(within):
        replica = run(with_further_experts(experts, [made]), len(homes))
        for number, expert in enumerate(homes):
            with _set(expert, made):
                if not _are_close(run(experts, number), replica):
                    raise ValueError(_computes_otherwise(name))
    return replica.double().flatten().tolist()


@contextlib.contextmanager
def _set(parameters: list[Any], values: list[torch.Tensor]) -> Iterator[None]:
    """A context in which the parameters of an expert have other values, in memory of their own."""
    before = [(owner(p), owner(p).data) for p in parameters]
    try:
        for p, value in zip(parameters, values, strict=True):
            if hasattr(p, "row"):
                value = torch.cat(
                    [*p.row.parameter.data[: p.row.number], value, *p.row.parameter.data[p.row.number + 1 :]]
                )
                value = value.view_as(p.row.parameter)
            owner(p).data = value
        yield
    finally:
        for parameter, data in before:
            parameter.data = data


@contextlib.contextmanager
def _unchanged(modules: list[torch.nn.Module]) -> Iterator[None]:
    """A context that restores the attributes of modules, such as whether a micro-batch is the first."""
    before = [dict(vars(module)) for module in modules]
    try:
        yield
    finally:
        for module, attributes in zip(modules, before, strict=True):
            vars(module).clear()
            vars(module).update(attributes)


def _are_close(one: Any, other: Any) -> bool:
    """Whether two outputs, or lists of numbers, are the same but for rounding."""
    one, other = torch.as_tensor(one).double(), torch.as_tensor(other).double()
    return one.shape == other.shape and bool(
        torch.allclose(one, other, rtol=1e-2, atol=1e-2 * float(one.abs().max() if one.numel() else 0))
    )


def _named(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__name__)


def _differ(which: str, one: list[Any], other: list[Any]) -> str:
    names = sorted({parameter[0] for parameter in {*one} ^ {*other}})
    return (
        f"{which} differ in {', '.join(names[:3])}; replicas need experts with the same parameters, so give all the "
        "same adapters, or none"
    )


def _mixed(which: str) -> str:
    return (
        f"some experts of {which} are frozen and others train, which grouped linear layers do not compute; freeze all "
        "or none of them"
    )


def _computes_otherwise(which: str) -> str:
    return (
        f"experts of {which} compute with more than their parameters, which a replica would not have (a forward that "
        "was replaced by a function, or other attributes); use a class of module that reads its own parameters"
    )
