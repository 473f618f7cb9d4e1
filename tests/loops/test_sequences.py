"""Balanced attention in a loop whose sequences stay where it has them: no number changes, and ranks have equal work."""

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.support.sampled import sampled

VOCABULARY, LONGEST, LAYERS = 50, 768, 2
# [step][micro-batch][data-parallel rank]: tokens of the sequences over 6, in multiples of 4 for context parallelism.
RAGGED: list[list[list[list[int]]]] = [
    [[[96, 8], [12, 4, 8]], [[8], [64, 8]]],
    [[[128], [8, 8, 4, 12]]],
    [[[16, 16], [100]], [[8, 80, 4], [8]]],
]


def _tokens(step: int, micro_batch: int, replica: int) -> list[np.ndarray]:
    """Of each sequence: tokens, labels and what each token counts in the loss, [3, length]."""
    draw = np.random.default_rng((step, micro_batch, replica))
    return [
        np.stack([draw.integers(0, VOCABULARY, n), draw.integers(0, VOCABULARY, n), draw.random(n).round(3) * 1000])
        for n in 6 * np.array(RAGGED[step][micro_batch][replica])
    ]


def _rows(values: np.ndarray, way: int, ways: int) -> np.ndarray:
    """The part of a sequence [..., length] that a context-parallel rank has, as Transformer Engine cuts it."""
    if ways == 1:
        return values
    pieces = np.split(values, 2 * ways, axis=-1)
    return np.concatenate([pieces[way], pieces[2 * ways - 1 - way]], axis=-1)


def _train(
    ways: int, balanced: bool, kind: str, trials: bool = False, repeats: int = 1
) -> tuple[list[float], dict[str, Any], list[dict]]:
    """Two data-parallel ranks of `ways` context-parallel ones. Returns the losses of all ranks together, the weights,
    and this rank's events.

    kind: what the model has: words of `KINDS`. With "told", the loop passes lengths.
    trials: whether single steps are left out.
    repeats: of the steps.
    """
    from megatron.balanced.cpu.device import use_cpu

    use_cpu()
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    from balancing.cluster import Cluster
    from balancing.sequences.config import SequenceConfig
    from balancing.trials import TrialConfig
    from megatron.balanced.local.packed_attention import PackedDotProductAttention, PackedLatentDotProductAttention
    from megatron.balanced.loop import Balancers, SequenceBalancer
    from megatron.balanced.shared.job import Job

    class OfEngine(MegatronModule):
        """Has no forward pass of its own, as Megatron-LM has none over context-parallel ranks without Transformer
        Engine."""

        def __init__(self, config: Any, **unused: Any) -> None:
            super().__init__(config)

    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(context_parallel_size=ways)
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    latent = "latents" in kind
    settings: dict[str, Any] = {"num_query_groups": 2}
    if latent:
        settings = {
            "multi_latent_attention": True, "rope_type": "rope", "q_lora_rank": 12, "kv_lora_rank": 8,
            "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 6,
        }  # fmt: skip
    if "window" in kind:
        settings |= {"window_size": (24, 0), "window_attn_skip_freq": 2}
    if "recompute" in kind:
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    config = (MLATransformerConfig if latent else TransformerConfig)(
        num_layers=LAYERS, hidden_size=32, num_attention_heads=4, context_parallel_size=ways,
        params_dtype=torch.float64, attention_dropout=0.0, hidden_dropout=0.0, transformer_impl="local",
        calculate_per_token_loss=True, **settings,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(multi_latent_attention=latent)
    alone = PackedLatentDotProductAttention if latent else PackedDotProductAttention
    spec.submodules.self_attention.submodules.core_attention = OfEngine if ways > 1 else alone
    model: Any = GPTModel(config, spec, VOCABULARY, LONGEST).double()
    for name, parameter in model.named_parameters() if "frozen" in kind else ():
        parameter.requires_grad_(name.startswith(("decoder.layers.1.mlp", "decoder.final", "output")))
    # Several buckets, and reductions under backward passes.
    of_data = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=5000)
    model = DistributedDataParallel(config, of_data, model)
    config.finalize_model_grads_func, config.no_sync_func = finalize_model_grads, model.no_sync
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    replica, way = parallel_state.get_data_parallel_rank(), parallel_state.get_context_parallel_rank()
    run, events = get_forward_backward_func(), []
    if balanced:
        # So slow that even these short sequences are worth a move.
        cluster = Cluster(1, dist.get_world_size(), 1, 1e12, 1e12, 1e6, 1e9)
        asked, job = SequenceConfig(enabled=True), Job(LONGEST, 1, 5)
        sequences = SequenceBalancer([model], asked, job=job, cluster=cluster, report=events.append)
        balancers = Balancers(sequences, trials=TrialConfig(steps=len(RAGGED) * repeats) if trials else None)
        run = balancers.schedule(run)

    def forward_step(at: Any, model: Any) -> tuple[Any, Any]:
        step, micro_batch = next(at)
        sequences = _tokens(step, micro_batch, replica)
        ends = np.cumsum([0, *(part.shape[1] for part in sequences)])
        bounds = torch.tensor(ends, dtype=torch.int32)
        lengths = [part.shape[1] for part in sequences]
        packed: Any = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
        packed.max_seqlen_q = packed.max_seqlen_kv = max(lengths)
        if "told" in kind:
            packed.lengths = lengths + [4] * ("one more" in kind)
        mine = torch.from_numpy(np.concatenate([_rows(part, way, ways) for part in sequences], axis=1))
        places = np.concatenate([_rows(np.arange(part.shape[1]), way, ways) for part in sequences])
        tokens, labels, counts = mine[0].long()[None], mine[1].long()[None], mine[2] / 1000
        losses = model(tokens, torch.from_numpy(places)[None], None, labels=labels, packed_seq_params=packed)

        def loss(output: Any) -> tuple[Any, Any, dict[str, Any]]:
            total = (output.flatten() * counts).sum()
            return total, torch.tensor(mine.shape[1]), {"loss": total.detach()}

        return losses, loss

    told = []
    for step, micro_batches in [*enumerate(RAGGED)] * repeats:
        model.zero_grad_buffer()
        given = run(
            forward_step_func=forward_step, data_iterator=iter([(step, at) for at in range(len(micro_batches))]),
            model=[model], num_microbatches=len(micro_batches), seq_length=LONGEST, micro_batch_size=1,
            forward_only=False,
        )  # fmt: skip
        total = sum(each["loss"] for each in given)
        dist.all_reduce(total)
        told.append(float(total))
        for parameter in filter(lambda each: each.requires_grad, model.parameters()):
            parameter.grad = parameter.main_grad
        optimizer.step()
    if balanced:
        assert [gain.pairs for gain in balancers.gains.values()] == [(len(told) - 2) // 2] * trials
        balancers.close()
        for module in model.modules():
            assert not {"forward", "get_query_key_value_tensors"} & vars(module).keys(), "not the plain model"
    weights = {name: parameter.detach().numpy() for name, parameter in model.module.named_parameters()}
    return told, weights, [event() for event in events]


# If attention is frozen, its kernel has no backward pass, of which a report could tell.
KINDS = ["", "frozen", "recompute", "window, told", "latents", "latents, window", "latents, recompute, told"]


def _spreads(ranks: list[tuple[Any, Any, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """The events of how documents are spread, without those of what calls took."""
    return [event for *_, events in ranks for event in events if event["action"] != "measured"]


@pytest.fixture(scope="module")
def plain(pool) -> Callable[[str], Any]:
    """The losses and weights of a kind without balancers, where neither what is recomputed nor what is told matters."""
    run = cache(lambda kind: pool.run(2, _train, 1, False, kind)[0])
    return lambda kind: run(", ".join(word for word in kind.split(", ") if word not in ("recompute", "told")))


ALWAYS = {
    1: ("frozen", "window, told", "latents", "latents, recompute, told"),
    2: ("", "recompute", "latents, window", "latents, recompute, told"),
}


@pytest.mark.parametrize(
    ("ways", "kind"),
    sampled(itertools.product(ALWAYS, KINDS), *((ways, kind) for ways in ALWAYS for kind in ALWAYS[ways])),
)
def test_attention_is_balanced_where_sequences_stay(pool, plain, ways, kind):
    expected_losses, expected_weights = plain(kind)[:2]
    balanced = pool.run(2 * ways, _train, ways, True, kind)
    for losses, weights, _ in balanced:
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-12)
        for name, expected in expected_weights.items():
            np.testing.assert_allclose(weights[name], expected, rtol=0, atol=1e-12 * np.abs(expected).max())
    measured = {event["way"] for *_, events in balanced for event in events if event["action"] == "measured"}
    assert measured == {"forward"} | ({"backward"} if kind != "frozen" else set())
    events = _spreads(balanced)
    assert [event["iteration"] for event in events] == [1, 2, 3]
    assert sum(event["moved_bytes"] for event in events) > 0
    for event in events:
        # Plans are for layers without a window; of those with one half of these layers is.
        assert event["imbalance_before"] > 1.3 and event["imbalance_after"] < (1.12 if "window" in kind else 1.06)


def test_lengths_of_other_sequences_are_refused(pool):
    with pytest.raises(ValueError, match=r"lengths of \d sequences are given with cu_seqlens of \d; pass one for each"):
        pool.run(2, _train, 1, True, "told one more")


def _with_another_digest() -> None:
    """Train as if this rank had made another plan, if it is rank 1."""
    import os

    from balancing.sequences import SequencePlan

    if os.environ["RANK"] == "1":
        SequencePlan.digest = property(lambda plan: f"another {plan}")  # type: ignore[assignment, method-assign]
    _train(1, True, "")


def test_different_plans_end_the_schedule(pool):
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] made different plans"):
        pool.run(2, _with_another_digest)


def test_trials_leave_single_schedules_plain(pool):
    plain = pool.run(2, _train, 1, False, "", False, 2)[0]
    tried = pool.run(2, _train, 1, True, "", True, 2)
    for losses, weights, _ in tried:
        np.testing.assert_allclose(losses, plain[0], rtol=1e-12)
        for name, expected in plain[1].items():
            np.testing.assert_allclose(weights[name], expected, rtol=0, atol=1e-12 * np.abs(expected).max())
    balanced = [event["iteration"] for event in _spreads(tried)]
    assert len(balanced) == 4 and {1, 2} < {*balanced} < {1, 2, 3, 4, 5, 6}, "of two pairs one step each is left out"
    assert len({3, 4} & {*balanced}) == len({5, 6} & {*balanced}) == 1
