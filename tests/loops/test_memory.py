"""What balancers hold: no more after many steps or moves of layers, no slots after `release`, nothing after `close`."""

import gc
from typing import Any

STEPS, TIMES, MOVES = 120, 10, 20


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
    replicas of the last step."""
    from megatron.balanced.cpu.device import use_cpu

    use_cpu()
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    from balancing.experts.config import ExpertConfig
    from megatron.balanced.loop import Balancers, ExpertBalancer, LayerBalancer
    from megatron.balanced.shared.job import Job
    from tests.loops.test_layers import EXPERTS, PIPELINE, SAMPLES, SEQUENCE, VOCABULARY, Case, _model

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=PIPELINE, expert_model_parallel_size=EXPERTS)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=4, hidden_size=16, num_attention_heads=2, num_moe_experts=4, moe_router_topk=2,
        moe_ffn_hidden_size=32, moe_token_dispatcher_type="alltoall", expert_model_parallel_size=EXPERTS,
        pipeline_model_parallel_size=PIPELINE, moe_router_load_balancing_type="none", add_bias_linear=False,
        gated_linear_unit=True, pipeline_dtype=torch.float32, attention_dropout=0.0, hidden_dropout=0.0,
        transformer_impl="local", batch_p2p_comm=True,
    )  # fmt: skip
    torch.set_default_dtype(torch.float64)
    config.params_dtype = config.pipeline_dtype = torch.float64
    chunks, layer_spec = _model(Case("", "", "", 4), config)
    # Weights stay, so that routers choose the same, and what dispatchers keep of a step has the same size.
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.0, params_dtype=torch.float64), chunks)
    config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss
    config.no_sync_func, config.grad_sync_func = chunks[0].no_sync, chunks[0].start_grad_sync
    job = Job(SEQUENCE, SAMPLES, 5)
    experts = ExpertBalancer(chunks, ExpertConfig(enabled=True, min_gain=0.0), job=job)
    scheduler = OptimizerParamScheduler(optimizer, 0.0, 0.0, 0.0, 0, 10, "constant", 0.0, 0.0, 10, "constant")
    layers = LayerBalancer(chunks, optimizer, scheduler, layer_spec=layer_spec, job=job)
    run = Balancers(experts, layers).schedule(get_forward_backward_func())
    draw = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    tokens = torch.randint(0, VOCABULARY // 8, (SAMPLES, SEQUENCE + 1), generator=draw)

    def forward_step(at: Any, model: Any) -> tuple[Any, Any]:
        positions = torch.arange(SEQUENCE).expand(SAMPLES, -1)
        losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
        return losses, lambda output: (output.mean(), {"loss": output.detach().mean()})

    held = []
    for number in range(MOVES):
        for _ in range(3):
            chunks[0].zero_grad_buffer()
            optimizer.zero_grad()
            run(
                forward_step_func=forward_step, data_iterator=iter(()), model=chunks, num_microbatches=2,
                seq_length=SEQUENCE, micro_batch_size=SAMPLES, forward_only=False,
            )  # fmt: skip
            optimizer.step()
        experts._planner.wait()
        if number % 2 == 0:
            held.append(held_bytes())
        layers.move("Ettt|tL" if number % 2 == 0 else "Et|tttL")  # two layers at once
    return held, sum(plan.placed.replicas for plan in experts._plans.values())


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
