"""Balancers as a callback of Megatron-Bridge 0.6.2, in its own `pretrain`: no number changes."""

import contextlib
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.sampled import sampled
from tests.support.weights import ADAM_EPS

STEPS, SAVED, RANKS, SEQUENCE = 6, 4, 4, 32  # SAVED: the step after which there is a checkpoint
PACK, VOCABULARY = 768, 128  # tokens of a micro-batch of packed sequences


def _config(pipeline: int, folder: str, exact: bool, core: type | None = None) -> Any:
    """A small mixture of experts on mock data, in Bridge's containers. Parameters as of `_train`.

    core: the class of core attention without Transformer Engine; None for Megatron-LM's own.
    """
    import torch
    import torch.nn.functional as F
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.training import config
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnBackend

    from megatron.balanced.local.packed_attention import packed_layers

    def local_layers(provider: Any, vp_stage: int | None = None) -> Any:
        """Without Transformer Engine, which has no float64."""
        return packed_layers(provider, vp_stage, core or DotProductAttention)

    full = torch.get_default_dtype()
    spec = {"transformer_impl": "local", "transformer_layer_spec": local_layers} if exact else {}
    provider = GPTModelProvider(
        num_layers=4, hidden_size=32, ffn_hidden_size=64, num_attention_heads=2, vocab_size=VOCABULARY,
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
            adam_eps=ADAM_EPS, use_distributed_optimizer=True, overlap_param_gather=True,
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
        tokenizer=config.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCABULARY - 1),
        checkpoint=config.CheckpointConfig(
            save=folder or None, save_interval=SAVED, async_save=False
        ),
        rng=config.RNGConfig(seed=1),
    )  # fmt: skip


def _pretrain(config: Any, callbacks: list[Any]) -> list[float]:
    """Bridge's `pretrain`. Returns losses and norms of this rank."""
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    losses = []

    class Record:
        def on_train_step_end(self, context: Any) -> None:
            losses.extend(float(value) for value in (context.loss_dict or {}).values())
            losses.append(float(context.grad_norm))

    pretrain(config, forward_step, callbacks=[*callbacks, Record()])
    return losses


def _in(precision: str) -> None:
    import torch
    from megatron.core import optimizer

    torch.set_default_dtype(getattr(torch, precision))
    optimizer.USING_PYTORCH_OPTIMIZER = precision == "float64"  # Transformer Engine's has no float64


def _train(
    balanced: bool, pipeline: int, folder: str = "", exact: bool = True, step: int | None = None
) -> tuple[list[float], list[dict]]:
    """Bridge's `pretrain`. Returns losses and norms of this rank, and its events.

    pipeline: stages; with more than one, layers are balanced. folder: for checkpoints, if any. step: of that to resume
    from. exact: in float64 without Transformer Engine, which has no float64; else with its layers.
    """
    from balancing.experts.config import ExpertConfig
    from balancing.layers.config import LayerConfig
    from megatron.balanced.loops.bridge import Balance, resume_layout
    from tests.support.set_clock import SetClock, slow_layers

    slow_layers(SetClock().install(), lambda number: (1.0, 2.0) if number else (3.0, 6.0))
    _in("float64" if exact else "float32")
    callbacks, events = [], []
    if balanced:
        experts = ExpertConfig(enabled=True, min_gain=0.0)
        layers = LayerConfig(enabled=True, interval=3) if pipeline > 1 else None
        callbacks.append(Balance(experts=experts, layers=layers, report=events.append))
    config = _config(pipeline, folder, exact)
    config.checkpoint.load, config.checkpoint.ckpt_step = folder if step else None, step
    resume_layout(config)
    return _pretrain(config, callbacks), [event() for event in events]


def _pack(folder: Path) -> None:
    """Write what Bridge makes of a dataset for fine-tuning when it packs offline: sequences of different lengths, which
    the end-of-sequence token pads to multiples of four tokens."""
    draw, end, packs = np.random.default_rng(1), VOCABULARY - 2, []
    for number in range(8 * STEPS):
        rooms = [704, 4] if number % 3 == 0 else (4 * draw.integers(4, 40, 4)).tolist()
        pack: dict[str, list[int]] = {"input_ids": [], "seq_start_id": [], "loss_mask": []}
        for room in rooms:
            padded = int(draw.integers(0, 4))
            pack["seq_start_id"].append(len(pack["input_ids"]))
            pack["input_ids"] += [*draw.integers(0, VOCABULARY // 8, room + 1 - padded).tolist(), *[end] * padded]
            pack["loss_mask"] += [int(at >= room // 3) for at in range(room + 1)]  # the rest is the prompt
        packs.append(pack)
    np.save(folder / "packed.npy", np.array(packs, dtype=object), allow_pickle=True)
    (folder / "packed.json").write_text(json.dumps([]))


def _finetune(ways: int, balanced: bool, exact: bool, folder: str) -> tuple[list[float], list[dict]]:
    """Fine-tuning on the packs in `folder`, over `ways` context-parallel ranks. exact: as of `_train`."""
    from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetConfig
    from megatron.bridge.data.packing.config import PackedSequenceSpecs
    from megatron.bridge.training import initialize
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer
    from megatron.core.transformer.module import MegatronModule

    from balancing.cluster import Cluster
    from balancing.experts.config import ExpertConfig
    from balancing.sequences.config import SequenceConfig
    from megatron.balanced.local.packed_attention import PackedDotProductAttention
    from megatron.balanced.loops.bridge import Balance
    from megatron.balanced.sequences import in_place

    class OfEngine(MegatronModule):
        """Has no forward pass of its own, as Megatron-LM has none over context-parallel ranks without Transformer
        Engine."""

        def __init__(self, config: Any, **unused: Any) -> None:
            super().__init__(config)

    _in("float64" if exact else "float32")
    NullTokenizer.eos_id = NullTokenizer.eod  # what datasets for fine-tuning ask for
    initialize._warmup_jit_function = lambda *unused: None  # draws as much as there are tokens, which moves the weights
    config = _config(1, "", exact, OfEngine if ways > 1 else PackedDotProductAttention)
    model = config.model
    model.context_parallel_size, model.calculate_per_token_loss, model.seq_length = ways, True, PACK
    model.moe_router_load_balancing_type = "none"
    config.validation.eval_iters = 0
    packs = Path(folder)
    config.dataset = GPTSFTDatasetConfig(
        seq_length=PACK, dataset_root=folder, enable_offline_packing=True, do_validation=False, do_test=False,
        num_workers=0, offline_packing_specs=PackedSequenceSpecs(
            packed_sequence_size=PACK, packed_train_data_path=packs / "packed.npy",
            packed_metadata_path=packs / "packed.json",
            pad_seq_to_mult=4 if exact else 1,  # with 1, lengths include padding, which the engine does not take here
        ),
    )  # fmt: skip
    callbacks, events, told = [], [], []
    read = in_place._Given.read

    def known_on_the_host(given: Any, before: Any = None) -> tuple[int, ...]:
        told.append(given.lengths == tuple(given.ends.diff().tolist()))
        return read(given, before)

    in_place._Given.read = known_on_the_host  # type: ignore[method-assign]
    if balanced:
        slow = Cluster(1, 2 * ways, 1, 1e12, 1e12, 1e6, 1e9)  # so that even these short sequences are worth a move
        experts, sequences = ExpertConfig(enabled=True, min_gain=0.0), SequenceConfig(enabled=True)
        callbacks.append(Balance(experts=experts, sequences=sequences, cluster=slow, report=events.append))
    losses = _pretrain(config, callbacks)
    assert all(told) and len(told) >= balanced * STEPS * config.train.global_batch_size // 2
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
    ((layouts, said),) = bridge.run(1, _resumed_layouts, folder)
    moved = layouts.pop("same")
    assert moved == "Et|tttL"
    assert len(layouts) == 5 and {*layouts.values()} == {"E|ttttL"}, "a layout of other sizes was taken over"
    assert said.count("\n") == said.count(f"the checkpoint's layout {moved} is left alone") == 5, said


def _resumed_layouts(folder: str) -> tuple[dict[str, Any], str]:
    """The layout with which a run of each of these sizes resumes, and what is printed."""
    from balancing.layers.config import LayerConfig
    from megatron.balanced.loops.bridge import Balance, resume_layout

    own, found, said = "E|ttttL", {}, io.StringIO()
    changed: dict[str, dict[str, Any]] = {
        "same": {}, "one stage": {"pipeline_model_parallel_size": 1}, "more layers": {"num_layers": 6},
        "chunks": {"virtual_pipeline_model_parallel_size": 2}, "four stages": {"pipeline_model_parallel_size": 4},
        "prediction": {"mtp_num_layers": 1},
    }  # fmt: skip
    for name, sizes in changed.items():
        config = _config(2, folder, False)
        config.checkpoint.load, config.checkpoint.ckpt_step = folder, SAVED
        vars(config.model).update(pipeline_model_parallel_layout=own, **sizes)
        with contextlib.redirect_stdout(said):
            resume_layout(config)
        found[name] = config.model.pipeline_model_parallel_layout
    config.checkpoint.ckpt_assume_constant_structure = True
    run = SimpleNamespace(state=SimpleNamespace(cfg=config), model=None)
    with pytest.raises(ValueError, match="LayerBalancer is incompatible with ckpt_assume_constant_structure=True"):
        Balance(layers=LayerConfig(enabled=True)).on_data_init_start(run)
    return found, said.getvalue()


def _example(overrides: list[str]) -> tuple[list[dict], str]:
    from balancing.cluster import Cluster
    from examples.bridge_recipe import show, train

    one_rate = Cluster.sheet("h100-8x400g")  # at measured rates so few tokens are not worth a replica
    Cluster.preset = lambda name, *, nodes=1: one_rate  # type: ignore[method-assign,assignment]
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


@pytest.mark.parametrize("exact", sampled([True, False], True), ids=["exact", "engine"])
def test_packed_sequences_are_balanced_over_context_parallel_ranks(bridge, tmp_path, exact):
    _pack(tmp_path)
    # Megatron-LM has no attention over context-parallel ranks in these precisions.
    plain = bridge.run(2, _finetune, 1, False, exact, str(tmp_path))
    balanced = bridge.run(RANKS, _finetune, 2, True, exact, str(tmp_path))
    for losses, _ in balanced:
        np.testing.assert_allclose(losses, plain[0][0], rtol=1e-12 if exact else 2e-6)
        assert len(losses) == 2 * STEPS
    events = [event for _, told in balanced for event in told]
    for balancer in ("experts", "sequences"):
        of_steps = [event for event in events if event["balancer"] == balancer]
        assert {event["iteration"] for event in of_steps} == set(range(1, STEPS + 1))
        moved = [event for event in of_steps if event["moved_bytes"]]
        before, after = (np.mean([event[f"imbalance_{when}"] for event in moved]) for when in ("before", "after"))
        assert before > 1.03 and after - 1 < 0.2 * (before - 1), balancer
