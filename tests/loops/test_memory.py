"""What balancers hold: no more after many steps or moves of layers, no slots after `release`, nothing after `close`."""

import gc
from typing import Any

STEPS, TIMES, MOVES = 60, 4, 10


def held_bytes() -> int:
    """Bytes of the storages of all tensors that Python knows."""
    import torch

    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.device.type != "meta":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _moves() -> tuple[list[int], int]:
    """Two stages of two ranks that share experts. Bytes that are held after each of many moves there and back, and the
    most replicas of a step."""
    from tests.support.two_stages import SAMPLES, SEQUENCE, balancer_of, build

    # Weights stay, so that routers choose the same, and what dispatchers keep of a step has the same size.
    loop = build(lambda layer: None, lr=0.0)
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from balancing.experts.config import ExpertConfig
    from megatron.balanced.loop import Balancers, ExpertBalancer
    from megatron.balanced.shared.job import Job

    experts = ExpertBalancer(loop.chunks, ExpertConfig(enabled=True, min_gain=0.0), job=Job(SEQUENCE, SAMPLES, 5))
    layers = balancer_of(loop)
    run = Balancers(experts, layers).schedule(get_forward_backward_func())
    held, replicas = [], 0
    for number in range(MOVES):
        for _ in range(3):
            loop.run(run, 0)
        experts._planner.wait()
        if number % 2 == 0:
            held.append(held_bytes())
        replicas = max(replicas, sum(plan.placed.replicas for plan in experts._plans.values()))
        layers.move("Et*3|tL" if number % 2 == 0 else "Et|t*3L")  # two layers at once
    return held, replicas


def test_layers_with_replicas_leave_nothing_behind_when_they_move(pool):
    for held, replicas in pool.run(4, _moves):
        assert len({*held[2:]}) == 1, f"moves leave something behind: {held}"
        assert replicas, "no replica, so nothing is tested"


def _run() -> dict[str, Any]:
    """Bytes that are held where the memory should be the same, by what is done."""
    import torch
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from balancing.experts.config import ExpertConfig
    from balancing.trials import TrialConfig
    from megatron.balanced.loop import Balancers, ExpertBalancer
    from megatron.balanced.shared.job import Job
    from tests.support.small_moe import SAMPLES, SEQUENCE, build, call, forward_steps

    model = build(torch.float32)
    model.config.finalize_model_grads_func, model.config.no_sync_func = finalize_model_grads, model.no_sync
    forward_step, plain, events = forward_steps(), get_forward_backward_func(), []

    def step(run: Any = plain) -> None:
        model.zero_grad_buffer()
        call(run, model, forward_step, 2)
        for event in events:
            event()
        events.clear()

    held: dict[str, Any] = {"plain": [], "released": [], "restored": [], "steps": []}
    for _ in range(3):
        step()
        held["plain"].append(held_bytes())
    before = {*vars(model.module.decoder.layers[0].mlp)}
    mode = ExpertConfig(enabled=True, min_gain=0.0, replica_mode="resident", late_slots=1)
    experts = ExpertBalancer([model], mode, job=Job(SEQUENCE, SAMPLES, 5), report=events.append)
    balancers = Balancers(experts, trials=TrialConfig(interval=100, pairs=4))
    run = balancers.schedule(plain)
    (chunk,) = experts._chunk_at.values()
    held["slots"] = sum(weights.nbytes for slots in chunk.all_slots for weights in slots._weights)
    del chunk
    for _ in range(4):
        step(run)
    assert any(plan.placed.replicas for plan in experts._plans.values()), "no replica, so nothing is tested"
    for _ in range(TIMES):
        experts.release()
        held["released"].append(held_bytes())
        experts.restore()
        for _ in range(2):
            step(run)
        experts._planner.wait()
        held["restored"].append(held_bytes())
    for number in range(STEPS):
        step(run)
        if number % 20 == 19:
            experts._planner.wait()
            held["steps"].append(held_bytes())
    balancers.close()
    layer = model.module.decoder.layers[0].mlp
    held["attributes"] = sorted({*vars(layer)} ^ before), type(layer).__name__, type(layer.experts).__name__
    del balancers, experts, run, layer
    step()
    held["closed"] = held_bytes()
    return held


def test_balanced_experts_hold_what_they_need_and_no_more(pool):
    for held in pool.run(2, _run):
        print(held)
        (plain,) = {*held["plain"]}
        assert held["closed"] == plain
        assert held["attributes"] == ([], "MoELayer", "SequentialMLP")
        assert len({*held["released"]}) == 1 and len({*held["restored"]}) == 1
        assert held["restored"][0] - held["released"][0] >= held["slots"]
        assert held["released"][0] - plain < held["slots"] / 10, "slots are kept"
        assert len({*held["steps"]}) == 1, "steps leave something behind"
