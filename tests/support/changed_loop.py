"""A loop of megatron.core around a small mixture of experts that has been changed before it was wrapped, with balanced
experts or without."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tests.support.weights import ADAM_EPS, assert_same_weights, named_weights

__all__ = ["RANKS", "SAMPLES", "SEQUENCE", "Ended", "build", "compare", "train"]

STEPS, MICRO_BATCHES, RANKS, EXPERTS = 5, 2, 4, 8
SEQUENCE, SAMPLES, VOCABULARY = 16, 2, 60


class Ended(NamedTuple):
    """A rank after its run. sent: bytes by step, of weights and of gradients. plans: of all steps."""

    losses: list[float]
    weights: dict[str, Any]
    events: list[dict]
    sent: list[tuple[int, int]]
    plans: list[str]


def build(change: Callable[[Any], object], overlap: bool, grouped: bool = False) -> Any:
    """A mixture of experts, changed before it is wrapped, in several buckets.

    overlap: whether gradients are reduced under backward passes, and parameters gathered under forward passes.
    grouped: whether layers are Transformer Engine's, in float32, with grouped experts; else megatron.core's in float64.
    """
    from megatron.balanced.cpu.device import use_cpu

    use_cpu()
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron.balanced.local.packed_attention import packed_layers

    dtype = torch.float32 if grouped else torch.float64
    torch.set_default_dtype(dtype)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=3, hidden_size=16, num_attention_heads=2, num_moe_experts=EXPERTS, moe_router_topk=2,
        moe_ffn_hidden_size=32, moe_token_dispatcher_type="alltoall", expert_model_parallel_size=2,
        moe_router_load_balancing_type="none", add_bias_linear=False, gated_linear_unit=True, params_dtype=dtype,
        attention_dropout=0.0, hidden_dropout=0.0, moe_grouped_gemm=grouped, bias_activation_fusion=False,
        gradient_accumulation_fusion=False, attention_backend=AttnBackend.unfused,
        transformer_impl="transformer_engine" if grouped else "local",
    )  # fmt: skip
    layers = get_gpt_decoder_block_spec(config, use_transformer_engine=True) if grouped else packed_layers(config)
    model = GPTModel(config, layers, VOCABULARY, SEQUENCE)
    change(model)
    how = DistributedDataParallelConfig(
        overlap_grad_reduce=overlap, overlap_param_gather=overlap, use_distributed_optimizer=overlap, bucket_size=1500
    )
    return DistributedDataParallel(config, how, model)


def train(change: Callable[[Any], object], balanced: bool, shared: bool, grouped: bool = False) -> Ended:
    """Train a changed model. balanced: with replicas, in slots that layers share if `shared`, which has no overlap."""
    import torch
    import torch.distributed as dist
    from megatron.core import optimizer as megatron_optimizer
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from balancing.experts.config import ExpertConfig
    from megatron.balanced.loop import Balancers, ExpertBalancer
    from megatron.balanced.shared.job import Job

    model = build(change, not shared, grouped)
    options = OptimizerConfig(
        optimizer="adam", lr=1e-2, adam_eps=ADAM_EPS, clip_grad=0.0, params_dtype=model.config.params_dtype,
        use_distributed_optimizer=not shared, overlap_param_gather=not shared,
    )  # fmt: skip
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = not grouped  # Transformer Engine's has no float64
    optimizer = get_megatron_optimizer(options, [model])
    model.config.finalize_model_grads_func, model.config.no_sync_func = finalize_model_grads, model.no_sync
    run, events = get_forward_backward_func(), []
    sent: list[tuple[int, int]] = []
    if balanced:
        slots = {"replica_mode": "shared", "late_slots": 1} if shared else {"replica_mode": "resident"}
        mode = ExpertConfig(enabled=True, min_gain=0.0, **slots)
        experts = ExpertBalancer([model], mode, job=Job(SEQUENCE, SAMPLES, 5), report=events.append)
        run = Balancers(experts).schedule(run)
        (chunk,) = experts._chunk_at.values()
        take = chunk.slots.take_statistics

        def taken() -> Any:
            statistics = take()
            sent.append((statistics.weight_bytes, statistics.gradient_bytes))
            return statistics

        chunk.slots.take_statistics = taken

    def forward_step(at: Any, model: Any) -> tuple[Any, Any]:
        draw = torch.Generator().manual_seed(next(at) * RANKS + dist.get_rank())
        tokens = torch.randint(0, VOCABULARY // 8, (SAMPLES, SEQUENCE + 1), generator=draw)
        losses = model(tokens[:, :-1], torch.arange(SEQUENCE).expand(SAMPLES, -1), None, labels=tokens[:, 1:])
        return losses, lambda output: (output.mean(), {"loss": output.detach().mean()})

    losses: list[float] = []
    plans: list[str] = []
    for step in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        given = run(
            forward_step_func=forward_step, data_iterator=iter(range(100 * step, 100 * step + MICRO_BATCHES)),
            model=[model], num_microbatches=MICRO_BATCHES, seq_length=SEQUENCE, micro_batch_size=SAMPLES,
            forward_only=False,
        )  # fmt: skip
        losses += [float(each["loss"]) for each in given]
        optimizer.step()
        plans += [plan.placed.digest() for plan in experts._plans.values()] if balanced else []
    if not shared:
        model.start_param_sync(force_sync=True)
    return Ended(losses, named_weights([model.module]), [event() for event in events], sent, plans)


def compare(found: list[Ended], plain: list[Ended], tolerance: float = 1e-12) -> None:
    """Raise AssertionError unless the ranks trained the same, with other plans in each group that balance."""
    for rank, other in zip(found, plain, strict=True):
        np.testing.assert_allclose(rank.losses, other.losses, rtol=tolerance)
    assert_same_weights([rank.weights for rank in found], [rank.weights for rank in plain], tolerance)
    assert found[0].plans == found[1].plans != found[2].plans == found[3].plans, "groups do not plan apart"
    events = [event for rank in found for event in rank.events if event["replicas"]]
    assert {event["layer"] for event in events} == {0, 1, 2}
    before, after = (np.mean([event[f"imbalance_{when}"] for event in events]) for when in ("before", "after"))
    assert before > 1.05 and after - 1 < 0.2 * (before - 1)
