"""A training loop on megatron.core alone that balances experts, attention and layers, and resumes from its checkpoints.

    torchrun --nproc-per-node 4 examples/plain_loop.py FOLDER

There are two pipeline stages. The two ranks of a stage are one expert-parallel group. Samples are packed documents.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.balanced.cpu.device import choose_device, use_cpu

if choose_device("auto") == "cpu":
    use_cpu()  # before megatron.core is imported

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from balancing.cluster import Cluster
from balancing.layers.config import LayerConfig
from megatron.balanced.local.packed_attention import packed_layers
from megatron.balanced.loop import Balancers, ExpertBalancer, LayerBalancer, SequenceBalancer

TOKENS, VOCABULARY, MICRO_BATCHES = 1024, 500, 4
SLOW = Cluster(1, 4, 1, 1e12, 1e12, 1e6, 1e9)  # compute is so slow that even short documents are worth a transfer


def build(layout: str) -> Any:
    """The model chunk of this rank."""
    config = TransformerConfig(
        num_layers=6, hidden_size=32, num_attention_heads=4, num_moe_experts=8, moe_router_topk=2,
        moe_ffn_hidden_size=64, moe_token_dispatcher_type="alltoall", moe_router_load_balancing_type="none",
        pipeline_model_parallel_size=2, pipeline_model_parallel_layout=layout, expert_model_parallel_size=2,
        add_bias_linear=False, gated_linear_unit=True, attention_dropout=0.0, hidden_dropout=0.0,
        transformer_impl="local", params_dtype=torch.get_default_dtype(), pipeline_dtype=torch.get_default_dtype(),
        finalize_model_grads_func=finalize_model_grads,
    )  # fmt: skip
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    model = GPTModel(config, packed_layers(config), VOCABULARY, TOKENS, pre_process=first, post_process=last)
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model.cuda())


def forward_step(seeds: Any, model: Any) -> tuple[torch.Tensor, Any]:
    """The losses of one micro-batch: random tokens in one document or in eight. seeds: iterator, one a micro-batch."""
    draw = torch.Generator().manual_seed(2 * next(seeds) + parallel_state.get_data_parallel_rank())
    tokens = torch.randint(0, VOCABULARY // 8, (1, TOKENS + 1), generator=draw).cuda()
    length = TOKENS // (1 if torch.rand((), generator=draw) < 0.5 else 8)
    bounds = torch.arange(0, TOKENS + 1, length, dtype=torch.int32).cuda()
    packed: Any = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    packed.lengths = [length] * (TOKENS // length)  # else the host waits for `bounds`
    positions = torch.arange(TOKENS)[None].cuda() % length
    losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:], packed_seq_params=packed)
    return losses, lambda output: (output.mean(), {"loss": output.detach().mean()})


def train(steps: int, folder: Path) -> tuple[list[float], Any, str, list[dict[str, Any]]]:
    """Train up to step `steps`, with a checkpoint in `folder` every five steps.

    Returns the losses of this rank since it began or resumed, the model chunk, the layout of layers, and the events of
    the balancers.
    """
    dist.init_process_group()
    torch.cuda.set_device(dist.get_node_local_rank())
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, expert_model_parallel_size=2)
    model_parallel_cuda_manual_seed(1)
    saved = sorted(each for each in folder.iterdir() if dist_checkpointing.check_is_distributed_checkpoint(each))
    begin = dist_checkpointing.load_common_state_dict(saved[-1]) if saved else {"step": 0, "layout": "Etttt|ttL"}
    model = build(begin["layout"])
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, min_lr=1e-4, clip_grad=0.0), [model])
    scheduler = OptimizerParamScheduler(optimizer, 0.0, 1e-3, 1e-4, 0, 50, "linear", 0.0, 0.0, 50, "constant")

    events: list[Any] = []
    experts = ExpertBalancer([model], report=events.append)
    sequences = SequenceBalancer([model], cluster=SLOW, report=events.append)
    layer_spec, often = partial(packed_layers, model.config), LayerConfig(enabled=True, interval=4)
    layers = LayerBalancer([model], optimizer, scheduler, often, layer_spec=layer_spec, report=events.append)
    balancers = Balancers(experts, sequences, layers)
    run = balancers.schedule(get_forward_backward_func())

    def state(loading: bool) -> dict[str, Any]:
        weights = {"model": model.module.sharded_state_dict()}
        return weights | {"optimizer": optimizer.sharded_state_dict(weights, is_loading=loading)}

    if saved:
        loaded = dist_checkpointing.load(state(True), saved[-1])
        model.module.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        scheduler.load_state_dict(begin["scheduler"])
    losses: list[float] = []
    for step in range(begin["step"], steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        given = run(
            forward_step_func=forward_step, data_iterator=iter(range(step * MICRO_BATCHES, (step + 1) * MICRO_BATCHES)),
            model=[model], num_microbatches=MICRO_BATCHES, seq_length=TOKENS, micro_batch_size=1, forward_only=False,
        )  # fmt: skip
        losses += [float(each["loss"]) for each in given]  # empty except on the last stage
        optimizer.step()
        scheduler.step(1)
        balancers.after_step()  # layers may move when the next schedule begins
        if (step + 1) % 5 == 0:
            path = folder / f"{step + 1:06}"
            path.mkdir(exist_ok=True)
            begin = {"step": step + 1, "layout": layers.layout, "scheduler": scheduler.state_dict()}
            dist_checkpointing.save(state(False) | begin, path)
    return losses, model, layers.layout, [event() for event in events]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for event in train(10, folder)[-1]:
        if event["iteration"] == 10:
            before, after = event["imbalance_before"], event["imbalance_after"]
            print(f"{event['balancer']} {event['unit']}: imbalance {before:.2f} -> {after:.2f}", flush=True)
    dist.destroy_process_group()
