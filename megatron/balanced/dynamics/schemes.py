"""Installation of dynamic schemes in Megatron-LM, and their state in checkpoints.

Schedules are functions of the iteration, so schemes have little state. It consists of plain numbers in Megatron's
arguments, which are part of every checkpoint; other versions of Megatron ignore arguments that they do not know.
"""

import argparse
import os
from collections.abc import Callable
from typing import Any

from balancing.dynamics.config import DynamicsConfig
from megatron.balanced.callbacks import StepCallback
from megatron.balanced.dynamics.freezing import Freezing
from megatron.balanced.dynamics.pruning import Pruning
from megatron.balanced.dynamics.token_skipping import Tokens

__all__ = ["dynamics_callbacks"]


class _Saved(StepCallback):
    """Writes the schemes' state to the arguments, from which checkpoints take it."""

    def __init__(self, args: argparse.Namespace, schemes: dict[str, Any]) -> None:
        self._args, self._schemes = args, schemes

    def end_step(self) -> None:
        states = {name: scheme.state_dict() for name, scheme in self._schemes.items()}
        self._args.dynamics_state = {name: state for name, state in states.items() if state is not None}


def dynamics_callbacks(
    args: argparse.Namespace, config: DynamicsConfig, report: Callable[[dict[str, Any]], None]
) -> list[StepCallback]:
    """The callbacks of the schemes that `config` switches on. report: called with each event."""
    saved = _load(args)
    schemes: dict[str, Any] = {}
    if config.freeze_layers:
        schemes["freezing"] = Freezing(args, config, report, saved.get("freezing"))
    if config.prune_sparsity:
        schemes["pruning"] = Pruning(args, config, report)
    if config.mixture_of_depths or config.early_exit_layers:
        schemes["tokens"] = Tokens(args, config, report)
    return [_Saved(args, schemes), *schemes.values()]  # the first one's step ends last


def _load(args: argparse.Namespace) -> dict[str, Any]:
    """The schemes' state in the checkpoint that this run resumes; empty if there is none."""
    if not args.load or args.finetune or not os.path.isdir(args.load):
        return {}
    from megatron.training.checkpointing import _load_base_checkpoint

    state, *_ = _load_base_checkpoint(args.load, args, rank0=True)
    return getattr((state or {}).get("args"), "dynamics_state", {})
