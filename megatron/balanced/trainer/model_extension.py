"""What the trainer has to be told of a model that is not Megatron-LM's own, such as one that changes while it trains.

`pretrain_gpt.py` trains Megatron-LM's GPT. A program that trains another model hands one `ModelExtension` to
`parse_arguments` and to `train` of this folder; `examples/dynamic_models/pretrain.py` is one. What balancers and the
report know of its layers:

- **Cost.** A layer whose cost changes announces nothing. Its forward and backward passes are measured in every
  iteration, and the planner's average starts anew when they change (`balancing.layers.CostAverage`).
- **State.** Parameters with their optimizer state and buffers, in checkpoints or not, move with their layer. Hooks and
  plain attributes do not: set them again in `StepCallback.layer_arrived` or `layers_moved`.
- **Frozen layers.** Parameters whose `requires_grad` is off arrive with it off. A layer that runs without gradients in
  training sets its attribute `frozen`, and that of its MoE layer. Its forward passes are then not taken for passes that
  are run again for their gradients, and its experts get no replicas, which would be sent for a forward pass alone.
- **Tokens.** A layer may run for a part of its tokens, as long as its input and its output have all of them.
- **The report.** `StepCallback.report` adds events, such as `balancing.report.event(..., action="freeze")`.
"""

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports megatron.core, before which the device is chosen, and flags come before that
    from megatron.balanced.shared.callbacks import StepCallback

__all__ = ["ModelExtension"]


class ModelExtension:
    """Base class of all extensions, which extends nothing. Override what you need. One instance serves a whole run."""

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add flags of your own to Megatron-LM's and those of balancing."""

    def check(self, args: argparse.Namespace) -> None:
        """Check flags and complete them, once Megatron-LM has validated `args`. Raise ValueError for what cannot work:
        its text is the one line that the user sees."""

    def modules(self, args: argparse.Namespace) -> Mapping[type, type]:
        """Megatron-LM's modules in the layer spec -> the modules that take their places in every decoder layer. A moved
        layer is built from them on its new stage."""
        return {}

    def layers_differ(self, args: argparse.Namespace) -> bool:
        """Whether layers differ in the names or shapes of their parameters, which checkpoints must then tell apart."""
        return False

    def callbacks(self, args: argparse.Namespace) -> "list[StepCallback]":
        """Callbacks of a run. Their steps begin before those of the balancers, which see the model as it will be."""
        return []

    def frozen_layers(self, args: argparse.Namespace) -> int | None:
        """Layers at the front of the model that end up frozen, for the forecast of `--balance-dry-run`. None if the
        model changes in a way that cannot be forecast."""
        return 0
