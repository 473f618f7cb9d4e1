"""Layers that move in a loop of megatron.core alone, beside balanced experts: no number changes."""

from typing import Any

import numpy as np
import pytest

from tests.support.weights import assert_same_weights, named_weights

STEPS, LAYERS, VOCABULARY, SEQUENCE, SAMPLES = 6, 5, 60, 16, 2
PIPELINE, EXPERTS = 2, 2  # sizes


def _train(balanced: bool, moves: bool = True) -> tuple[list[float], dict[str, Any], list[str], list[dict], str]:
    """Two stages of two ranks, which share experts. The first layer costs as much as three others.

    Returns the losses of this rank, its weights by global names, the layouts that it was told, its events, and the
    layout that is advised.
    """
    from megatron.balanced.cpu.device import use_cpu

    use_cpu()
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    from balancing.experts.config import ExpertConfig
    from balancing.layers.config import LayerConfig
    from megatron.balanced.loop import Balancers, ExpertBalancer, LayerBalancer
    from megatron.balanced.shared.job import Job
    from tests.support.set_clock import SetClock, slow_layers

    slow_layers(SetClock().install(), lambda number: (1.0, 2.0) if number else (3.0, 6.0))
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=PIPELINE, expert_model_parallel_size=EXPERTS)
    model_parallel_cuda_manual_seed(1)
    stage, replica = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_data_parallel_rank()
    config = TransformerConfig(
        num_layers=LAYERS + 1, hidden_size=16, num_attention_heads=2, num_moe_experts=4, moe_router_topk=2,
        moe_ffn_hidden_size=32, moe_token_dispatcher_type="alltoall", expert_model_parallel_size=EXPERTS,
        pipeline_model_parallel_size=PIPELINE, moe_router_load_balancing_type="none", add_bias_linear=False,
        gated_linear_unit=True, params_dtype=torch.float64, pipeline_dtype=torch.float64, attention_dropout=0.0,
        hidden_dropout=0.0, transformer_impl="local",
    )  # fmt: skip

    def layer_spec(vp_stage: int | None) -> Any:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)

    model: Any = GPTModel(
        config, layer_spec(None), VOCABULARY, SEQUENCE, pre_process=stage == 0, post_process=stage == PIPELINE - 1
    ).double()
    model = DistributedDataParallel(config, DistributedDataParallelConfig(overlap_grad_reduce=True), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, min_lr=1e-3, clip_grad=0.0), [model])
    scheduler = OptimizerParamScheduler(
        optimizer, 0.0, 1e-2, 1e-3, 0, 10, "linear", 0.1, 0.1, 10, "constant"
    )  # fmt: skip
    config.finalize_model_grads_func, config.no_sync_func = finalize_model_grads, model.no_sync
    config.grad_scale_func = optimizer.scale_loss
    run, layouts, events, job = get_forward_backward_func(), [], [], Job(SEQUENCE, SAMPLES, 5)
    if balanced:
        experts = ExpertBalancer([model], ExpertConfig(enabled=True, min_gain=0.0), job=job)
        layers = LayerBalancer(
            [model], optimizer, scheduler, LayerConfig(enabled=True, interval=3), layer_spec=layer_spec, job=job,
            moves=moves, on_layout=layouts.append, report=events.append,
        )  # fmt: skip
        assert layers.layout == "Ettt|tttL"
        balancers = Balancers(experts, layers)
        run = balancers.schedule(run)

    def forward_step(at: Any, model: Any) -> tuple[Any, Any]:
        draw = torch.Generator().manual_seed(next(at) * 2 + replica)
        tokens = torch.randint(0, VOCABULARY // 8, (SAMPLES, SEQUENCE + 1), generator=draw)
        positions = torch.arange(SEQUENCE).expand(SAMPLES, -1)
        losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
        return losses, lambda output: (output.mean(), {"loss": output.detach().mean()})

    told = []
    for step in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        given = run(
            forward_step_func=forward_step, data_iterator=iter(range(100 * step, 100 * step + 4)), model=[model],
            num_microbatches=4, seq_length=SEQUENCE, micro_batch_size=SAMPLES, forward_only=False,
        )  # fmt: skip
        told += [float(each["loss"]) for each in given]
        optimizer.step()
        scheduler.step(1)
        if balanced:
            balancers.after_step()
            if step == 4 and moves:
                layers.move("Ettttt|tL")
    advised = layers.advise() if balanced and not moves else ""
    if balanced and moves:
        assert layers.layout == layouts[-1] == "Et*5|tL"
    return told, named_weights([model.module]), layouts, [event() for event in events], advised


@pytest.fixture(scope="module")
def plain(pool):
    return pool.run(PIPELINE * EXPERTS, _train, False)


def _same(found: list, plain: list) -> None:
    assert_same_weights([weights for _, weights, *_ in found], [weights for _, weights, *_ in plain])
    for (losses, *_), (others, *_) in zip(found, plain, strict=True):
        np.testing.assert_allclose(losses, others, rtol=1e-12)


def test_layers_move_live_and_change_no_number(pool, plain):
    found = pool.run(PIPELINE * EXPERTS, _train, True)
    _same(found, plain)
    for _, _, layouts, _, _ in found:
        assert layouts == ["Ett|t*4L", "Et*5|tL"], "by cost after three steps, then by hand"
    (event,) = [event for *_, events, _ in found for event in events]
    assert event["action"] == "move" and event["imbalance_after"] < event["imbalance_before"]
    assert not any(layouts for _, _, layouts, *_ in plain)


def test_a_loop_without_moves_is_told_the_best_layout(pool, plain):
    found = pool.run(PIPELINE * EXPERTS, _train, True, False)
    _same(found, plain)
    assert {(tuple(layouts), advised) for _, _, layouts, _, advised in found} == {((), "Ett|t*4L")}
