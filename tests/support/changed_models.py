"""What loops do to a finished model before they wrap it for data parallelism: adapters, frozen parts, hooks, scales.

Each change of `CHANGES` takes a model of megatron.core and changes its experts, or also its attention, so that training
goes on exactly as it would without balancers. Each of `REFUSED` cannot be known to survive a replica.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.utils import parametrize

__all__ = ["CHANGES", "EXPERTS_REFUSED", "adapt", "experts_of"]

RANK = 4  # of adapters


class Adapter(torch.nn.Module):
    """A linear layer of megatron.core with a low-rank adapter beside it. base: the layer, which is frozen."""

    def __init__(self, base: Any, scale: float = 0.5) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        base.weight.requires_grad_(False)
        width, height = base.weight.shape
        draw = torch.Generator().manual_seed(width)
        for name, shape in (("down", (RANK, height)), ("up", (width, RANK))):
            value = torch.randn(shape, generator=draw) / 4
            parameter = torch.nn.Parameter(value.to(base.weight.dtype).to(base.weight.device))
            if not getattr(base.weight, "allreduce", True):
                parameter.allreduce = False  # type: ignore[attr-defined]
            setattr(self, name, parameter)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = self.base(tokens)
        return output + self.scale * (tokens @ self.down.T @ self.up.T), bias


class Scaled(torch.nn.Module):
    """A parametrization: rows of a weight times factors that train."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.linspace(0.5, 1.5, len(weight), dtype=weight.dtype)[:, None])
        if not getattr(weight, "allreduce", True):
            self.factor.allreduce = False  # type: ignore[attr-defined]

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.factor


def experts_of(model: torch.nn.Module) -> list[list[Any]]:
    """[MoE layer] -> its sequential experts on this rank."""
    return [list(module.local_experts) for module in model.modules() if hasattr(module, "local_experts")]


def adapt(owner: Any, name: str, **options: Any) -> None:
    """Put an adapter around the linear layer `name` of `owner`."""
    setattr(owner, name, Adapter(getattr(owner, name), **options))


def _each(model: torch.nn.Module) -> Iterator[Any]:
    return (expert for layer in experts_of(model) for expert in layer)


def _freeze(*modules: torch.nn.Module) -> None:
    for module in modules:
        module.requires_grad_(False)


def _is_first_rank() -> bool:
    from megatron.core import parallel_state

    return parallel_state.get_expert_model_parallel_rank() == 0


def _frozen(model: Any) -> None:
    _freeze(*_each(model))


def _one_frozen(model: Any) -> None:
    """One expert of a rank of each group, and all of another layer there."""
    if _is_first_rank():
        _freeze(experts_of(model)[0][1], *experts_of(model)[1])


def _half_frozen(model: Any) -> None:
    _freeze(*(expert.linear_fc1 for expert in _each(model)))


def _adapters(model: Any) -> None:
    """On all linear layers; everything else is frozen."""
    _freeze(model)
    for expert in _each(model):
        adapt(expert, "linear_fc1")
        adapt(expert, "linear_fc2")
    for layer in model.decoder.layers:
        adapt(layer.self_attention, "linear_qkv")
        adapt(layer.self_attention, "linear_proj")


def _adapters_of_experts(model: Any) -> None:
    """Nothing before the experts of the first layer trains."""
    _freeze(model)
    for expert in _each(model):
        adapt(expert, "linear_fc1")
        adapt(expert, "linear_fc2")


def _only_experts(model: Any) -> None:
    trained = [*_each(model), *(layer.mlp.router for layer in model.decoder.layers)]
    _freeze(model)
    for module in trained:
        module.requires_grad_(True)


def _adapters_of_one_layer(model: Any) -> None:
    for expert in experts_of(model)[1]:
        adapt(expert, "linear_fc2")


def _adapters_of_attention(model: Any) -> None:
    _freeze(model)
    for layer in model.decoder.layers:
        adapt(layer.self_attention, "linear_qkv")


def _parametrized(model: Any) -> None:
    for expert in _each(model):
        parametrize.register_parametrization(expert.linear_fc1, "weight", Scaled(expert.linear_fc1.weight))


CHANGES: dict[str, Callable[[Any], None]] = {
    "frozen": _frozen,
    "one frozen": _one_frozen,
    "half frozen": _half_frozen,
    "adapters": _adapters,
    "adapters of experts": _adapters_of_experts,
    "adapters of one layer": _adapters_of_one_layer,
    "adapters of attention": _adapters_of_attention,
    "only experts": _only_experts,
    "parametrized": _parametrized,
}


def _replaced_forward(model: Any) -> None:
    """As libraries do that know nothing of Megatron: parameters inside of the layer, and a function that holds it."""
    for expert in _each(model):
        linear = expert.linear_fc1
        _bare_adapter(linear)


def _bare_adapter(linear: Any) -> None:
    run, adapter = linear.forward, Adapter(linear)
    linear.down, linear.up = adapter.down, adapter.up

    def forward(tokens: torch.Tensor) -> Any:
        output, bias = run(tokens)
        return output + tokens @ linear.down.T @ linear.up.T, bias

    linear.forward = forward


def _gradient_hook(model: Any) -> None:
    for expert in _each(model):
        expert.linear_fc1.weight.register_hook(lambda gradient: gradient / 2)


def _forward_hook(model: Any) -> None:
    for expert in _each(model):
        expert.linear_fc2.register_forward_hook(lambda module, inputs, output: (output[0] * 2, output[1]))


def _buffer(model: Any) -> None:
    for number, expert in enumerate(_each(model)):
        expert.register_buffer("scale", torch.tensor(float(number)))


def _one_adapter(model: Any) -> None:
    adapt(experts_of(model)[0][1], "linear_fc1")


def _one_rank(model: Any) -> None:
    if _is_first_rank():
        for expert in experts_of(model)[0]:
            adapt(expert, "linear_fc1")


def _other_scales(model: Any) -> None:
    for number, expert in enumerate(_each(model)):
        adapt(expert, "linear_fc1", scale=1.0 + number)


def _other_scales_on_ranks(model: Any) -> None:
    for expert in _each(model):
        adapt(expert, "linear_fc1", scale=1.0 + _is_first_rank())


def _replaced_layer(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "token_dispatcher"):
            run = module.forward
            module.forward = lambda *args, run=run, **kwargs: run(*args, **kwargs)


# change -> what the message says
EXPERTS_REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "replaced forward": (_replaced_forward, "decoder.layers.0.mlp.experts compute with more than their parameters"),
    "gradient hook": (
        _gradient_hook,
        "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight has a gradient hook",
    ),
    "forward hook": (_forward_hook, "decoder.layers.0.mlp.experts.local_experts.0.linear_fc2 has a hook"),
    "buffer": (_buffer, "decoder.layers.0.mlp.experts.local_experts.0 has a buffer, scale"),
    "one adapter": (_one_adapter, "experts of decoder.layers.0.mlp.experts differ in linear_fc1.base.weight"),
    "one rank": (_one_rank, "decoder.layers.0.mlp.experts of ranks 0 and 1 differ in linear_fc1.base.weight"),
    "other scales": (_other_scales, "decoder.layers.0.mlp.experts compute with more than their parameters"),
    "other scales on ranks": (
        _other_scales_on_ranks,
        "decoder.layers.0.mlp.experts of ranks 0 and 1 compute with more",
    ),
    "replaced layer": (_replaced_layer, "the forward of a MoELayer, decoder.layers.0.mlp.experts, was replaced"),
}
