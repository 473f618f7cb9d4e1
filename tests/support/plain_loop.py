"""`examples/plain_loop.py` in float64, with its balancers or without."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.replaced import replace_name
from tests.support.weights import ADAM_EPS

__all__ = ["train"]


def train(steps: int, folder: Path, balanced: bool) -> tuple[list[float], Any, str, list[dict[str, Any]]]:
    """The example's `train`. Layers seem to take equally long. Without balancers, the layout is that of the model."""
    import torch

    from examples import plain_loop as example
    from tests.support.set_clock import SetClock, slow_layers

    slow_layers(SetClock().install(), lambda number: (1.0, 2.0))
    torch.set_default_dtype(torch.float64)
    config = example.TransformerConfig
    example.TransformerConfig = lambda **fields: config(**fields | {"num_attention_heads": 2})  # half the attention
    replace_name(example, "OptimizerConfig", partial(example.OptimizerConfig, adam_eps=ADAM_EPS))
    if not balanced:
        begun = []
        build = example.build

        def remember(layout: str) -> Any:
            begun.append(layout)
            return build(layout)

        class Without:
            def __init__(self, *unused: Any, **also_unused: Any) -> None:
                self.layout = begun[0]

        example.build, example.ExpertBalancer, example.SequenceBalancer = remember, Without, Without
        example.LayerBalancer = Without
        example.Balancers = lambda *unused, **named: SimpleNamespace(schedule=lambda run: run, after_step=lambda: None)
    return example.train(steps, folder)
