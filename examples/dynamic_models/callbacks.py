"""The callbacks of dynamic schemes in a training run, and their state in checkpoints.

Schedules are functions of the iteration, so schemes have little state. It consists of plain numbers in Megatron's
arguments, which are part of every checkpoint; other versions of Megatron ignore arguments that they do not know.
"""

import argparse
import os
from typing import Any

from examples.dynamic_models.config import DynamicsConfig
from examples.dynamic_models.freezing import Freezing
from examples.dynamic_models.pruning import Pruning
from examples.dynamic_models.token_skipping import Tokens
from megatron.balanced.shared.callbacks import StepCallback

__all__ = ["dynamics_callbacks"]


class _Saved(StepCallback):
    """Writes the schemes' state to the arguments, from which checkpoints take it."""

    def __init__(self, args: argparse.Namespace, schemes: dict[str, Any]) -> None:
        self._args, self._schemes = args, schemes

    def end_step(self) -> None:
        states = {name: scheme.state_dict() for name, scheme in self._schemes.items()}
        self._args.dynamics_state = {name: state for name, state in states.items() if state is not None}


def dynamics_callbacks(args: argparse.Namespace, config: DynamicsConfig) -> list[StepCallback]:
    """The callbacks of the schemes that `config` switches on."""
    saved = _load(args)
    schemes: dict[str, Any] = {}
    if config.freeze_layers:
        schemes["freezing"] = Freezing(args, config, saved.get("freezing"))
    if config.prune_sparsity:
        schemes["pruning"] = Pruning(args, config)
    if config.mixture_of_depths or config.early_exit_layers:
        schemes["tokens"] = Tokens(args, config)
    return [_Saved(args, schemes), *schemes.values()]  # the first one's step ends last


def _load(args: argparse.Namespace) -> dict[str, Any]:
    """The schemes' state in the checkpoint that this run resumes; empty if there is none."""
    if not args.load or args.finetune or not os.path.isdir(args.load):
        return {}
    from megatron.training.checkpointing import _load_base_checkpoint

    state, *_ = _load_base_checkpoint(args.load, args, rank0=True)
    return getattr((state or {}).get("args"), "dynamics_state", {})
