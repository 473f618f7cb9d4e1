"""A small mixture of experts in DistributedDataParallel, and calls of a schedule, for loops of megatron.core."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron.balanced.cpu.device import choose_device, use_cpu

SEQUENCE, SAMPLES, VOCABULARY = 64, 4, 100


def build(dtype: torch.dtype, *, longest: int = SEQUENCE, overlap: bool = True, **fields: Any) -> Any:
    """A small mixture of experts on all ranks, which are one expert-parallel group, in DistributedDataParallel. Its
    attention takes packed sequences. longest: of sequences. fields: of its config, beside these."""
    if choose_device("auto") == "cpu":
        use_cpu()  # before megatron.core is imported
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron.balanced.local.packed_attention import packed_layers

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
        attention_dropout=0.0, hidden_dropout=0.0, transformer_impl="local", **fields,
    )  # fmt: skip
    model = GPTModel(config, packed_layers(config), VOCABULARY, longest).to(
        device=torch.cuda.current_device(), dtype=dtype
    )
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
