"""Balancers in ms-swift's Megatron trainers, as a callback.

# balance.py, of: megatron sft --external_plugins balance.py --callbacks balance ...
from balancing.experts.config import ExpertConfig
from megatron.balanced.loops.choice import Choice
from megatron.balanced.loops.swift import register

register(Choice(experts=ExpertConfig(enabled=True)))
"""

from typing import Any

from megatron.balanced.loop import Balancers
from megatron.balanced.loops.choice import Choice
from megatron.balanced.shared.job import Job

__all__ = ["NAME", "callback", "register"]

NAME = "balance"


def callback(base: type, choice: Choice) -> type:
    """A subclass of ms-swift's `MegatronCallback`, with balancers from the beginning of training to its end."""

    class Balance(base):
        balancers: Balancers | None = None

        def on_train_begin(self) -> None:
            """Make the balancers. The model is wrapped and the optimizer built. ms-swift has not looked up the schedule
            yet."""
            super().on_train_begin()
            args: Any = self.trainer.args
            job = Job(args.seq_length, args.micro_batch_size, args.ddp_timeout / 60)
            self.balancers = choice.around(self.trainer.wrapped_models, job)

        def on_train_end(self) -> None:
            """Close the balancers. The model is plain from now on."""
            assert self.balancers is not None
            self.balancers.close()
            super().on_train_end()

    return Balance


def register(choice: Choice) -> None:
    """Register the callback with ms-swift as `--callbacks balance`."""
    from swift.megatron.callbacks import megatron_callbacks_map
    from swift.megatron.callbacks.base import MegatronCallback

    megatron_callbacks_map[NAME] = callback(MegatronCallback, choice)
