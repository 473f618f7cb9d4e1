"""`examples/plain_loop.py` in float64, with its balancers or without."""

from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.replaced import replace_name
from tests.support.weights import ADAM_EPS

__all__ = ["ALL", "train"]


ALL = ("experts", "sequences", "layers")


def train(
    steps: int, folder: Path, balancers: Collection[str] = ALL, change: Callable[[Any], object] | None = None
) -> tuple[list[float], Any, str, list[dict[str, Any]]]:
    """The example's `train` with some of its balancers. Layers seem to take equally long. Without a balancer of layers,
    the layout is that of the model.

    change: what is done to the model before it is wrapped for data parallelism.
    """
    import torch
    from megatron.core import optimizer as optimizers

    from examples import plain_loop as example
    from tests.support.set_clock import SetClock, slow_layers

    slow_layers(SetClock().install(), lambda number: (1.0, 2.0))
    torch.set_default_dtype(torch.float64)
    optimizers.USING_PYTORCH_OPTIMIZER = True  # Transformer Engine's has no float64
    config = example.TransformerConfig
    example.TransformerConfig = lambda **fields: config(**fields | {"num_attention_heads": 2})  # half the attention
    options = example.OptimizerConfig

    def with_eps(*given: Any, **named: Any) -> Any:
        return options(*given, **{"adam_eps": ADAM_EPS} | named)

    replace_name(example, "OptimizerConfig", with_eps)
    if change:
        build_model = example.GPTModel

        def build_changed(*given: Any, **named: Any) -> Any:
            model = build_model(*given, **named)
            torch.manual_seed(1)
            change(model)
            return model.to(torch.float64)

        replace_name(example, "GPTModel", build_changed)
    begun, build, join = [], example.build, example.Balancers

    def remember(layout: str) -> Any:
        begun.append(layout)
        return build(layout)

    class Without:
        def __init__(self, *unused: Any, **also_unused: Any) -> None:
            self.layout = begun[0]

    def join_some(*given: Any, **named: Any) -> Any:
        if some := [each for each in given if not isinstance(each, Without)]:
            return join(*some, **named)
        return SimpleNamespace(schedule=lambda run: run, after_step=lambda: None)

    example.build, example.Balancers = remember, join_some
    if "experts" not in balancers:
        example.ExpertBalancer = Without
    if "sequences" not in balancers:
        example.SequenceBalancer = Without
    if "layers" not in balancers:
        example.LayerBalancer = Without
    return example.train(steps, folder)
