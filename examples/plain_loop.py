"""A training loop of megatron.core alone, in which experts are balanced.

    torchrun --nproc-per-node 2 examples/plain_loop.py

Two lines of `train` are for balancing: the balancer of a model that exists, and the wrapped schedule. Numbers of
micro-batches differ from step to step, as in fine-tuning and reinforcement learning.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron.balanced.cpu.device import choose_device, use_cpu

SEQUENCE, SAMPLES, VOCABULARY = 64, 4, 100


def build(dtype: torch.dtype, *, overlap: bool = True) -> Any:
    """A small mixture of experts on all ranks, which are one expert-parallel group, in DistributedDataParallel."""
    if choose_device("auto") == "cpu":
        use_cpu()  # before megatron.core is imported
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.version.cuda and torch.cuda.is_available() else "gloo")
    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_moe_experts=4 * ranks, moe_router_topk=2,
        moe_ffn_hidden_size=64, moe_token_dispatcher_type="alltoall", expert_model_parallel_size=ranks,
        moe_router_load_balancing_type="none", add_bias_linear=False, gated_linear_unit=True, params_dtype=dtype,
        attention_dropout=0.0, hidden_dropout=0.0, transformer_impl="local",
    )  # fmt: skip
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    model = GPTModel(config, spec, VOCABULARY, SEQUENCE).to(device=torch.cuda.current_device(), dtype=dtype)
    return DistributedDataParallel(config, DistributedDataParallelConfig(overlap_grad_reduce=overlap), model)


def forward_steps() -> Callable:
    """Forward steps on random tokens, other ones on each rank."""
    draw = torch.Generator().manual_seed(dist.get_rank())

    def forward_step(data: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        tokens = torch.randint(0, VOCABULARY // 8, (SAMPLES, SEQUENCE + 1), generator=draw).cuda()
        positions = torch.arange(SEQUENCE, device=tokens.device).expand(SAMPLES, -1)
        losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
        return losses, lambda output: (output.mean(), {"loss": output.detach().mean()})

    return forward_step


def call(run: Callable, model: Any, forward_step: Callable, micro_batches: int, *, forward_only: bool = False) -> float:
    """The mean loss of micro-batches that a schedule runs."""
    losses = run(
        forward_step_func=forward_step, data_iterator=None, model=[model], num_microbatches=micro_batches,
        seq_length=SEQUENCE, micro_batch_size=SAMPLES, forward_only=forward_only,
    )  # fmt: skip
    return sum(float(loss["loss"]) for loss in losses) / len(losses)


def train(steps: int, *, balanced: bool = True, dtype: torch.dtype = torch.float32) -> tuple[list[float], list[dict]]:
    """Train, with an evaluation after each third step. Returns the losses of this rank and its events."""
    model = build(dtype)
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from megatron.balanced.loop import Balancers, ExpertBalancer
    from megatron.balanced.shared.job import Job

    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.0), [model])
    model.config.finalize_model_grads_func, model.config.no_sync_func = finalize_model_grads, model.no_sync
    run, forward_step, events = get_forward_backward_func(), forward_steps(), []
    if balanced:
        experts = ExpertBalancer([model], job=Job(SEQUENCE, SAMPLES, timeout_minutes=10), report=events.append)
        run = Balancers(experts).schedule(run)
    losses = []
    for step in range(steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses.append(call(run, model, forward_step, 1 + step % 3))
        optimizer.step()
        if step % 3 == 2:
            losses.append(call(run, model, forward_step, 1, forward_only=True))
    return losses, [event() for event in events]


if __name__ == "__main__":
    losses, events = train(10)
    if dist.get_rank() == 0:
        print("losses:", *(f"{loss:.4f}" for loss in losses))
        for event in events:
            before, after = (event[f"imbalance_{when}"] for when in ("before", "after"))
            print(f"step {event['iteration']}: busiest rank over mean {before:.2f} -> {after:.2f}", flush=True)
    dist.destroy_process_group()
