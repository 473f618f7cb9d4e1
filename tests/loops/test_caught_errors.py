"""A loop catches the error of a schedule and goes on: the next schedule has the same numbers as without balancers."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.sampled import sampled
from tests.support.weights import ADAM_EPS, assert_same_weights, named_weights

MICRO_BATCHES, TOKENS = 3, 256
# The places that fail, one in each second schedule: when they fail, "before" or in a module's "forward" or "backward"
# pass, the module, and the micro-batch.
PLACES = [
    ("before", "", 0),
    ("forward", "decoder.layers.1.mlp.experts", 0),
    ("forward", "decoder.layers.1.self_attention.linear_proj", 1),
    ("before", "", 2),
    ("forward", "decoder.layers.0.mlp.router", 2),
    ("backward", "decoder.layers.1.mlp.experts", 0),
    ("backward", "decoder.layers.0.self_attention.linear_qkv", 1),
    ("finalize", "", 0),
]


class Fault(RuntimeError):
    """What a loop catches."""


def _forward_steps(fails: list[Any]) -> Callable:
    """Forward steps on packed documents. fails: place of the coming schedule's fault, if it has one."""
    import torch
    import torch.distributed as dist
    from megatron.core.packed_seq_params import PackedSeqParams

    rank = dist.get_rank()

    def forward_step(numbers: Iterator[int], model: Any) -> tuple[Any, Callable]:
        number = next(numbers)
        kind, name, micro_batch = fails[0] if fails else ("", "", 0)
        is_here = bool(fails) and number % MICRO_BATCHES == micro_batch
        if is_here and kind == "before":
            raise Fault(name)
        if is_here and kind in ("entry", "forward", "backward"):
            module = model.module.get_submodule(name)

            def fail(*unused: Any) -> None:
                raise Fault(name)

            def fail_later(module: Any, inputs: Any, output: Any) -> None:
                first = output[0] if isinstance(output, tuple) else output
                if first.requires_grad:
                    first.register_hook(fail)

            if kind == "entry":
                removed.append(module.register_forward_pre_hook(fail))
            else:
                removed.append(module.register_forward_hook(fail if kind == "forward" else fail_later))
        draw = torch.Generator().manual_seed(2 * number + rank)
        tokens = torch.randint(0, 30, (1, TOKENS + 1), generator=draw)
        ends = [*range(0, TOKENS + 1, 16)] if (rank + number) % 2 else [0, TOKENS]
        bounds = torch.tensor(ends, dtype=torch.int32)
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
        losses = model(tokens[:, :-1], torch.arange(TOKENS)[None], None, labels=tokens[:, 1:], packed_seq_params=packed)
        return losses, lambda output: (output.mean(), {"loss": output.detach().mean()})

    removed: list[Any] = []
    forward_step.removed = removed  # type: ignore[attr-defined]
    return forward_step


def _train(balanced: bool, recompute: bool, shared: bool) -> tuple[list[float], dict[str, Any], int]:
    """A loop in which every second schedule fails. Returns losses, weights, and the number of replicas used."""
    import torch

    from tests.support.small_moe import build

    torch.set_default_dtype(torch.float64)
    how = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    model = build(torch.float64, longest=TOKENS, **(how if recompute else {}))
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from balancing.cluster import Cluster
    from balancing.experts.config import ExpertConfig
    from balancing.sequences.config import SequenceConfig
    from megatron.balanced.loop import Balancers, ExpertBalancer, SequenceBalancer
    from megatron.balanced.shared.job import Job

    fails: list[Any] = []

    def finalize(*args: Any, **kwargs: Any) -> None:
        finalize_model_grads(*args, **kwargs)
        if fails and fails[0][0] == "finalize":
            raise Fault

    model.config.finalize_model_grads_func, model.config.no_sync_func = finalize, model.no_sync
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-2, adam_eps=ADAM_EPS, clip_grad=0.0), [model]
    )
    run, events = get_forward_backward_func(), []
    if balanced:
        slow = Cluster(1, 2, 1, 1e12, 1e12, 1e3, 1e9)  # any transfer is worth it
        mode = {"replica_mode": "shared", "late_slots": 1} if shared else {"replica_mode": "resident"}
        experts = ExpertConfig(enabled=True, min_gain=0.0, **mode)
        job, told = Job(TOKENS, 1, 5), {"report": events.append, "cluster": None}
        balancers = Balancers(
            ExpertBalancer([model], experts, job=job, **told),
            SequenceBalancer([model], SequenceConfig(enabled=True), job=job, **(told | {"cluster": slow})),
        )
        run = balancers.schedule(run)
    plain = [type(module) for module in model.modules()]
    forward_step, losses = _forward_steps(fails), []

    def schedule(step: int) -> Any:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        numbers = iter(range(MICRO_BATCHES * step, MICRO_BATCHES * (step + 1)))
        return run(
            forward_step_func=forward_step, data_iterator=numbers, model=[model], num_microbatches=MICRO_BATCHES,
            seq_length=TOKENS, micro_batch_size=1, forward_only=False,
        )  # fmt: skip

    for step, place in enumerate(PLACES):
        losses += [float(each["loss"]) for each in schedule(2 * step)]
        optimizer.step()
        fails[:] = [place]
        with pytest.raises(Fault):
            schedule(2 * step + 1)
        fails.clear()
        while forward_step.removed:
            forward_step.removed.pop().remove()
        assert [type(module) for module in model.modules()] == plain, "attention is not plain after the error"
        assert not any(getattr(module, "active", False) for module in model.modules()), "replicas are still used"
        assert model.config.finalize_model_grads_func is finalize
    losses += [float(each["loss"]) for each in schedule(2 * len(PLACES))]
    optimizer.step()
    if balanced:
        fails[:] = [PLACES[1]]
        with pytest.raises(Fault):
            schedule(0)
        balancers.close()  # with transfers in flight
    told_events = [event() for event in events]
    moved = [event["moved_bytes"] for event in told_events if event["balancer"] == "sequences"]
    assert not balanced or any(moved) or torch.distributed.get_rank(), "no sequence moved"
    replicas = sum(event["replicas"] for event in told_events if event["balancer"] == "experts")
    return losses, named_weights([model.module]), replicas


@pytest.fixture(scope="module")
def plain(pool) -> list[Any]:
    """Of each rank. Neither what is recomputed nor how replicas are held changes a number."""
    return pool.run(2, _train, False, False, False)


@pytest.mark.parametrize(
    "recompute, shared",
    sampled([(False, False), (True, True), (False, True), (True, False)], (False, False), (True, True)),
)
def test_the_next_schedule_has_the_same_numbers(pool, plain, recompute, shared):
    found = pool.run(2, _train, True, recompute, shared)
    for (losses, _, _), (expected, _, _) in zip(found, plain, strict=True):
        np.testing.assert_allclose(losses, expected, rtol=1e-12)
        assert len(losses) == MICRO_BATCHES * (len(PLACES) + 1)
    assert_same_weights([weights for _, weights, _ in found], [weights for _, weights, _ in plain])
    assert sum(replicas for *_, replicas in found) > 0, "no replica was used"


def _leave_apart() -> str:
    """Two ranks leave a schedule on different sides of a transfer. Returns the message of the next schedule."""
    import torch
    import torch.distributed as dist

    from tests.support.small_moe import build

    torch.set_default_dtype(torch.float64)
    model = build(torch.float64, longest=TOKENS)
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from balancing.experts.config import ExpertConfig
    from megatron.balanced.loop import Balancers, ExpertBalancer
    from megatron.balanced.shared.job import Job

    fails: list[Any] = []
    model.config.finalize_model_grads_func, model.config.no_sync_func = finalize_model_grads, model.no_sync
    experts = ExpertBalancer([model], ExpertConfig(enabled=True, min_gain=0.0), job=Job(TOKENS, 1, 5))
    run, forward_step = Balancers(experts).schedule(get_forward_backward_func()), _forward_steps(fails)

    def schedule() -> None:
        model.zero_grad_buffer()
        run(
            forward_step_func=forward_step, data_iterator=iter(range(MICRO_BATCHES)), model=[model],
            num_microbatches=MICRO_BATCHES, seq_length=TOKENS, micro_batch_size=1, forward_only=False,
        )  # fmt: skip

    schedule()
    fails[:] = [("forward" if dist.get_rank() else "entry", "decoder.layers.0.mlp.experts", 0)]
    with pytest.raises(Fault):
        schedule()
    with pytest.raises(RuntimeError) as told:
        schedule()
    return str(told.value)


def test_ranks_that_left_a_schedule_in_different_places_are_told(pool):
    for told in pool.run(2, _leave_apart):
        assert told.startswith("ranks [0, 1] left a schedule of balanced experts at different places, so its transfers")
        assert told.endswith("; let all ranks raise in the same micro-batch, or start again from a checkpoint")
