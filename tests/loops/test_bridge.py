"""Balancers as a callback of Megatron-Bridge 0.6.2, in its own `pretrain`: no number changes."""

import contextlib
import io
from typing import Any

import numpy as np
import pytest

STEPS, SAVED, RANKS, SEQUENCE = 6, 4, 4, 32  # SAVED: the step after which there is a checkpoint


def _config(pipeline: int, folder: str, exact: bool) -> Any:
    """A small mixture of experts on mock data, in Bridge's containers. Parameters as of `_train`."""
    import torch
    import torch.nn.functional as F
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.training import config
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.enums import AttnBackend

    def local_layers(provider: Any, vp_stage: int | None = None) -> Any:
        """Without Transformer Engine, which has no float64."""
        return get_gpt_decoder_block_spec(provider, use_transformer_engine=False, vp_stage=vp_stage)

    full = torch.get_default_dtype()
    spec = {"transformer_impl": "local", "transformer_layer_spec": local_layers} if exact else {}
    provider = GPTModelProvider(
        num_layers=4, hidden_size=32, ffn_hidden_size=64, num_attention_heads=2, vocab_size=128,
        seq_length=SEQUENCE, num_moe_experts=4, moe_ffn_hidden_size=32, moe_router_topk=2,
        moe_token_dispatcher_type="alltoall", moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-2, moe_grouped_gemm=not exact, expert_model_parallel_size=2,
        normalization="RMSNorm", activation_func=F.silu, gated_linear_unit=True,
        position_embedding_type="rope", add_bias_linear=False, attention_dropout=0.0,
        hidden_dropout=0.0, share_embeddings_and_output_weights=False, apply_rope_fusion=False,
        masked_softmax_fusion=False, persist_layer_norm=False, bias_dropout_fusion=False,
        bias_activation_fusion=False, gradient_accumulation_fusion=False, cross_entropy_loss_fusion=False,
        make_vocab_size_divisible_by=1, params_dtype=full, pipeline_dtype=full,
        pipeline_model_parallel_size=pipeline, attention_backend=AttnBackend.unfused, **spec,
    )  # fmt: skip
    return config.ConfigContainer(
        model=provider,
        train=config.TrainingConfig(
            train_iters=STEPS, global_batch_size=8, micro_batch_size=1, exit_signal_handler=False
        ),
        validation=config.ValidationConfig(eval_interval=3, eval_iters=1),
        optimizer=config.OptimizerConfig(
            optimizer="adam", lr=1e-2, min_lr=1e-3, bf16=False, fp16=False, clip_grad=0.0,
            use_distributed_optimizer=True, overlap_param_gather=True,
        ),
        scheduler=config.SchedulerConfig(
            lr_decay_style="linear", lr_warmup_iters=0, lr_decay_iters=10, start_weight_decay=0.1, end_weight_decay=0.1,
            weight_decay_incr_style="constant",
        ),
        ddp=config.DistributedDataParallelConfig(
            overlap_grad_reduce=True, overlap_param_gather=True, use_distributed_optimizer=True, align_param_gather=True
        ),
        dist=config.DistributedInitConfig(distributed_backend="gloo", distributed_timeout_minutes=5),
        dataset=config.MockGPTDatasetConfig(
            random_seed=1, reset_attention_mask=False, reset_position_ids=False, eod_mask_loss=False,
            seq_length=SEQUENCE, num_dataset_builder_threads=1, data_sharding=True, dataloader_type="single",
            num_workers=0,
        ),
        logger=config.LoggerConfig(log_interval=100),
        tokenizer=config.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=127),
        checkpoint=config.CheckpointConfig(
            save=folder or None, save_interval=SAVED, async_save=False
        ),
        rng=config.RNGConfig(seed=1),
    )  # fmt: skip


def _train(
    balanced: bool, pipeline: int, folder: str = "", exact: bool = True, step: int | None = None
) -> tuple[list[float], list[dict]]:
    """Bridge's `pretrain`. Returns losses and norms of this rank, and its events.

    pipeline: stages; with more than one, layers are balanced. folder: for checkpoints, if any. step: of that to resume
    from. exact: in float64 without Transformer Engine, which has no float64; else with its layers.
    """
    import torch
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from megatron.core import optimizer

    from balancing.experts.config import ExpertConfig
    from balancing.layers.config import LayerConfig
    from megatron.balanced.loops.bridge import Balance, resume_layout
    from tests.support.set_clock import SetClock, slow_layers

    slow_layers(SetClock().install(), lambda number: (1.0, 2.0) if number else (3.0, 6.0))
    torch.set_default_dtype(torch.float64 if exact else torch.float32)
    optimizer.USING_PYTORCH_OPTIMIZER = exact
    losses, events = [], []

    class Record:
        def on_train_step_end(self, context: Any) -> None:
            losses.extend(float(value) for value in (context.loss_dict or {}).values())
            losses.append(float(context.grad_norm))

    callbacks: list[Any] = [Record()]
    if balanced:
        experts = ExpertConfig(enabled=True, min_gain=0.0)
        layers = LayerConfig(enabled=True, interval=3) if pipeline > 1 else None
        callbacks.append(Balance(experts=experts, layers=layers, report=events.append))
    config = _config(pipeline, folder, exact)
    config.checkpoint.load, config.checkpoint.ckpt_step = folder if step else None, step
    resume_layout(config)
    pretrain(config, forward_step, callbacks=callbacks)
    return losses, [event() for event in events]


def _check_balance(runs: list, pipeline: int) -> None:
    events = [event for _, told in runs for event in told]
    experts = [event for event in events if event["balancer"] == "experts"]
    assert {event["iteration"] for event in experts} == set(range(1, STEPS + 1))
    later = [event for event in experts if event["replicas"]]
    before, after = (np.mean([event[f"imbalance_{when}"] for event in later]) for when in ("before", "after"))
    assert before > 1.03 and after - 1 < 0.1 * (before - 1)
    moves = [event for event in events if event["balancer"] == "layers" and event["action"] == "move"]
    assert len(moves) == (pipeline > 1)
    assert all(event["imbalance_after"] < event["imbalance_before"] for event in moves)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_pretrain_balances_and_changes_no_number(bridge, pipeline):
    balanced, plain = (bridge.run(RANKS, _train, on, pipeline) for on in (True, False))
    _check_balance(balanced, pipeline)
    for (losses, _), (expected, told) in zip(balanced, plain, strict=True):
        np.testing.assert_allclose(losses, expected, rtol=1e-12)
        assert len(losses) >= STEPS and not told


def test_transformer_engines_layers_move_and_a_checkpoint_resumes_where_they_were(bridge, tmp_path):
    folder = str(tmp_path / "checkpoints")
    balanced, resumed = (bridge.run(RANKS, _train, True, 2, folder, False, step) for step in (None, SAVED))
    plain = bridge.run(RANKS, _train, False, 2, "", False)
    _check_balance(balanced, 2)
    for (losses, _), (expected, _), (later, _) in zip(balanced, plain, resumed, strict=True):
        np.testing.assert_allclose(losses, expected, rtol=2e-6)  # float32
        ended = len(losses) // STEPS * (STEPS - SAVED)
        np.testing.assert_allclose(later, losses[-ended:], rtol=2e-6)


def _example(overrides: list[str]) -> tuple[list[dict], str]:
    from examples.bridge_recipe import show, train

    events: list[Any] = []
    train("gpt.vanilla_gpt_pretrain_config", overrides, events.append)
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        for event in events:
            show(event)
    return [event() for event in events], shown.getvalue()


def test_the_example_balances_a_recipe(bridge):
    overrides = """
        model.num_layers=4 model.hidden_size=32 model.num_attention_heads=2 model.seq_length=32
        model.add_bias_linear=false model.num_moe_experts=4
        model.moe_ffn_hidden_size=32 model.moe_router_topk=2 model.attention_dropout=0
        model.hidden_dropout=0 model.moe_token_dispatcher_type=alltoall model.moe_grouped_gemm=true
        model.expert_model_parallel_size=2 model.pipeline_model_parallel_size=2 model.persist_layer_norm=false
        model.masked_softmax_fusion=false model.bias_dropout_fusion=false model.gradient_accumulation_fusion=false
        dataset.seq_length=32 dataset.num_workers=0 dist.distributed_backend=gloo train.train_iters=4
        train.global_batch_size=8 train.micro_batch_size=1 train.exit_signal_handler=false validation.eval_iters=0
        optimizer.lr=1e-2 optimizer.bf16=false scheduler.lr_warmup_iters=0 mixed_precision=null
        logger.tensorboard_dir=null tokenizer.vocab_size=127 checkpoint.save=null
    """.split()
    told = bridge.run(RANKS, _example, overrides)
    events = [event for of_rank, _ in told for event in of_rank]
    assert {event["iteration"] for event in events if event["balancer"] == "experts"} == {1, 2, 3, 4}
    assert any("experts replicate, imbalance" in shown for _, shown in told)
