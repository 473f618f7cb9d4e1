"""What Megatron's optimizers hold for one parameter, whichever of them it is.

Megatron wraps torch's optimizer in one that steps float32 parameters, one that keeps float32 copies of bf16 or fp16
parameters, or one that shares these out over data-parallel ranks. What torch's optimizer steps for a parameter is found
in a different place in each.
"""

from collections.abc import Iterator, Sequence
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
        """Moments and step; empty before the first step."""
        return self.optimizer.state.get(self.main, {})


def optimizer_of(config: Any) -> Any:
    """The optimizer of the training loop, which hands one of its methods to the model's config."""
    return config.grad_scale_func.__self__


def parts(optimizer: Any, parameters: Sequence[torch.nn.Parameter]) -> Iterator[tuple[torch.nn.Parameter, Part]]:
    """What `optimizer` steps of `parameters` on this rank: a part of each, or none where another rank has it all."""
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(each, "is_stub_optimizer", False):
            continue
        groups = [group["params"] for group in each.optimizer.param_groups]
        stepped = {id(main) for group in groups for main in group}
        for parameter in parameters:
            if not isinstance(each, DistributedOptimizer):
                main = getattr(parameter, "main_param", None)
                main = parameter if main is None else main
                if id(main) in stepped:
                    yield parameter, Part(each.optimizer, main, 0, parameter.numel())
            elif parameter in each.model_param_group_index_map:
                group, order = each.model_param_group_index_map[parameter]
                held = each._get_model_param_range_map(parameter)["param"]
                yield parameter, Part(each.optimizer, groups[group][order], held.start, held.end)
