"""Balancers in verl 0.9.1: its own engine trains, on batches of ragged sequences, and no number changes.

Modes: the model is "offloaded" between updates, and its rows are padded sequences; its rows are "packed" sequences; the
routing of packed sequences is replayed as an earlier pass recorded it ("R2"), or as a rollout did ("R3").
"""

from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.support.packages_apart import why_missing
from tests.support.weights import ADAM_EPS

STEPS, RANKS, SEQUENCES, VOCABULARY, EXPERTS = 6, 4, 8, 128, 4
REPLAYED, PACKED = ("R2", "R3"), ("packed", "R2", "R3")
pytestmark = pytest.mark.skipif(why_missing("verl", "verl") is not None, reason=str(why_missing("verl", "verl")))


def _engine(mode: str, events: list) -> Any:
    """verl's engine of an actor, of the vendor that the environment names. Its model is a small one of ours."""
    from types import SimpleNamespace

    import torch
    import torch.nn.functional as F
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from verl.workers.config import McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.config.engine import EngineRouterReplayConfig
    from verl.workers.engine.base import EngineRegistry

    from balancing.cluster import Cluster
    from balancing.experts.config import ExpertConfig
    from balancing.sequences.config import SequenceConfig
    from megatron.balanced.local.packed_attention import PackedDotProductAttention, packed_layers
    from megatron.balanced.loops.choice import Choice

    class Causal(DotProductAttention):
        """Rows are padded at their end, so that the causal mask is enough. Megatron-LM's takes verl's mask amiss."""

        def forward(self, query: Any, key: Any, value: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
            return super().forward(query, key, value, None, **kwargs)

    def local_layers(provider: Any, vp_stage: int | None = None) -> Any:
        return packed_layers(provider, vp_stage, PackedDotProductAttention if mode in PACKED else Causal)

    class Tiny(EngineRegistry.get_engine_cls("language_model", "megatron")):
        choice = Choice(  # read by a balanced engine alone
            experts=ExpertConfig(enabled=True, min_gain=0.0),
            sequences=SequenceConfig(enabled=True) if mode == "packed" else None,
            cluster=Cluster(
                1, RANKS, 1, 1e12, 1e12, 1e6, 1e9
            ),  # so slow that even these short sequences are worth a move
            report=events.append,
        )

        def _build_tf_config(self) -> None:
            full = torch.get_default_dtype()
            self.is_value_model, self.share_embeddings_and_output_weights = False, False
            self.param_dtype = self.dtype = full
            self.vanilla_bridge, self.peft_cls, self.tf_config = False, None, None
            self.bridge = SimpleNamespace(load_hf_weights=lambda *args, **kwargs: None)
            self.provider = GPTModelProvider(
                num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=2, seq_length=64,
                vocab_size=VOCABULARY, num_moe_experts=EXPERTS, moe_ffn_hidden_size=32, moe_router_topk=2,
                moe_token_dispatcher_type="alltoall", moe_router_load_balancing_type="none", moe_grouped_gemm=False,
                expert_model_parallel_size=2, normalization="RMSNorm", activation_func=F.silu, gated_linear_unit=True,
                position_embedding_type="rope", add_bias_linear=False, attention_dropout=0.0, hidden_dropout=0.0,
                share_embeddings_and_output_weights=False, apply_rope_fusion=False, masked_softmax_fusion=False,
                persist_layer_norm=False, bias_dropout_fusion=False, bias_activation_fusion=False,
                gradient_accumulation_fusion=False, cross_entropy_loss_fusion=False, make_vocab_size_divisible_by=1,
                transformer_impl="local", transformer_layer_spec=local_layers, params_dtype=full, pipeline_dtype=full,
                variable_seq_lengths=True, moe_enable_routing_replay=mode in REPLAYED,
            )  # fmt: skip
            self.provider.finalize()
            self.provider.fp16 = self.provider.bf16 = None  # with False, Bridge takes float32

    described = SimpleNamespace(architectures=["Qwen3MoeForCausalLM"], hidden_size=32, model_type="qwen3_moe")
    model = SimpleNamespace(
        hf_config=described, model_type="language_model", local_path=None, architectures=described.architectures,
        get=lambda name, default=None: default, share_embeddings_and_output_weights=False,
        mtp=SimpleNamespace(enable=False, enable_train=False), tokenizer=SimpleNamespace(pad_token_id=0),
        get_processor=lambda: None,
    )  # fmt: skip
    settings = McoreEngineConfig(
        expert_model_parallel_size=2, use_remove_padding=mode in PACKED, use_distributed_optimizer=True,
        sequence_parallel=False, param_offload=mode == "offloaded", optimizer_offload=False, use_fused_kernels=False,
        override_ddp_config={"overlap_grad_reduce": True, "grad_reduce_in_fp32": False},
        router_replay=EngineRouterReplayConfig(mode=mode if mode in REPLAYED else "disabled"),
    )  # fmt: skip
    optimizer = McoreOptimizerConfig(
        lr=1e-2,
        override_optimizer_config={"adam_eps": ADAM_EPS},
        clip_grad=0.0,
        total_training_steps=10,
        lr_decay_steps=10,
        lr_warmup_steps=0,
        lr_decay_style="constant",
    )
    return Tiny(model, settings, optimizer, None)


def _announce(engine: Any, announced: list, loads: list) -> None:
    announced.extend(loads)
    type(engine.balancers).will_route(engine.balancers, loads)


def _check_announced(engine: Any, announced: list, mode: str) -> None:
    """What was announced is what the layers of this rank have then routed, but for tokens that R3 routes natively."""
    from megatron.core import parallel_state

    layers = [module for chunk in engine.module for module in chunk.modules() if hasattr(module, "loads")]
    assert len(layers) == 2 and bool(announced) == (mode in REPLAYED)
    for number, layer in enumerate(layers if announced else ()):
        assert len(announced) == len(layer.loads)
        for known, routed in zip(announced, layer.loads, strict=True):
            native = routed[parallel_state.get_expert_model_parallel_rank()] - known[number].numpy()
            assert (native >= 0).all() and native.sum() <= (0 if mode == "R2" else 2 * SEQUENCES)


def _train(vendor: str, mode: str) -> tuple[list[float], list[int], str, list[dict]]:
    """Updates of an actor. Returns the losses and norms of this rank, numbers of micro-batches, the engine's class, and
    events."""
    import os

    import torch
    import torch.distributed as dist
    from megatron.core import optimizer as optimizers
    from tensordict import TensorDict
    from verl.utils import tensordict_utils
    from verl.utils.dataset.dataset_utils import DatasetPadMode

    os.environ["VERL_ENGINE_VENDOR"] = vendor
    torch.set_default_dtype(torch.float64)
    optimizers.USING_PYTORCH_OPTIMIZER = True  # Transformer Engine's has no float64
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    told, numbers, events = [], [], []
    engine = _engine(mode, events)
    engine.initialize()

    def loss_function(model_output: Any = None, data: Any = None, dp_group: Any = None, **kwargs: Any) -> Any:
        if model_output is None:
            return None
        predicted, mask = model_output["log_probs"].values(), data["loss_mask"].values().double()
        return -(predicted * mask).sum() / data["batch_num_tokens"] * data["dp_size"], {}

    def ragged(rows: list) -> Any:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    def routes(rows: int) -> Any:
        """Experts of each token, [token, layer, k], as a rollout recorded them. The first is the hottest."""
        return (torch.rand(rows, 2, EXPERTS, generator=draw) * torch.arange(EXPERTS, 0, -1)).topk(2).indices

    draw, scale = torch.Generator().manual_seed(100 + dist.get_rank()), 12 if mode in PACKED else 1
    for step in range(STEPS):
        lengths = (scale * torch.randint(4, 60, (SEQUENCES,), generator=draw)).tolist()
        data = TensorDict(
            {
                "input_ids": ragged([torch.randint(1, VOCABULARY // 4, (size,), generator=draw) for size in lengths]),
                "position_ids": ragged([torch.arange(size) for size in lengths]),
                "loss_mask": ragged([torch.ones(size, dtype=torch.long) for size in lengths]),
                "temperature": torch.ones(SEQUENCES),
            },
            batch_size=[SEQUENCES],
        )
        tensordict_utils.assign_non_tensor(
            data, use_dynamic_bsz=True, max_token_len_per_gpu=scale * (64 + 64 * (step % 3)), calculate_entropy=False,
            pad_mode=DatasetPadMode.NO_PADDING,
        )  # fmt: skip
        if mode == "R3":  # there is no route of the last token, or there is
            data["routed_experts"] = ragged([routes(size - row % 2) for row, size in enumerate(lengths)])
            data["response_mask"] = torch.ones(SEQUENCES, 4, dtype=torch.long)
        if mode in REPLAYED:
            tensordict_utils.assign_non_tensor(data, enable_routing_replay=True)
        if mode == "R2":
            with engine.eval_mode():
                recorded = engine.infer_batch(data)
            data["routed_experts"] = recorded["model_output"]["routed_experts"]
        announced: list = []
        if vendor:
            engine.balancers.will_route = partial(_announce, engine, announced)
        with engine.train_mode():
            output = engine.train_batch(data, loss_function)
        if vendor:
            _check_announced(engine, announced, mode)
        told += [sum(output["loss"]), float(output["metrics"]["grad_norm"])]
        numbers.append(len(output["loss"]))
    return told, numbers, type(engine).__mro__[1].__name__, [event() for event in events]


@pytest.mark.parametrize("mode", ["offloaded", *PACKED])
def test_train_batch_balances_and_changes_no_number(bridge, mode):
    balanced, plain = (bridge.run(RANKS, _train, vendor, mode) for vendor in ("balanced", ""))
    for (losses, numbers, engine, _), (expected, same, unbalanced, told) in zip(balanced, plain, strict=True):
        np.testing.assert_allclose(losses, expected, rtol=1e-12)
        assert numbers == same and len({*numbers}) > 1, "the numbers of micro-batches should differ from step to step"
        assert engine == "BalancedMegatronEngineWithLMHead" and unbalanced == "MegatronEngineWithLMHead" and not told
    events = [event for *_, told in balanced for event in told]
    if mode in REPLAYED:
        of_experts = [event for event in events if event["balancer"] == "experts"]
        assert {event["plan_age"] for event in of_experts} == {0}, "placed by a prediction"
        assert any(event["replicas"] for event in of_experts if event["iteration"] == 1)
    for balancer in ("experts", "sequences") if mode == "packed" else ("experts",):
        of_steps = [event for event in events if event["balancer"] == balancer]
        assert {event["iteration"] for event in of_steps} == set(range(1, STEPS + 1))
        moved = [event for event in of_steps if event["moved_bytes"]]
        before, after = (np.mean([event[f"imbalance_{when}"] for event in moved]) for when in ("before", "after"))
        left = 0.2 if balancer == "experts" else 0.6  # sequences this short have few tiles to share
        assert before > 1.03 and after - 1 < left * (before - 1), balancer
