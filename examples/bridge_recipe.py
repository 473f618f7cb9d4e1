"""Train a recipe of Megatron-Bridge with balanced experts (if it has expert-parallel ranks) and layers (if it has a
pipeline).

    torchrun --nproc-per-node 8 examples/bridge_recipe.py olmoe.olmoe_7b_pretrain_config train.train_iters=100

The first argument names a recipe below `megatron.bridge.recipes`; the others override its fields. A run that resumes
from a checkpoint continues with the layout of layers that was saved.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from balancing.cluster import Cluster
from balancing.experts.config import ExpertConfig
from balancing.layers.config import LayerConfig


def train(recipe: str, overrides: Sequence[str], report: Callable[[Callable[[], dict[str, Any]]], None]) -> None:
    """Bridge's `pretrain`, with balancers. report: called for each event, with a function that returns the event."""
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    from megatron.balanced.loops.bridge import Balance, resume_layout

    folder, _, name = recipe.partition(".")
    config = getattr(importlib.import_module(f"megatron.bridge.recipes.{folder}"), name)()
    process_config_with_overrides(config, cli_overrides=[*overrides])
    model = config.model
    balance = Balance(
        experts=ExpertConfig(enabled=True) if model.expert_model_parallel_size > 1 else None,
        layers=LayerConfig(enabled=True) if model.pipeline_model_parallel_size > 1 else None,
        cluster=Cluster.preset("h100-8x400g"),
        report=report,
    )
    resume_layout(config)
    pretrain(config, forward_step, callbacks=[balance])


def show(event: Callable[[], dict[str, Any]]) -> None:
    """Print a line for an event that moved bytes."""
    told = event()
    if told["moved_bytes"]:
        before, after = told["imbalance_before"], told["imbalance_after"]
        print(f"step {told['iteration']}: {told['balancer']} {told['action']}, imbalance {before:.2f} -> {after:.2f}")


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2:], show)
