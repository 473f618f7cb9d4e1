"""Balancers in slime, by its hook before a training step.

    --custom-megatron-before-train-step-hook-path megatron.balanced.loops.slime.before_step

Settings come from the environment (`choice.py`). To set them in code, make a `BeforeStep` in a module of your own and
pass its path instead. slime calls the hook right before it looks up its schedule.
"""

from typing import Any

from megatron.balanced.loop import Balancers
from megatron.balanced.loops.choice import Choice
from megatron.balanced.shared.job import Job

__all__ = ["BeforeStep", "before_step"]


class BeforeStep:
    """Makes the balancers of a model before its first step. choice: settings; None takes them from the environment."""

    def __init__(self, choice: Choice | None = None) -> None:
        self._choice = choice
        self.balancers: dict[int, Balancers] = {}  # of each model, such as an actor and a critic, by its first chunk

    def __call__(self, args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, scheduler: Any) -> None:
        if id(model[0]) in self.balancers:
            return
        if getattr(args, "offload_train", False):
            raise ValueError(
                "--offload-train closes connections between ranks that balancers still need; train without --colocate"
            )
        job = Job(args.seq_length, args.micro_batch_size, args.distributed_timeout_minutes)
        self.balancers[id(model[0])] = (self._choice or Choice.of_environment()).around(model, job)


before_step = BeforeStep()
