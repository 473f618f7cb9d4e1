"""Layers that a loop has changed arrive on another stage as they were: no number differs from a run without moves, no
parameter is lost, and what cannot travel is refused before the first step."""

import functools
import gc
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.sampled import sampled
from tests.support.two_stages import LAYOUT, MOVES, STEPS, Case, Ended, balancer_of, build, train
from tests.support.weights import assert_same_weights


class LowRank(torch.nn.Module):
    """An adapter around a linear layer, as PEFT's."""

    def __init__(self, base: Any, rank: int = 2) -> None:
        super().__init__()
        self.base, self.settings = base, {"scale": 0.5}
        rows, columns = base.weight.shape
        self.down = torch.nn.Linear(columns, rank, bias=False)
        self.up = torch.nn.Linear(rank, rows, bias=False)

    def forward(self, hidden: Any) -> Any:
        output, bias = self.base(hidden)
        return output + self.settings["scale"] * self.up(self.down(hidden)), bias


class Grow(torch.nn.Module):
    """A parametrization with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.by = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, weight: Any) -> Any:
        return self.by * weight


class Scaled(torch.nn.Module):
    """To be the class of a finished layer."""


class Bend:
    """A hook that is an object of its own layer."""

    def __init__(self, by: float) -> None:
        self.by, self.calls = by, 0

    def __call__(self, module: Any, args: Any, output: Any) -> Any:
        self.calls += 1
        return (output[0] * self.by * (1 + self.calls / 100), *output[1:])


class Shared:
    """What a loop keeps in one place."""


def multiply(by: float, gradient: Any) -> Any:
    return gradient * by


def shift(module: Any, args: Any) -> Any:
    return (args[0] + 0.01, *args[1:])


def add(module: Any, args: Any, output: Any) -> Any:
    return (output[0] + 0.02, *output[1:])


def scaled(self: Any, hidden: Any) -> Any:
    output, bias = type(self).forward(self, hidden)
    return output * self.scale, bias


def adapter(layer: Any) -> None:
    layer.self_attention.linear_qkv = LowRank(layer.self_attention.linear_qkv)


def adapter_alone(layer: Any) -> None:
    layer.requires_grad_(False)
    adapter(layer)
    layer.self_attention.linear_qkv.base.requires_grad_(False)


def parametrization(layer: Any) -> None:
    from torch.nn.utils import parametrize

    parametrize.register_parametrization(layer.self_attention.linear_proj, "weight", Grow())
    torch.nn.utils.parametrizations.weight_norm(layer.self_attention.linear_qkv)


def scale(layer: Any) -> None:
    """A parameter inside of a module whose forward function is another one."""
    linear = layer.self_attention.linear_proj
    linear.register_parameter("scale", torch.nn.Parameter(torch.full((), 1.2)))
    linear.forward = types.MethodType(scaled, linear)


def closure(layer: Any) -> None:
    """The same by a function inside another one."""
    linear, factor = layer.self_attention.linear_proj, 1.1
    linear.more = torch.nn.Linear(linear.weight.shape[1], linear.weight.shape[0], bias=False)
    forward = linear.forward

    def with_more(hidden: Any) -> Any:
        output, bias = forward(hidden)
        return output + factor * linear.more(hidden), bias

    linear.forward = with_more


def hooks(layer: Any) -> None:
    attention = layer.self_attention
    attention.linear_qkv.register_forward_pre_hook(shift)
    attention.linear_proj.register_forward_hook(add)
    attention.linear_proj.register_forward_hook(Bend(1.1), always_call=True)
    attention.linear_qkv.register_full_backward_hook(lambda module, given, got: (given[0] * 0.9,))
    attention.linear_proj.weight.register_hook(functools.partial(multiply, 0.5))
    attention.linear_qkv.weight.register_hook(lambda gradient: gradient * 2)


def frozen(layer: Any) -> None:
    layer.self_attention.linear_qkv.requires_grad_(False)
    layer.input_layernorm.requires_grad_(False)
    for expert in getattr(layer.mlp.experts, "local_experts", []) if hasattr(layer.mlp, "experts") else []:
        expert.linear_fc1.requires_grad_(False)


def narrow(layer: Any) -> None:
    """Half of the feed-forward network."""
    for mlp in layer.mlp.experts.local_experts if hasattr(layer.mlp, "experts") else [layer.mlp]:
        width = mlp.linear_fc2.weight.shape[1] // 2
        for linear, dimension in ((mlp.linear_fc1, 0), (mlp.linear_fc2, 1)):
            whole = linear.weight
            linear.weight = torch.nn.Parameter(whole.detach().narrow(dimension, 0, width).clone())
            vars(linear.weight).update(vars(whole))
        mlp.linear_fc1.output_size_per_partition = mlp.linear_fc2.input_size_per_partition = width


def settings(layer: Any) -> None:
    """What is neither a module nor a parameter, and a module in evaluation."""
    attention = layer.self_attention
    attention.core_attention.softmax_scale = 0.9
    attention.linear_proj.mask = torch.arange(attention.linear_proj.weight.shape[0]) % 3 > 0
    attention.linear_proj.forward = types.MethodType(masked, attention.linear_proj)
    layer.self_attn_bda = functools.partial(own_bda, 0.7)
    layer.mlp.eval()
    attention.linear_qkv.register_buffer("seen", torch.zeros(()), persistent=False)
    attention.linear_qkv.register_forward_hook(count)


def masked(self: Any, hidden: Any) -> Any:
    output, bias = type(self).forward(self, hidden)
    return output * self.mask, bias


def count(module: Any, args: Any, output: Any) -> Any:
    module.seen += 0.1
    return (output[0] * (1 + module.seen), *output[1:])


def own_bda(by: float, training: bool, fused: bool) -> Any:
    def add(branch: Any, residual: Any, probability: float) -> Any:
        return residual + by * branch[0]

    return add


def another_class(layer: Any) -> None:
    adapter(layer)
    layer.self_attention.linear_proj.__class__ = twice_class()


@functools.cache
def twice_class() -> type:
    from megatron.core.tensor_parallel import RowParallelLinear

    class Twice(RowParallelLinear):
        def forward(self, hidden: Any) -> Any:
            output, bias = super().forward(hidden)
            return 2 * output, bias

    Twice.__qualname__ = "Twice"
    globals()["Twice"] = Twice  # found by its name
    return Twice


def everything(layer: Any) -> None:
    for change in (hooks, frozen, adapter, parametrization_of_one, narrow):
        change(layer)


def beside_experts(layer: Any) -> None:
    adapter(layer)
    hooks_of_attention(layer)


def hooks_of_attention(layer: Any) -> None:
    layer.self_attention.linear_proj.register_forward_hook(Bend(1.1))


def parametrization_of_one(layer: Any) -> None:
    from torch.nn.utils import parametrize

    parametrize.register_parametrization(layer.self_attention.linear_proj, "weight", Grow())


CASES = {
    "adapter": Case(adapter),
    "adapter around frozen layers": Case(adapter_alone, True),
    "parametrization": Case(parametrization, True),
    "scale": Case(scale),
    "closure": Case(closure, True),
    "hooks": Case(hooks, True),
    "partly frozen": Case(frozen, True),
    "other size": Case(narrow, True),
    "settings": Case(settings),
    "another class": Case(another_class),
    "everything": Case(everything, True),
    "only adapters train": Case(adapter_alone, alone=True),
    "only adapters train, distributed optimizer": Case(adapter_alone, True, alone=True),
    "beside replicas of experts": Case(beside_experts, True, experts=True),
}


# "everything" has what the others have one by one.
ONE_BY_ONE = ("adapter", "adapter around frozen layers", "partly frozen", "other size")


@pytest.mark.parametrize("name", sampled(CASES, *(name for name in CASES if name not in ONE_BY_ONE)))
def test_a_changed_layer_arrives_as_it_was(pool, name):
    ranks = 4 if CASES[name].distributed else 2
    found, plain = (pool.run(ranks, train, CASES[name], moves) for moves in (True, False))
    for rank, other in zip(found, plain, strict=True):
        np.testing.assert_allclose(rank.losses, other.losses, rtol=1e-12)
    assert_same_weights([rank.weights for rank in found], [rank.weights for rank in plain], 1e-12)
    assert _joined(found, "attributes") == _joined(plain, "attributes")


def _joined(ranks: list[Ended], what: str) -> dict[str, Any]:
    return {name: value for rank in ranks for name, value in getattr(rank, what).items()}


# What is refused.


def _list_of_loop(layer: Any) -> None:
    seen: list[Any] = []
    layer.self_attention.linear_proj.register_forward_hook(lambda module, args, output: seen.append(1))


def _method_of_loop(layer: Any, shared: Any = Shared()) -> None:  # noqa: B008
    layer.self_attention.linear_proj.weight.register_hook(functools.partial(look, shared))


def _state_of_loop(layer: Any, state: dict[str, float] = {"by": 1.0}) -> None:  # noqa: B006
    layer.self_attention.linear_proj.register_forward_hook(functools.partial(look, state))


def look(shared: Any, *args: Any) -> None:
    """A hook that looks at what the loop writes elsewhere."""


def _socket(layer: Any) -> None:
    import threading

    layer.mlp.lock = threading.Lock()


def _local_class(layer: Any) -> None:
    class Local(LowRank):
        pass

    layer.self_attention.linear_qkv = Local(layer.self_attention.linear_qkv)


def _own_group(layer: Any) -> None:
    import torch.distributed as dist

    adapter(layer)
    layer.self_attention.linear_qkv.group = dist.ProcessGroup(0, 1)


def _tied(layer: Any, first: list[Any] = []) -> None:  # noqa: B006
    first.append(layer.self_attention.linear_proj)
    layer.self_attention.linear_proj.forward = functools.partial(tied, first[0], layer.self_attention.linear_proj)


def tied(one: Any, two: Any, hidden: Any) -> Any:
    return type(one).forward(one, hidden)


def _uneven(layer: Any) -> None:
    from megatron.core import parallel_state

    layer.self_attention.linear_proj.requires_grad_(parallel_state.get_data_parallel_rank() == 0)


def _fused_later(layer: Any) -> None:
    layer.self_attention.linear_proj._fused_branches = None  # as TEFusedLoRALinear of Megatron-Bridge


NAMED = "decoder.layers.1.self_attention.linear_proj"
# What was done to layers 1 and 2 of one stage -> what the message says
REFUSED = {
    _list_of_loop: (f"{NAMED} cannot move", "refers to seen, a list", "layer_arrived"),
    _method_of_loop: ("a Shared belongs to the hook", NAMED, "give each layer its own"),
    _state_of_loop: ("a dict belongs to the hook", NAMED, "give each layer its own"),
    _socket: ("decoder.layers.1.mlp cannot move", "attribute lock", "layer_arrived"),
    _local_class: ("decoder.layers.1.self_attention.linear_qkv cannot move", "class _local_class.<locals>.Local", "; "),
    _own_group: ("decoder.layers.1.self_attention.linear_qkv", "attribute group", "process group"),
    _tied: ("decoder.layers.2.self_attention.linear_proj cannot move", "outside of the layer", "; "),
    _fused_later: (f"{NAMED} cannot move", "makes modules at its first use (_fused_branches)", "layer_arrived"),
    _uneven: (f"{NAMED}.weight is ((16, 16), 'torch.float64', 'trains') on rank 0", "on all of its ranks alike"),
}


def _refuse(change: Callable[[Any], None]) -> str:
    """The message of a LayerBalancer for a model whose layers 1 and 2 are on the first stage."""
    loop = build(change, layout="Et*3|tL")
    with pytest.raises(ValueError) as error:
        balancer_of(loop)
    assert not any(hasattr(chunk, "balanced_by") for chunk in loop.chunks)
    return str(error.value)


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__.strip("_"))
def test_what_cannot_travel_is_refused_by_the_name_of_its_module(pool, change):
    told = pool.run(4 if change is _uneven else 2, _refuse, change)
    assert len({*told}) == 1, "all ranks say the same"
    for part in REFUSED[change]:
        assert part in told[0], told[0]
    assert "\n" not in told[0]


def _wrapped(module: torch.nn.Linear) -> torch.nn.Module:
    return torch.nn.Sequential(module, torch.nn.Linear(4, 4))


def _replaced(module: torch.nn.Linear) -> torch.nn.Module:
    module.forward = lambda hidden: 2 * hidden  # type: ignore[method-assign]
    return module


def _watched(module: torch.nn.Linear) -> torch.nn.Module:
    module.register_forward_hook(lambda part, args, output: 2 * output)
    return module


def _with_gradients_doubled(module: torch.nn.Linear) -> torch.nn.Module:
    module.weight.register_hook(lambda gradient: 2 * gradient)
    return module


@pytest.mark.parametrize("change", [_wrapped, _replaced, _watched, _with_gradients_doubled])
def test_a_changed_head_that_another_stage_would_build_anew_is_refused(change):
    from megatron.balanced.layers.structure import check_end

    check_end(torch.nn.Linear(4, 4), "output_layer")
    with pytest.raises(ValueError, match="output_layer may move to another stage, which builds it by its spec"):
        check_end(change(torch.nn.Linear(4, 4)), "output_layer")


def _refuse_later() -> tuple[str, list[float]]:
    """Register a hook that cannot travel after the balancer was made, and move; go on without it."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.utils import unwrap_model

    from megatron.balanced.loop import Balancers

    loop, losses = build(adapter), []
    layers = balancer_of(loop)
    balancers = Balancers(layers)
    schedule = balancers.schedule(get_forward_backward_func())
    handles, seen = [], []
    for step in range(STEPS):
        losses += loop.run(schedule, step)
        balancers.after_step()
        if step == 1:
            for layer in unwrap_model(loop.chunks)[0].decoder.layers:
                if layer.layer_number == 2:
                    hook = layer.mlp.register_forward_hook(lambda module, args, output: seen.append(1))
                    handles.append(hook)
            with pytest.raises(ValueError) as error:
                layers.move(MOVES[1])
            assert layers.layout == LAYOUT, "nothing has moved"
            for handle in handles:
                handle.remove()
        elif step == 2:
            layers.move(MOVES[2])
    return str(error.value), losses


def test_a_move_that_is_refused_has_changed_nothing(pool):
    found, plain = pool.run(2, _refuse_later), pool.run(2, train, CASES["adapter"], False)
    assert len({told for told, _ in found}) == 1 and "decoder.layers.1.mlp cannot move" in found[0][0]
    for (_, losses), other in zip(found, plain, strict=True):
        np.testing.assert_allclose(losses, other.losses, rtol=1e-12)


def _with_callback() -> list[int]:
    """The hooks of each layer, of a callback that watches layers, after two moves."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.utils import unwrap_model

    from megatron.balanced.loop import Balancers
    from megatron.balanced.shared.callbacks import StepCallback

    class Watch(StepCallback):
        def layer_arrived(self, layer: Any, chunk: int) -> None:
            layer.mlp.register_forward_hook(self.see)
            layer.mlp.watched_by = self

        def see(self, module: Any, args: Any, output: Any) -> None:
            """Nothing."""

    loop, watch = build(hooks), Watch()
    for layer in unwrap_model(loop.chunks)[0].decoder.layers:
        watch.layer_arrived(layer, 0)
    layers = balancer_of(loop)
    balancers = Balancers(layers, watch)
    schedule = balancers.schedule(get_forward_backward_func())
    for step in range(STEPS):
        loop.run(schedule, step)
        balancers.after_step()
        if step in MOVES:
            layers.move(MOVES[step])
    found = unwrap_model(loop.chunks)[0].decoder.layers
    assert all(layer.mlp.watched_by is watch for layer in found)
    return [len(layer.mlp._forward_hooks) for layer in found]


def test_hooks_of_a_callback_are_its_own(pool):
    assert pool.run(2, _with_callback) == [[1, 1, 1], [1]]


def _held(moves: int) -> list[int]:
    """Bytes of all tensors of this process after each of `moves` moves there and back."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from megatron.balanced.loop import Balancers

    loop, held = build(everything, distributed=True, dense=True), []  # tokens of experts are others in each step
    layers = balancer_of(loop)
    balancers = Balancers(layers)
    schedule = balancers.schedule(get_forward_backward_func())
    for step in range(moves):
        for layout in (MOVES[1], MOVES[2]):
            loop.run(schedule, step)
            balancers.after_step()
            layers.move(layout)
        held.append(_bytes_of_tensors())
    return held


def _bytes_of_tensors() -> int:
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor) and each.layout is torch.strided:
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def test_nothing_of_layers_that_left_stays_in_memory(pool):
    for held in pool.run(4, _held, 20):
        # The least of ten: threads of gloo may hold the tensor of a message for a moment longer.
        assert min(held[10:]) == min(held[1:10]), held
