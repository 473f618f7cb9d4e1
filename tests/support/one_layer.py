"""One MoE layer on the pool's ranks, with routing, placement and weights that the test chooses.

The same layer can be run as Megatron-LM's own and balanced; the results of each rank are compared tensor by tensor.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

HIDDEN, FFN = 32, 48


@dataclass(frozen=True)
class Layer:
    """The layer, its input and its placement.

    experts: number of experts.
    chosen: for each rank int [token, k], experts of each token; -1: dropped.
    slot_expert: int [rank, slot], experts, -1 for an empty slot; None for Megatron's own layer.
    dispatcher: value of --moe-token-dispatcher-type.
    dtype: of weights and activations.
    shared: whether slots are shared.
    split_on_device: whether the split runs as on a GPU, where no operation of ours may wait for the device.
    row_by_row: whether products of the forward pass take one row at a time.
    gemm: products of balanced experts, as `balance_layer` takes it.
    options: of Megatron's TransformerConfig.
    """

    experts: int
    chosen: list[np.ndarray]
    slot_expert: list[list[int]] | None = None
    dispatcher: str = "alltoall"
    dtype: str = "float32"
    shared: bool = False
    split_on_device: bool = False
    row_by_row: bool = False
    gemm: str = "megatron"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Pass:
    """Results of a forward and a backward pass on one rank. Gradients of weights are by the expert's global number."""

    output: np.ndarray
    rows: list[int]  # tokens of each expert on this rank, home experts first
    of_hidden: np.ndarray
    of_probs: np.ndarray
    of_weights: dict[tuple[int, str], np.ndarray]


def _build(layer: Layer) -> Any:
    import torch
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron.balanced.experts import moe_layer
    from megatron.balanced.experts.exchange import balance_layer
    from tests.support.stand_ins import split_kernels

    options: dict[str, Any] = {
        "num_layers": 1,
        "num_attention_heads": 4,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": FFN,
        "moe_ffn_hidden_size": FFN,
        "num_moe_experts": layer.experts,
        "moe_router_topk": layer.chosen[0].shape[1],
        "moe_router_pre_softmax": True,
        "moe_token_dispatcher_type": layer.dispatcher,
        "expert_model_parallel_size": len(layer.chosen),
        "expert_tensor_parallel_size": 1,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "bias_activation_fusion": True,
        "params_dtype": getattr(torch, layer.dtype),
        "bf16": layer.dtype == "bfloat16",
    }
    options |= layer.options
    config = TransformerConfig(**options)
    if layer.split_on_device:
        moe_layer.is_cpu = lambda: False
        split_kernels.install()
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    built: Any = MoELayer(config, MoESubmodules(experts=partial(SequentialMLP, submodules=linears)), layer_number=1)
    if layer.slot_expert is not None:
        balance_layer(built, len(layer.slot_expert[0]), gemm=layer.gemm)
    for expert, module in zip(built.local_expert_indices, built.experts.local_experts, strict=True):
        random = torch.Generator().manual_seed(expert)
        for parameter in module.parameters():
            # Drawn in float64, so that runs in all precisions have the same weights.
            values = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
            parameter.data.copy_(values / parameter.shape[-1] ** 0.5)
    return built


def tiny_config() -> tuple[Any, Any]:
    """The config of an MoE layer and its process groups, on one rank."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    _start(1)
    config = TransformerConfig(
        num_layers=1, num_attention_heads=4, hidden_size=HIDDEN, num_moe_experts=2, add_bias_linear=False
    )
    return config, ProcessGroupCollection.use_mpu_process_groups()


def _check_known_counts() -> None:
    """Patch Megatron's dispatcher as training does, and compare the counts that it gets with those it would gather."""
    import torch
    from megatron.core.transformer.moe import token_dispatcher

    from megatron.balanced.experts.known_counts import with_known_counts

    gather = token_dispatcher.gather_from_sequence_parallel_region
    handed = with_known_counts(gather)

    def both(input_: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = handed(input_, *args, **kwargs)
        if not result.is_floating_point():
            assert torch.equal(result, gather(input_, *args, **kwargs))
        return result

    token_dispatcher.gather_from_sequence_parallel_region = both


def _forbid_waiting(built: Any) -> None:
    """Fail on operations of ours around the dispatcher for which the host would wait for a GPU."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    waits = {"local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "bincount"}

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.name().removeprefix("aten::").partition(".")[0].lstrip("_")
            assert name not in waits, func.name()
            if name in ("index", "index_put", "index_put_impl"):
                assert all(index is None or index.dtype is not torch.bool for index in args[1]), "counts a mask"
            if name == "repeat_interleave":
                assert kwargs and kwargs.get("output_size") is not None, "counts rows"
            return func(*args, **(kwargs or {}))

    def watch(method: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            with Watched():
                return method(*args, **kwargs)

        return watched

    built._share, built.postprocess = watch(built._share), watch(built.postprocess)


def _start(world_size: int) -> int:
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=world_size)
    _check_known_counts()
    model_parallel_cuda_manual_seed(1)
    return dist.get_rank()


def _fill_slots(built: Any, layer: Layer) -> Any:
    import torch.distributed as dist

    from balancing.experts.engine.slots import HomeExperts, ReplicaSlots
    from balancing.experts.placement import ReplicaPlacement

    slot_expert = np.array(layer.slot_expert).reshape(len(layer.chosen), -1)
    built.place(ReplicaPlacement(built.placement.home, slot_expert))
    homes = [[list(expert.parameters()) for expert in built.experts.local_experts]]
    group = dist.new_group(list(range(len(layer.chosen))))
    slots = ReplicaSlots(
        HomeExperts(homes, gradient=lambda parameter: parameter.grad),
        slot_expert.shape[1],
        group,
        shared=layer.shared,
    )
    built.experts.slots = slots
    return slots


@contextlib.contextmanager
def _row_by_row() -> Iterator[None]:
    """A context in which a product takes one row at a time. Otherwise what a row gets may depend on how many there are,
    and from which number on is up to the processor."""
    import torch

    matmul = torch.matmul

    def by_row(rows: Any, weight: Any) -> Any:
        return torch.cat([matmul(row.clone(), weight) for row in rows.split(1)])

    torch.matmul = by_row
    try:
        yield
    finally:
        torch.matmul = matmul


def pass_rank(layer: Layer) -> Pass:
    """The body of one rank."""
    import torch

    rank = _start(len(layer.chosen))
    dtype = getattr(torch, layer.dtype)
    torch.set_default_dtype(torch.float64 if dtype is torch.float64 else torch.float32)
    built = _build(layer)
    slots = None if layer.slot_expert is None else _fill_slots(built, layer)
    if layer.split_on_device:
        _forbid_waiting(built)

    chosen = torch.as_tensor(layer.chosen[rank])
    tokens = len(chosen)
    chance = np.random.default_rng(rank)
    hidden = torch.as_tensor(chance.normal(size=(tokens, 1, HIDDEN))).to(dtype).requires_grad_()
    probs = torch.as_tensor(chance.uniform(0.2, 1.0, (tokens, layer.experts))).to(dtype).requires_grad_()
    routing_map = torch.zeros(tokens, layer.experts + 1, dtype=torch.bool).scatter_(
        1, chosen % (layer.experts + 1), True
    )
    routing_map = routing_map[:, :-1]
    built.route = lambda hidden, padding_mask=None: (probs * routing_map, routing_map)

    rows: list[int] = []
    experts = built.experts.forward

    def counted(hidden: Any, tokens_per_expert: Any, probs: Any) -> Any:
        rows.extend(tokens_per_expert.tolist())
        return experts(hidden, tokens_per_expert, probs)

    built.experts.forward = counted
    if slots is not None:
        slots.begin_step([built.placement], 1)
    with _row_by_row() if layer.row_by_row else contextlib.nullcontext():
        output, bias = built(hidden)
    assert bias is None
    output.backward(torch.as_tensor(chance.normal(size=output.shape)).to(dtype))
    if slots is not None:
        slots.end_step()

    def plain(tensor: torch.Tensor | None) -> np.ndarray:
        assert tensor is not None
        return (tensor.float() if dtype is torch.bfloat16 else tensor).detach().numpy().copy()

    of_weights = {
        (expert, name): plain(parameter.grad)
        for expert, module in zip(built.local_expert_indices, built.experts.local_experts, strict=True)
        for name, parameter in module.named_parameters()
    }
    return Pass(plain(output), rows, plain(hidden.grad), plain(probs.grad), of_weights)


def run_layer(pool: Any, layer: Layer) -> list[Pass]:
    """Run a forward and a backward pass of the layer, with one rank for each entry of `layer.chosen`."""
    return pool.run(len(layer.chosen), pass_rank, layer)


def skewed(ranks: int, tokens: int, experts: int, topk: int, *, seed: int = 0) -> list[np.ndarray]:
    """For each rank int [token, k], distinct experts of each token, low numbers much more often than high ones."""
    weight = 1.0 / np.arange(1, experts + 1)
    order = np.random.default_rng(seed).gumbel(size=(ranks, tokens, experts)) + np.log(weight)
    return list(np.argsort(-order, axis=2)[:, :, :topk])


def assert_alike(passes: list[Pass], reference: list[Pass], *, tolerance: float | None) -> None:
    """Assert equal outputs and gradients, bit for bit, or within `tolerance` times the norm of each tensor."""

    def check(value: np.ndarray, expected: np.ndarray, what: str) -> None:
        assert value.shape == expected.shape
        if tolerance is None:
            assert np.array_equal(value, expected), f"{what} differs by {np.abs(value - expected).max()}"
        else:
            difference, norm = np.linalg.norm(value - expected), np.linalg.norm(expected)
            assert difference <= tolerance * norm, f"{what} differs by {difference} from {norm}"

    for rank, (ours, theirs) in enumerate(zip(passes, reference, strict=True)):
        check(ours.output, theirs.output, f"output of rank {rank}")
        check(ours.of_hidden, theirs.of_hidden, f"gradient of the input of rank {rank}")
        check(ours.of_probs, theirs.of_probs, f"gradient of the probabilities of rank {rank}")
        assert ours.of_weights.keys() == theirs.of_weights.keys()
        for (expert, name), value in theirs.of_weights.items():
            check(ours.of_weights[expert, name], value, f"gradient of expert {expert}'s {name}")
