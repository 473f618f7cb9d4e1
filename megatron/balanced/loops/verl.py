"""Balancers in verl's Megatron backend: engines of the vendor "balanced".

    VERL_ENGINE_VENDOR=balanced MEGATRON_BALANCE='{"experts": {"replica_slots": 2}}' python -m verl.trainer.main_ppo ...

verl finds `verl_plugin.py` by its entry point. Settings come from the environment (`choice.py`). To set them in code,
write a module that calls `register` and name it in VERL_USE_EXTERNAL_MODULES.

Where verl replays routing (`router_replay.mode` R2 or R3), replicas are placed for the routing of the step itself.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from megatron.balanced.loop import Balancers
from megatron.balanced.loops.choice import Choice
from megatron.balanced.shared.job import Job
from megatron.balanced.shared.tail import layers_with_tail

__all__ = ["VENDOR", "balanced", "register"]

VENDOR = "balanced"

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
            self.balancers = self.choice.around(self.module, Job(tokens), self._announce)
            return scheduler

        def _announce(self, call: dict[str, Any]) -> None:
            """Tell the balanced experts of routing that is replayed. call: arguments of verl's schedule."""
            if self.choice.experts is None or not _replays(self):
                return
            given = call["data_iterator"]  # one for each model chunk, over the same micro-batches
            batches = [*(given[0] if isinstance(given, list) else given)]
            call["data_iterator"] = [iter(batches) for _ in given] if isinstance(given, list) else iter(batches)
            self.balancers.will_route(replayed_loads(self, batches))

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


def _replays(engine: Any) -> bool:
    from verl.utils.megatron.router_replay_utils import RouterReplayHelper

    model = unwrap_model(engine.module)
    return engine.enable_routing_replay and RouterReplayHelper.is_replay_forward_action(engine.tf_config, model=model)


def replayed_loads(engine: Any, batches: Sequence[Any]) -> list[torch.Tensor]:
    """The loads of a schedule that replays routing, [micro-batch] -> int64 [layer, expert], without those of layers on
    other ranks.

    verl itself cuts the routing of each micro-batch for this rank, as it does again when the micro-batch runs. In mode
    R3 a few tokens without a recorded route, such as the last of each sequence, are routed natively. They are not
    counted.

    batches: verl's micro-batches.
    """
    from verl.utils import tensordict_utils
    from verl.utils.megatron import router_replay_utils as replay

    model, config = unwrap_model(engine.module), engine.tf_config
    layers, loads = layers_with_tail(config), []
    for batch in batches:
        routes, mask = batch["routed_experts"], None
        if engine.engine_config.router_replay.mode == "R3":
            routes = replay.align_r3_router_replay_data(routes, batch["input_ids"])
            mask = replay.build_r3_replay_mask(batch["input_ids"], batch["response_mask"])
        size = tensordict_utils.get_non_tensor_data(batch, key="local_cp_size", default=None)
        replay.set_router_replay_data(
            routes, batch.get("attention_mask"), config, replay_mask=mask, local_cp_size=size, model=model
        )
        loads.append(torch.zeros(layers, config.num_moe_experts, dtype=torch.int64))
        for number, router in replay.iter_model_routers(model):
            experts, known = router.target_topk_idx, router.target_replay_mask
            chosen = torch.zeros(len(experts), config.num_moe_experts, dtype=torch.bool, device=experts.device)
            chosen.scatter_(1, experts, True)  # padding has one expert k times, which counts once
            loads[-1][number - 1] = (chosen if known is None else chosen[known.bool()]).sum(0)
            router.clear_indices()
    return loads


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
