"""Experts that a loop has changed, frozen or adapted have replicas and train the same model, or are refused by name."""

import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.support.sampled import sampled
from tests.support.weights import ADAM_EPS, assert_same_weights, named_weights

STEPS, MICRO_BATCHES, RANKS, EXPERTS = 5, 2, 4, 8
SEQUENCE, SAMPLES, VOCABULARY = 16, 2, 60
CASES = (
    "frozen",
    "one frozen",
    "half frozen",
    "adapters",
    "adapters of one layer",
    "adapters of attention",
    "parametrized",
)
REFUSED = (
    "replaced forward", "gradient hook", "forward hook", "buffer", "one adapter", "one rank", "other scales",
    "other scales on ranks", "replaced layer",
)  # fmt: skip


class Ended(NamedTuple):
    """A rank after its run. sent: bytes by step, of weights and of gradients. plans: of the last step."""

    losses: list[float]
    weights: dict[str, Any]
    events: list[dict]
    sent: list[tuple[int, int]]
    plans: list[str]


def _model(change: Any, overlap: bool) -> Any:
    """A mixture of experts in float64, changed before it is wrapped, in several buckets."""
    from megatron.balanced.cpu.device import use_cpu

    use_cpu()
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron.balanced.local.packed_attention import packed_layers

    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=3, hidden_size=16, num_attention_heads=2, num_moe_experts=EXPERTS, moe_router_topk=2,
        moe_ffn_hidden_size=32, moe_token_dispatcher_type="alltoall", expert_model_parallel_size=2,
        moe_router_load_balancing_type="none", add_bias_linear=False, gated_linear_unit=True,
        params_dtype=torch.float64, attention_dropout=0.0, hidden_dropout=0.0, transformer_impl="local",
    )  # fmt: skip
    model = GPTModel(config, packed_layers(config), VOCABULARY, SEQUENCE)
    change(model)
    how = DistributedDataParallelConfig(
        overlap_grad_reduce=overlap, overlap_param_gather=overlap, use_distributed_optimizer=overlap, bucket_size=1500
    )
    return DistributedDataParallel(config, how, model)


def _train(name: str, balanced: bool, shared: bool) -> Ended:
    import torch
    import torch.distributed as dist
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from balancing.experts.config import ExpertConfig
    from megatron.balanced.loop import Balancers, ExpertBalancer
    from megatron.balanced.shared.job import Job
    from tests.support.changed_models import CHANGES

    model = _model(CHANGES[name], overlap=not shared)
    options = OptimizerConfig(
        optimizer="adam", lr=1e-2, adam_eps=ADAM_EPS, clip_grad=0.0, params_dtype=torch.float64,
        use_distributed_optimizer=not shared, overlap_param_gather=not shared,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(options, [model])
    model.config.finalize_model_grads_func, model.config.no_sync_func = finalize_model_grads, model.no_sync
    run, events = get_forward_backward_func(), []
    sent: list[tuple[int, int]] = []
    if balanced:
        mode = ExpertConfig(enabled=True, min_gain=0.0, replica_mode="shared" if shared else "resident")
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

    losses = []
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
    if not shared:
        model.start_param_sync(force_sync=True)
    plans = [plan.placed.digest() for plan in experts._plans.values()] if balanced else []
    return Ended(losses, named_weights([model.module]), [event() for event in events], sent, plans)


@pytest.mark.parametrize(
    "name, shared", sampled(itertools.product(CASES, (False, True)), *((name, name[0] in "ap") for name in CASES))
)
def test_changed_experts_have_replicas_and_train_the_same(pool, name, shared):
    found, plain = (pool.run(RANKS, _train, name, on, shared) for on in (True, False))
    for rank, other in zip(found, plain, strict=True):
        np.testing.assert_allclose(rank.losses, other.losses, rtol=1e-12)
    assert_same_weights([rank.weights for rank in found], [rank.weights for rank in plain])
    assert found[0].plans == found[1].plans != found[2].plans == found[3].plans, "groups do not plan apart"
    events = [event for rank in found for event in rank.events if event["replicas"]]
    assert {event["layer"] for event in events} == {0, 1, 2}
    before, after = (np.mean([event[f"imbalance_{when}"] for event in events]) for when in ("before", "after"))
    assert before > 1.05 and after - 1 < 0.2 * (before - 1)
    weights, gradients = (sum(sent[kind] for rank in found for sent in rank.sent) for kind in (0, 1))
    assert weights > 0
    if name in ("frozen", "adapters of attention"):
        assert gradients == 0, "gradients of experts that do not train were sent"
    elif name == "adapters":
        assert 0 < gradients < weights / 2, "gradients of frozen weights were sent"
    else:
        assert gradients > 0


def _refused(name: str) -> tuple[str, list[str]]:
    """What is refused, and the classes of the MoE layers then."""
    from megatron.balanced.loop import ExpertBalancer
    from megatron.balanced.shared.job import Job
    from tests.support.changed_models import EXPERTS_REFUSED

    change, expected = EXPERTS_REFUSED[name]
    model = _model(change, overlap=False)
    with pytest.raises(ValueError) as error:
        ExpertBalancer([model], job=Job(SEQUENCE, SAMPLES, 5))
    assert expected in str(error.value), str(error.value)
    return str(error.value), [
        type(module).__name__ for module in model.modules() if hasattr(module, "token_dispatcher")
    ]


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_replica_would_not_have_is_refused_by_name(pool, name):
    told = pool.run(2, _refused, name)
    assert len({message for message, _ in told}) == 1, "ranks were told different reasons"
    message, classes = told[0]
    assert "; " in message and "\n" not in message
    assert classes == ["MoELayer"] * 3, "the model is not plain any more"
