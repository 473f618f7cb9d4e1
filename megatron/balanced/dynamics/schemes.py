"""Installation of dynamic schemes in Megatron-LM, and their state in checkpoints.

Schedules are functions of the iteration, so schemes have little state. It consists of plain numbers in Megatron's
arguments, which are part of every checkpoint; other versions of Megatron ignore arguments that they do not know.
"""

import argparse
import os
from collections.abc import Callable
from typing import Any

from megatron.training.models.gpt import GPTModelConfig

from balancing.dynamics.config import DynamicsConfig
from megatron.balanced import callbacks
from megatron.balanced.dynamics.freezing import Freezing
from megatron.balanced.dynamics.pruning import Pruning
from megatron.balanced.dynamics.token_skipping import Tokens

__all__ = ["add_dynamics"]


class _Saved:
    """A `StepCallback` that writes the schemes' state to the arguments, from which checkpoints take it."""

    def __init__(self, args: argparse.Namespace, schemes: dict[str, Any]) -> None:
        self._args, self._schemes = args, schemes

    def begin_step(self, iteration: int, config: Any) -> None:
        """Nothing to do: `end_step` does it all."""

    begin_schedule = end_schedule = lambda self: None

    def end_step(self) -> None:
        states = {name: scheme.state_dict() for name, scheme in self._schemes.items()}
        self._args.dynamics_state = {name: state for name, state in states.items() if state is not None}


def add_dynamics(
    args: argparse.Namespace,
    config: DynamicsConfig,
    model: GPTModelConfig,
    report: Callable[[dict[str, Any]], None],
) -> list[Callable[[], None]]:
    """Install the schemes of `config` around the training steps of `model`. report: called with each event.

    Returns functions to call after layers have moved to or from a rank.
    """
    saved = _load(args)
    schemes: dict[str, Any] = {}
    if config.freeze_layers:
        schemes["freezing"] = Freezing(args, config, report, saved.get("freezing"))
    if config.prune_sparsity:
        schemes["pruning"] = Pruning(args, config, report)
    if config.mixture_of_depths or config.exits():
        schemes["tokens"] = Tokens(args, config, report)
    callbacks.callbacks.append(_Saved(args, schemes))  # its step ends last
    for scheme in schemes.values():
        model.post_wrap_hooks.append(scheme.attach)
        callbacks.callbacks.append(scheme)
    return [scheme.renew for scheme in schemes.values()]


def _load(args: argparse.Namespace) -> dict[str, Any]:
    """The schemes' state in the checkpoint that this run resumes; empty if there is none."""
    if not args.load or args.finetune or not os.path.isdir(args.load):
        return {}
    from megatron.training.checkpointing import _load_base_checkpoint

    state, *_ = _load_base_checkpoint(args.load, args, rank0=True)
    return getattr((state or {}).get("args"), "dynamics_state", {})
