"""What Megatron's optimizers hold for one parameter, whichever of them it is.

Megatron wraps torch's optimizer in one that steps float32 parameters, one that keeps float32 copies of bf16 or fp16
parameters, or one that shares these out over data-parallel ranks. What torch's optimizer steps for a parameter is found
in a different place in each.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

__all__ = ["Part", "optimizer_of", "parts"]


class Part(NamedTuple):
    """What this rank steps of a parameter: elements start to stop of it, flattened."""

    optimizer: torch.optim.Optimizer
    main: torch.Tensor  # as torch's optimizer knows it
    start: int
    stop: int

    @property
    def state(self) -> dict[str, Any]:
        return self.optimizer.state[self.main]


def optimizer_of(config: Any) -> Any:
    """The optimizer of the training loop, which hands one of its methods to the model's config."""
    return config.grad_scale_func.__self__


def parts(optimizer: Any, parameter: torch.nn.Parameter) -> Iterator[Part]:
    """The parts of `parameter` that `optimizer` steps on this rank: one, or none where another rank has it all."""
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(each, "is_stub_optimizer", False):
            continue
        if isinstance(each, DistributedOptimizer):
            if parameter in each.model_param_group_index_map:
                group, order = each.model_param_group_index_map[parameter]
                held = each._get_model_param_range_map(parameter)["param"]
                yield Part(each.optimizer, each.optimizer.param_groups[group]["params"][order], held.start, held.end)
            continue
        main = getattr(parameter, "main_param", None)
        main = parameter if main is None else main
        if any(main is stepped for group in each.optimizer.param_groups for stepped in group["params"]):
            yield Part(each.optimizer, main, 0, parameter.numel())
