"""Balanced experts in a loop of megatron.core alone: no number changes, and wrong use is one line."""

import numpy as np
import pytest

STEPS = 7


def _train(balanced: bool) -> tuple[list[float], list[dict]]:
    import torch

    from examples.plain_loop import train

    torch.set_default_dtype(torch.float64)
    return train(STEPS, balanced=balanced, dtype=torch.float64)


def test_a_plain_loop_balances_and_changes_no_number(pool):
    balanced, plain = (pool.run(2, _train, on) for on in (True, False))
    for (losses, _), (expected, _) in zip(balanced, plain, strict=True):
        np.testing.assert_allclose(losses, expected, rtol=1e-12)
        assert len(losses) == STEPS + STEPS // 3 and losses[-1] < losses[0] - 1, "nothing was trained"
    events = [event for _, told in balanced for event in told]
    assert {event["iteration"] for event in events} == set(range(1, STEPS + 1))
    later = [event for event in events if event["iteration"] > 2]
    assert sum(event["replicas"] for event in later) > 0, "no replica was used"
    before, after = (np.mean([event[f"imbalance_{when}"] for event in later]) for when in ("before", "after"))
    assert after - 1 < 0.5 * (before - 1)
    assert not any(told for _, told in plain)


def _other_contract(balanced: bool, overlap: bool) -> tuple[list[float], float, list[dict]]:
    """A loop that looks schedules up itself, ends gradients by hand, has torch's optimizer, runs two schedules a step
    with other numbers of micro-batches, and a pass without gradients of a model in training mode in between. Replica
    slots are released for a while once they have replicas.

    overlap: gradients are reduced under backward passes, with one schedule a step.
    """
    import torch

    from examples.plain_loop import SAMPLES, SEQUENCE, build, call, forward_steps

    torch.set_default_dtype(torch.float64)
    model = build(torch.float64, overlap=overlap)
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megatron.balanced.loop import Balancers, ExpertBalancer
    from megatron.balanced.shared.job import Job

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model.config.no_sync_func = model.no_sync if overlap else None
    forward_step, events = forward_steps(), []
    plain = get_forward_backward_func()
    if balanced:
        experts = ExpertBalancer([model], job=Job(SEQUENCE, SAMPLES, 5), report=events.append)
        balancers = Balancers(experts)
        balancers.install()
    losses = []
    for step in range(STEPS):
        run = get_forward_backward_func()
        if balanced and step == 4:
            experts.release()
            assert all(module.slots is None for module in model.modules() if hasattr(module, "position"))
            with pytest.raises(ValueError, match=r"call restore\(\)"):
                call(run, model, forward_step, 1)
            experts.restore()
        for parameter in model.parameters():
            parameter.grad = None
        model.zero_grad_buffer()
        losses.append(call(run, model, forward_step, 2 + step % 2))
        assert sum(type(module) is MoELayer for module in model.modules()) == 2, "not the plain model"
        losses.append(call(run, model, forward_step, 1, forward_only=True))
        if not overlap:
            losses.append(call(run, model, forward_step, 1 + step % 3))
        finalize_model_grads([model])
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad
        optimizer.step()
    if balanced:
        balancers.close()
    assert get_forward_backward_func() is plain
    norm = float(torch.stack([parameter.detach().norm() for parameter in model.parameters()]).norm())
    return losses, norm, [event() for event in events]


@pytest.mark.parametrize("overlap", [False, True], ids=["two schedules", "overlap"])
def test_a_loop_with_another_contract_changes_no_number(pool, overlap):
    balanced, plain = (pool.run(2, _other_contract, on, overlap) for on in (True, False))
    for (losses, norm, _), (expected, its_norm, _) in zip(balanced, plain, strict=True):
        np.testing.assert_allclose([*losses, norm], [*expected, its_norm], rtol=1e-12)
    events = [event for *_, told in balanced for event in told]
    assert {event["iteration"] for event in events} == set(range(1, (1 if overlap else 2) * STEPS + 1)), (
        "one a schedule"
    )
    assert sum(event["replicas"] for event in events) > 0, "no replica was used"


def _refusals() -> list[str]:
    from megatron.balanced.cpu.device import use_cpu

    use_cpu()
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron.balanced.loop import Balancers, ExpertBalancer
    from megatron.balanced.shared.callbacks import StepCallback
    from megatron.balanced.shared.job import Job

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    job, linear = Job(8, 1, 5), torch.nn.Linear(2, 2)
    linear.config = config
    dense = DistributedDataParallel(config, DistributedDataParallelConfig(), linear)
    told = []
    for wrong in (
        lambda: ExpertBalancer([linear], job=job),
        lambda: ExpertBalancer([dense], job=job),
        lambda: Balancers(StepCallback(), StepCallback()),
    ):
        with pytest.raises(ValueError) as refused:
            wrong()
        told.append(str(refused.value))
    return told


def test_wrong_use_is_one_line_that_says_the_way_out(pool):
    ((unwrapped, dense, twice),) = pool.run(1, _refusals)
    assert "Linear cannot be balanced; wrap it in megatron.core's DistributedDataParallel" in unwrapped
    assert "has no MoE layer" in dense and "is given twice" in twice
    assert not any("\n" in line for line in (unwrapped, dense, twice))
