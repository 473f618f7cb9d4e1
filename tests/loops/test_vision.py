"""Megatron-Bridge's vision-language models in its own `pretrain`: packed samples, some with images, positions of mRoPE.

Qwen3-VL gives features of its vision tower to the first layers of the language model; Qwen3.5-VL has linear attention.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from tests.loops.test_bridge import STEPS, _config, _in

RANKS, PACK, MERGE, PATCH = 4, 640, 2, 2  # MERGE: patches of an image, each way, that are one token
IMAGE, VIDEO, START = 100, 101, 102  # tokens
MODELS = ("Qwen3-VL", "Qwen3.5-VL")


class Packs(torch.utils.data.Dataset):
    """Micro-batches of packed sequences. Every third one has no image."""

    def __len__(self) -> int:
        return 8 * STEPS

    def __getitem__(self, number: int) -> dict[str, Any]:
        draw = np.random.default_rng(number)
        lengths = [4 * int(length) for length in draw.integers(3, 16, 4)] if number % 2 else [PACK, 12]
        tokens, grids = [], []
        for length in lengths:
            sequence = draw.integers(0, 64, length)
            height, width = (2 * draw.integers(1, 3, 2)).tolist()
            if number % 3 and (size := height * width // MERGE**2) < length - 3:
                begin = int(draw.integers(0, length - size - 2))
                sequence[begin], sequence[begin + 1 : begin + 1 + size] = START, IMAGE
                grids.append((1, height, width))
            tokens.append(sequence)
        patches = sum(height * width for _, height, width in grids)
        pixels = draw.standard_normal((patches, 3 * 2 * PATCH**2))
        return {"tokens": np.concatenate(tokens), "lengths": lengths, "grids": grids, "pixels": pixels}

    @staticmethod
    def collate_fn(samples: list[dict[str, Any]]) -> dict[str, Any]:
        """What Bridge's collators make of a pack."""
        from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs

        (sample,) = samples
        tokens = torch.from_numpy(sample["tokens"])[None]
        ends = torch.tensor([0, *np.cumsum(sample["lengths"])], dtype=torch.int32)
        longest = torch.tensor(max(sample["lengths"]))
        batch = {"tokens": tokens, "labels": tokens.roll(-1, 1), "loss_mask": (tokens < IMAGE).float()}
        batch |= {"position_ids": None, "attention_mask": None, "visual_inputs": None}
        batch |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), ends)
        batch |= dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), longest)
        if sample["grids"]:
            pixels = torch.from_numpy(sample["pixels"]).to(torch.get_default_dtype())
            batch["visual_inputs"] = GenericVisualInputs(pixels, image_grid_thw=torch.tensor(sample["grids"]))
        return batch


def _provider(name: str, base: Any) -> Any:
    """A small model of Bridge's with what `base`, the model of other tests of its loop, sets."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.models.qwen_vl.qwen3_vl_provider import Qwen3VLMoEModelProvider
    from megatron.bridge.models.qwen_vl.qwen35_vl_provider import Qwen35VLMoEModelProvider
    from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeVisionConfig
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

    from tests.support.stand_ins import gated_delta_net

    unset = GPTModelProvider(base.num_layers, base.hidden_size, base.num_attention_heads)
    given = {field.name: getattr(base, field.name) for field in dataclasses.fields(base) if field.init}
    given = {field: value for field, value in given.items() if value != getattr(unset, field)}
    given |= {
        "num_layers": 4, "hidden_size": 32, "num_attention_heads": 2, "num_query_groups": 2, "kv_channels": 16,
        "position_embedding_type": "mrope", "mrope_section": [3, 3, 2], "rotary_percent": 1.0, "seq_length": 2 * PACK,
        "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "patch_size": PATCH,
        "freeze_language_model": False, "freeze_vision_model": False, "moe_permute_fusion": False,
        "moe_router_topk": 2, "bias_activation_fusion": False, "bias_dropout_fusion": False,
        "persist_layer_norm": False, "moe_router_load_balancing_type": "none", "calculate_per_token_loss": True,
        "variable_seq_lengths": True,
    }  # fmt: skip
    tower: dict[str, Any] = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": PATCH,
        "out_hidden_size": 32, "num_position_embeddings": 16, "spatial_merge_size": MERGE, "temporal_patch_size": 2,
    }  # fmt: skip
    if name == "Qwen3-VL":
        vision = Qwen3VLVisionConfig(**tower, deepstack_visual_indexes=[0, 1])
        return Qwen3VLMoEModelProvider(vision_config=vision, **given)
    gated_delta_net.install()
    given |= {
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_attention_freq": 2, "moe_shared_expert_intermediate_size": 32,
    }  # fmt: skip
    return Qwen35VLMoEModelProvider(vision_config=Qwen3_5MoeVisionConfig(**tower), **given)


def _train(name: str, balancers: tuple[str, ...], pipeline: int = 1) -> tuple[list[float], list[dict], list[int]]:
    """Bridge's `pretrain` of a model. Returns losses and norms of this rank, its events, and whether each of its
    micro-batches went through the vision tower."""
    from megatron.bridge.data.base import DatasetProvider
    from megatron.bridge.training.pretrain import pretrain
    from megatron.bridge.training.vlm_step import forward_step
    from megatron.core.utils import unwrap_model

    from balancing.cluster import Cluster
    from balancing.experts.config import ExpertConfig
    from balancing.layers.config import LayerConfig
    from balancing.sequences.config import SequenceConfig
    from megatron.balanced.loops.bridge import Balance

    @dataclass(kw_only=True)
    class Given(DatasetProvider):
        seq_length: int
        skip_getting_attention_mask_from_dataset: bool = True

        def build_datasets(self, context: Any) -> tuple[Any, None, None]:
            return Packs(), None, None

    _in("float32")  # Bridge builds these models of Transformer Engine's layers only
    config = _config(pipeline, "", False)
    config.model, config.validation.eval_iters = _provider(name, config.model), 0
    config.dataset = Given(seq_length=2 * PACK, num_workers=0, dataloader_type="single", data_sharding=True)
    config.ddp.overlap_grad_reduce = config.ddp.overlap_param_gather = False  # as in Bridge's recipes of these models
    config.ddp.align_param_gather = config.optimizer.overlap_param_gather = False
    events: list[Any] = []
    settings = {
        "experts": ExpertConfig(enabled=True, min_gain=0.0),
        "sequences": SequenceConfig(enabled=True),
        "layers": LayerConfig(enabled=True, interval=3),
    }
    slow = Cluster(1, RANKS, 1, 1e12, 1e12, 1e6, 1e9)  # so that even these short sequences are worth a move
    chosen: dict[str, Any] = {balancer: settings[balancer] for balancer in balancers}
    callbacks: list[Any] = [Balance(**chosen, cluster=slow, report=events.append)] if balancers else []
    losses: list[float] = []
    images: list[int] = []

    class Record:
        def on_train_start(self, context: Any) -> None:
            (model,) = unwrap_model(context.model)
            model.register_forward_pre_hook(lambda *unused: images.append(0))
            model.vision_model.register_forward_hook(lambda *unused: images.__setitem__(-1, 1))

        def on_train_step_end(self, context: Any) -> None:
            (model,) = unwrap_model(context.model)
            assert not any(module._forward_pre_hooks for module in model.vision_model.modules()), (
                "not all ranks call it"
            )
            losses.extend(float(value) for value in (context.loss_dict or {}).values())
            losses.append(float(context.grad_norm))

    pretrain(config, forward_step, callbacks=[*callbacks, Record()])
    return losses, [event() for event in events], images


@pytest.fixture(scope="module")
def plain(bridge) -> dict[str, list]:
    """Model -> its runs without balancers."""
    return {name: bridge.run(RANKS, _train, name, ()) for name in MODELS}


@pytest.mark.parametrize("balancers", [("experts",), ("sequences",), ("experts", "sequences")], ids="+".join)
@pytest.mark.parametrize("name", MODELS)
def test_balanced_equals_unbalanced(bridge, plain, name, balancers):
    balanced = bridge.run(RANKS, _train, name, balancers)
    for (losses, _, images), (expected, none, seen) in zip(balanced, plain[name], strict=True):
        np.testing.assert_allclose(losses, expected, rtol=2e-6)  # float32
        assert len(losses) >= 2 * STEPS and not none and images == seen
    assert len({tuple(images) for *_, images in balanced}) > 1, "all ranks call the tower alike"
    events = [event for _, told, _ in balanced for event in told]
    for balancer in balancers:
        moved = [event for event in events if event["balancer"] == balancer and event["moved_bytes"]]
        assert moved, f"{balancer}: nothing moved"


@pytest.mark.parametrize("name", MODELS)
def test_layers_beside_a_tower_do_not_move(bridge, name):
    with pytest.raises(ValueError, match=r"layers of a Qwen3VLModel cannot move, since it has some in \w+_model"):
        bridge.run(RANKS, _train, name, ("layers",), 2)
