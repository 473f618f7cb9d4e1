"""slime's hook and ms-swift's callback, in loops that call them as slime 0.3 and ms-swift 4.6 do: no number changes.

slime is not on PyPI (`slime` there is another project), and ms-swift's trainer loads models that only GPUs can hold.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.weights import ADAM_EPS

STEPS = 4


class OfSwift:
    """As ms-swift's `MegatronCallback`, all of whose events the trainer calls."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.args, self.state = trainer, trainer.args, trainer.state

    def on_train_begin(self) -> None: ...
    def on_step_begin(self) -> None: ...
    def on_step_end(self) -> None: ...
    def on_train_end(self) -> None: ...


def _slime(balanced: bool) -> tuple[list[float], list[dict]]:
    """slime's `train_one_step` and its `forward_only`, as far as hooks see them. Micro-batches differ by step."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import schedules

    from balancing.experts.config import ExpertConfig
    from megatron.balanced.loops.choice import Choice
    from megatron.balanced.loops.slime import BeforeStep
    from tests.support.small_moe import SAMPLES, SEQUENCE, call, forward_steps

    model, optimizer = _built()
    events: list[Any] = []
    hook = BeforeStep(Choice(experts=ExpertConfig(enabled=True, min_gain=0.0), report=events.append))
    args = SimpleNamespace(
        seq_length=SEQUENCE, micro_batch_size=SAMPLES, distributed_timeout_minutes=5, offload_train=False
    )
    forward_step, losses, plain = forward_steps(), [], schedules.get_forward_backward_func()
    model.config.grad_scale_func, model.config.no_sync_func = optimizer.scale_loss, model.no_sync
    model.config.finalize_model_grads_func = finalize_model_grads
    for step in range(STEPS):
        losses.append(call(schedules.get_forward_backward_func(), model, forward_step, 2, forward_only=True))
        model.zero_grad_buffer()
        optimizer.zero_grad()
        if balanced:
            hook(args, step // 2, step % 2, [model], optimizer, None)
        losses.append(call(schedules.get_forward_backward_func(), model, forward_step, 1 + step % 2))
        optimizer.step()
    for balancers in hook.balancers.values():
        balancers.close()
    assert schedules.get_forward_backward_func() is plain
    if balanced:
        args.offload_train = True
        with pytest.raises(ValueError, match="train without --colocate") as refused:
            BeforeStep()(args, 0, 0, [model], optimizer, None)
        assert "\n" not in str(refused.value)
    return losses, [event() for event in events]


def train_as_swift(of: type) -> list[float]:
    """ms-swift's `train` and `train_step`, as far as callbacks of the class `of` see them. Returns losses."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import schedules

    from tests.support.small_moe import SAMPLES, SEQUENCE, call, forward_steps

    model, optimizer = _built()
    args = SimpleNamespace(seq_length=SEQUENCE, micro_batch_size=SAMPLES, ddp_timeout=300)
    trainer = SimpleNamespace(wrapped_models=[model], optimizer=optimizer, config=model.config, args=args, state=None)
    callbacks = [of(trainer)]

    def call_event(name: str) -> None:
        for each in callbacks:
            getattr(each, name)()

    forward_step, losses, plain = forward_steps(), [], schedules.get_forward_backward_func()
    model.config.grad_scale_func, model.config.no_sync_func = optimizer.scale_loss, model.no_sync
    model.config.finalize_model_grads_func = finalize_model_grads
    call_event("on_train_begin")
    for _ in range(STEPS):
        call_event("on_step_begin")
        run = schedules.get_forward_backward_func()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses.append(call(run, model, forward_step, 2))
        optimizer.step()
        call_event("on_step_end")
    call_event("on_train_end")
    assert schedules.get_forward_backward_func() is plain
    return losses


def _swift(balanced: bool) -> tuple[list[float], list[dict]]:
    from balancing.experts.config import ExpertConfig
    from megatron.balanced.loops.choice import Choice
    from megatron.balanced.loops.swift import callback

    events: list[Any] = []
    choice = Choice(experts=ExpertConfig(enabled=True, min_gain=0.0), report=events.append)
    losses = train_as_swift(callback(OfSwift, choice) if balanced else OfSwift)
    return losses, [event() for event in events]


def _built() -> tuple[Any, Any]:
    import torch

    from tests.support.small_moe import build

    torch.set_default_dtype(torch.float64)
    model = build(torch.float64)
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    return model, get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-2, adam_eps=ADAM_EPS, clip_grad=0.0), [model]
    )


@pytest.mark.parametrize("loop", [_slime, _swift])
def test_the_hook_balances_and_changes_no_number(pool, loop):
    balanced, plain = (pool.run(2, loop, on) for on in (True, False))
    for (losses, _), (expected, told) in zip(balanced, plain, strict=True):
        np.testing.assert_allclose(losses, expected, rtol=1e-12)
        assert not told
    events = [event for _, told in balanced for event in told]
    assert {event["iteration"] for event in events} == set(range(1, STEPS + 1))
    assert sum(event["replicas"] for event in events) > 0, "no replica was used"
