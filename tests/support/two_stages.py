"""Two pipeline stages of a small model whose layers a loop has changed, with moves of layers or without."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tests.support.weights import ADAM_EPS, named_weights

__all__ = ["CHANGED", "LAYOUT", "MOVES", "STEPS", "Case", "Ended", "Loop", "balancer_of", "build", "train"]

STEPS, VOCABULARY, SEQUENCE, SAMPLES = 5, 60, 8, 2
LAYOUT, MOVES = "Ett|ttL", {1: "Et|t*3L", 2: "Et*3|tL"}  # after which step which layers move
CHANGED = (1, 2)  # layers, from 0, both of which travel; the first one has experts


class Case(NamedTuple):
    """change: of a layer.
    distributed: whether the optimizer is, with overlaps and several buckets, on four ranks.
    alone: whether everything else is frozen, so that a stage may have nothing that trains.
    experts: whether experts have replicas, too.
    """

    change: Callable[[Any], None]
    distributed: bool = False
    alone: bool = False
    experts: bool = False


class Loop(NamedTuple):
    """A loop before its first step."""

    chunks: list[Any]
    optimizer: Any
    scheduler: Any
    layer_spec: Any
    run: Callable[[Callable, int], list[Any]]
    """Runs a schedule for a step, and steps the optimizer."""


def build(
    change: Callable[[Any], None],
    distributed: bool = False,
    alone: bool = False,
    layout: str | None = None,
    dense: bool = False,
    lr: float = 1e-2,
) -> Loop:
    """Two stages of a model in which `change` has changed some layers. Parameters as of `Case`.

    layout: in which layers lie first. dense: whether no layer has experts. lr: the learning rate at first.
    """
    from megatron.balanced.cpu.device import use_cpu

    use_cpu()
    import torch.distributed as dist
    from megatron.core import optimizer as optimizers
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.set_default_dtype(torch.float64)
    optimizers.USING_PYTORCH_OPTIMIZER = True  # Transformer Engine's has no float64
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2, expert_model_parallel_size=1 if dense else dist.get_world_size() // 2
    )
    model_parallel_cuda_manual_seed(1)
    ways = 1 if dense else dist.get_world_size() // 2
    config = TransformerConfig(
        num_layers=4, hidden_size=16, num_attention_heads=2, ffn_hidden_size=32, moe_ffn_hidden_size=32,
        num_moe_experts=None if dense else 4, moe_router_topk=2, moe_layer_freq=[0, 1, 0, 0],
        moe_token_dispatcher_type="alltoall", moe_router_load_balancing_type="none", gated_linear_unit=False,
        expert_model_parallel_size=ways, pipeline_model_parallel_size=2, pipeline_model_parallel_layout=layout,
        add_bias_linear=False, params_dtype=torch.float64, pipeline_dtype=torch.float64, attention_dropout=0.0,
        hidden_dropout=0.0, transformer_impl="local",
    )  # fmt: skip

    def layer_spec(vp_stage: int | None) -> Any:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)

    model = GPTModel(
        config, layer_spec(None), VOCABULARY, SEQUENCE, pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    ).double()  # fmt: skip
    torch.manual_seed(2)
    if alone:
        model.requires_grad_(False)
    for layer in model.decoder.layers:
        if layer.layer_number - 1 in CHANGED:
            change(layer)
    how = DistributedDataParallelConfig(
        overlap_grad_reduce=True, use_distributed_optimizer=distributed, bucket_size=1500,
        overlap_param_gather=distributed,
    )  # fmt: skip
    chunk = DistributedDataParallel(config, how, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=lr, min_lr=lr / 10, adam_eps=ADAM_EPS, clip_grad=0.0, params_dtype=torch.float64,
            use_distributed_optimizer=distributed, overlap_param_gather=distributed,
        ),
        [chunk],
    )  # fmt: skip
    scheduler = OptimizerParamScheduler(optimizer, 0.0, lr, lr / 10, 0, 10, "linear", 0.1, 0.1, 10, "constant")
    config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss
    config.no_sync_func, config.grad_sync_func = chunk.no_sync, chunk.start_grad_sync
    replica = parallel_state.get_data_parallel_rank()

    def forward_step(at: Any, module: Any) -> tuple[Any, Any]:
        draw = torch.Generator().manual_seed(next(at) * 2 + replica)
        tokens = torch.randint(0, VOCABULARY, (SAMPLES, SEQUENCE + 1), generator=draw)
        positions = torch.arange(SEQUENCE).expand(SAMPLES, -1)
        losses = module(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
        return losses, lambda output: (output.mean(), {"loss": output.detach().mean()})

    def run(schedule: Callable, step: int) -> list[Any]:
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        given = schedule(
            forward_step_func=forward_step, data_iterator=iter(range(100 * step, 100 * step + 4)), model=[chunk],
            num_microbatches=4, seq_length=SEQUENCE, micro_batch_size=SAMPLES, forward_only=False,
        )  # fmt: skip
        optimizer.step()
        scheduler.step(1)
        return [float(each["loss"]) for each in given]

    return Loop([chunk], optimizer, scheduler, layer_spec, run)


def balancer_of(loop: Loop, **settings: Any) -> Any:
    from balancing.layers.config import LayerConfig
    from megatron.balanced.loop import LayerBalancer
    from megatron.balanced.shared.job import Job

    return LayerBalancer(
        loop.chunks, loop.optimizer, loop.scheduler, LayerConfig(enabled=True, interval=1000),
        layer_spec=loop.layer_spec, job=Job(SEQUENCE, SAMPLES, 5), **settings,
    )  # fmt: skip


class Ended(NamedTuple):
    """A rank after its run. attributes: of each parameter of its layers, by name: what it is noted as."""

    losses: list[float]
    weights: dict[str, Any]
    attributes: dict[str, Any]


def train(case: Case, moves: bool) -> Ended:
    """Train, with `MOVES` or without them and a balancer."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.utils import unwrap_model

    from balancing.experts.config import ExpertConfig
    from megatron.balanced.layers.layer_tensors import named_parameters
    from megatron.balanced.loop import Balancers, ExpertBalancer
    from megatron.balanced.shared.job import Job

    change, distributed, alone, experts = case
    loop, schedule, losses = build(change, distributed, alone), get_forward_backward_func(), []
    if moves:
        job, config = Job(SEQUENCE, SAMPLES, 5), ExpertConfig(enabled=True, min_gain=0.0)
        beside = [ExpertBalancer(loop.chunks, config, job=job)] if experts else []
        layers = balancer_of(loop)
        balancers = Balancers(*beside, layers)
        schedule = balancers.schedule(schedule)
    for step in range(STEPS):
        losses += loop.run(schedule, step)
        if moves:
            balancers.after_step()
            if step in MOVES:
                before = layers.layout
                layers.move(MOVES[step])
                assert layers.layout != before
    for chunk in loop.chunks if distributed else []:
        chunk.start_param_sync(force_sync=True)
    models = unwrap_model(loop.chunks)
    stepped = {id(p) for of in loop.optimizer.param_groups for p in of["params"]}
    attributes = {
        key: (
            p.requires_grad,
            p.is_contiguous(),
            distributed or (id(p) in stepped) == p.requires_grad,
            sorted((name, str(value)) for name, value in vars(p).items() if isinstance(value, bool | int | str)),
        )
        for key, p in named_parameters(models)
    }
    return Ended(losses, named_weights(models), attributes)
