"""What a program tells the trainer of its own model, such as one that changes while it trains.

`pretrain_gpt.py` trains Megatron-LM's GPT. A program that trains another model passes one `ModelExtension` to
`parse_arguments` and to `train` of this package; `examples/dynamic_models/pretrain.py` is an example. The balancers and
the report treat the layers of such a model as follows:

- **Cost.** A layer need not announce that its cost changes. Its forward and backward passes are measured in every
  iteration, and the planner's average restarts when they change (`balancing.layers.CostAverage`).
- **State.** Parameters with their optimizer state, buffers, in checkpoints or not, hooks and attributes that were
  changed move with their layer (`megatron.balanced.layers.structure`). Those that refer to a `StepCallback` do not: set
  them again in its `layer_arrived` or `layers_moved`. What cannot move is refused.
- **Frozen layers.** A move keeps `requires_grad` of parameters. A layer that trains without gradients must set `frozen`
  on itself and on its MoE layer. Its forward passes are then not mistaken for recomputation, and its experts get no
  replicas.
- **Tokens.** A layer may process only some of its tokens. Its input and output must contain all of them.
- **The report.** `StepCallback.report` adds events, such as `balancing.report.event(..., action="freeze")`.
"""

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # importing it imports megatron.core, which must come after the choice of the device
    from megatron.balanced.shared.callbacks import StepCallback

__all__ = ["ModelExtension"]


class ModelExtension:
    """Base class of extensions; it changes nothing. Override what you need. One instance serves a whole run."""

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add flags of your own to Megatron-LM's and those of balancing."""

    def check(self, args: argparse.Namespace) -> None:
        """Check flags and complete them, once Megatron-LM has validated `args`. Raise ValueError for flags that cannot
        work: its text is the one line that the user sees."""

    def modules(self, args: argparse.Namespace) -> Mapping[type, type]:
        """Modules to replace in the spec of every decoder layer: Megatron-LM's module -> yours. A moved layer is built
        from yours on its new stage."""
        return {}

    def layers_differ(self, args: argparse.Namespace) -> bool:
        """Whether layers differ in the names or shapes of their parameters. Checkpoints then tell layers apart."""
        return False

    def callbacks(self, args: argparse.Namespace) -> "list[StepCallback]":
        """Callbacks of a run. They begin a step before the balancers do, so balancers see the changed model."""
        return []

    def frozen_layers(self, args: argparse.Namespace) -> int | None:
        """Layers at the front of the model that end up frozen, for the forecast of `--balance-dry-run`. None if the
        model changes in a way that cannot be forecast."""
        return 0
