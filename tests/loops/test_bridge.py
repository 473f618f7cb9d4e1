"""Balancers as a callback of Megatron-Bridge: what the callback does in a loop that calls it as Bridge does."""

import ast
import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

STEPS = 4
# A folder with the package: pip install --no-deps --target FOLDER megatron-bridge==0.6.2
CALLBACKS = Path(os.environ.get("BRIDGE_APART", "none")) / "megatron/bridge/training/callbacks.py"
needs_bridge = pytest.mark.skipif(not CALLBACKS.is_file(), reason="BRIDGE_APART names no folder with Megatron-Bridge")


def _train(balanced: bool, manager: str) -> tuple[list[float], list[dict]]:
    """Bridge's loop, as far as callbacks see it. manager: file of Bridge's callbacks; "" for calls by hand."""
    from types import SimpleNamespace

    import torch

    from tests.support.small_moe import SAMPLES, SEQUENCE, build, call, forward_steps

    torch.set_default_dtype(torch.float64)
    model = build(torch.float64)
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import schedules

    from balancing.experts.config import ExpertConfig
    from megatron.balanced.loops.bridge import Balance

    plain = schedules.forward_backward_no_pipelining
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.0), [model])
    config = SimpleNamespace(
        model=SimpleNamespace(seq_length=SEQUENCE),
        train=SimpleNamespace(micro_batch_size=SAMPLES, train_iters=STEPS),
        dist=SimpleNamespace(distributed_timeout_minutes=5, use_gloo_process_groups=True),
    )
    context: Any = SimpleNamespace(
        state=SimpleNamespace(cfg=config), model=[model], optimizer=optimizer, scheduler=None
    )
    events: list[Any] = []
    fire: Any = lambda name: None  # noqa: E731
    if balanced:
        callback = Balance(experts=ExpertConfig(enabled=True, min_gain=0.0), report=events.append)
        fire = lambda name: getattr(callback, name)(context)  # noqa: E731
        if manager:
            spec = importlib.util.spec_from_file_location("callbacks_of_bridge", manager)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            known = module.CallbackManager()
            known.add(callback)
            fire = lambda name: known.fire(name, context)  # noqa: E731
    fire("on_data_init_start")
    model.config.finalize_model_grads_func, model.config.no_sync_func = finalize_model_grads, model.no_sync
    run, forward_step, losses = schedules.get_forward_backward_func(), forward_steps(), []
    for step in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses.append(call(run, model, forward_step, 1 + step % 2))
        optimizer.step()
        fire("on_train_step_end")
    fire("on_train_end")
    assert schedules.forward_backward_no_pipelining is plain, "still installed"
    return losses, [event() for event in events]


@pytest.mark.parametrize("manager", ["", pytest.param(str(CALLBACKS), marks=needs_bridge, id="of Bridge")])
def test_the_callback_balances_and_changes_no_number(pool, manager):
    balanced, plain = (pool.run(2, _train, on, manager) for on in (True, False))
    for (losses, _), (expected, _) in zip(balanced, plain, strict=True):
        np.testing.assert_allclose(losses, expected, rtol=1e-12)
    events = [event for _, told in balanced for event in told]
    assert {event["iteration"] for event in events} == set(range(1, STEPS + 1))
    assert sum(event["replicas"] for event in events) > 0


@needs_bridge
def test_bridge_has_what_the_callback_reads():
    tree = ast.parse(CALLBACKS.read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    events = {node.name for node in classes["Callback"].body if isinstance(node, ast.FunctionDef)}
    assert {"on_data_init_start", "on_train_step_end", "on_train_end"} <= events
    fields = {node.target.id for node in classes["CallbackContext"].body if isinstance(node, ast.AnnAssign)}
    assert {"state", "model", "optimizer", "scheduler"} <= fields
    config = (CALLBACKS.parent / "config.py").read_text()
    for name in ("optimizer_config_override_provider", "OptimizerConfigOverrideProviderContext", "train_iters"):
        assert name in config
