"""Balancers in verl's Megatron backend: engines of the vendor "balanced".

    VERL_ENGINE_VENDOR=balanced MEGATRON_BALANCE='{"experts": {"replica_slots": 2}}' python -m verl.trainer.main_ppo ...

verl finds `verl_plugin.py` by its entry point. Settings come from the environment (`choice.py`). To set them in code,
write a module that calls `register` and name it in VERL_USE_EXTERNAL_MODULES.
"""

from typing import Any

from megatron.balanced.loop import Balancers
from megatron.balanced.loops.choice import Choice
from megatron.balanced.shared.job import Job

__all__ = ["VENDOR", "balanced", "register"]

VENDOR = "balanced"
TIMEOUT_MINUTES = 10.0  # of the balancers' collectives; torch's default for NCCL

_registered: list[type] = []


def balanced(engine: type, given: Choice, tokens: int = 8192) -> type:
    """A subclass of one of verl's Megatron engines, with balancers. Replica slots leave the device when the model does.

    tokens: approximate tokens of a micro-batch, for the cost model of balanced experts. The real number differs from
        step to step.
    """

    class Balanced(engine):
        choice = given
        balancers: Balancers | None = None
        _on_device = True

        def _build_lr_scheduler(self) -> Any:
            """Make the balancers. Only engines that train call this method. Model and optimizer are on the device, and
            verl has set its hooks."""
            scheduler = super()._build_lr_scheduler()
            self.balancers = self.choice.around(self.module, Job(tokens, 1, TIMEOUT_MINUTES))
            return scheduler

        def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
            """Free replica slots for a rollout, and allocate them again for training."""
            moves = model and self.balancers is not None and self._on_device == (device == "cpu")
            if moves and device == "cpu":
                self.balancers.release()
            super().to(device=device, model=model, optimizer=optimizer, grad=grad)
            if moves:
                self._on_device = not self._on_device
            if moves and device != "cpu":
                self.balancers.restore()

    Balanced.__name__ = Balanced.__qualname__ = f"Balanced{engine.__name__}"
    return Balanced


def register(choice: Choice, tokens: int = 8192) -> None:
    """Register the engines of actors and critics with verl. Only the first call counts: verl imports
    VERL_USE_EXTERNAL_MODULES before entry points, so settings in such a module replace those of the environment."""
    if _registered:
        return
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.megatron import transformer_impl as engines

    for model_type, engine in (
        ("language_model", engines.MegatronEngineWithLMHead),
        ("value_model", engines.MegatronEngineWithValueHead),
    ):
        made = balanced(engine, choice, tokens)
        _registered.append(EngineRegistry.register(model_type=model_type, backend="megatron", vendor=VENDOR)(made))
