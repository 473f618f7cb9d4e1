"""Adapters of other packages around layers that move: Megatron-Bridge's LoRA and DoRA, and Hugging Face's LoRA for
megatron.core's linear layers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.packages_apart import why_missing
from tests.support.two_stages import Case, train
from tests.support.weights import assert_same_weights


def bridge_lora(layer: Any) -> None:
    from megatron.bridge.peft.lora import LoRA

    LoRA(target_modules=["linear_qkv", "linear_proj"], dim=2, alpha=4, lora_B_init_method="xavier")(layer)


def bridge_dora(layer: Any) -> None:
    from megatron.bridge.peft.dora import DoRA

    DoRA(target_modules=["linear_qkv", "linear_proj"], dim=2, alpha=4, lora_B_init_method="xavier")(layer)


def without_bias(module: Any, args: Any, output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def huggingface_lora(layer: Any) -> None:
    """PEFT's module for megatron.core's linear layers. In 0.21.2 its `get_peft_model` fails with these, and its forward
    function takes no bias from them."""
    from megatron.core import tensor_parallel
    from peft import LoraConfig
    from peft.tuners.lora.tp_layer import LoraParallelLinear

    layer.requires_grad_(False)
    for name in ("linear_qkv", "linear_proj"):
        base = getattr(layer.self_attention, name)
        adapter = LoraParallelLinear(
            base, "default", LoraConfig(r=2, lora_alpha=4, init_lora_weights=False), tensor_parallel, r=2,
            lora_alpha=4, megatron_config=layer.config,
        )  # fmt: skip
        for inner in (adapter.lora_A["default"], adapter.lora_B["default"]):
            inner.register_forward_hook(without_bias)
        setattr(layer.self_attention, name, adapter)


@pytest.mark.parametrize("change", [bridge_lora, bridge_dora, huggingface_lora], ids=lambda change: change.__name__)
@pytest.mark.parametrize("distributed", [False, True], ids=["", "distributed optimizer"])
def test_adapters_move_with_their_layers(bridge, change: Callable[[Any], None], distributed: bool):
    if change is huggingface_lora and (why := why_missing("verl", "verl, which imports peft,")):
        pytest.skip(why)
    found, plain = (bridge.run(4 if distributed else 2, train, Case(change, distributed), moves) for moves in (1, 0))
    for rank, other in zip(found, plain, strict=True):
        np.testing.assert_allclose(rank.losses, other.losses, rtol=1e-12)
    assert_same_weights([rank.weights for rank in found], [rank.weights for rank in plain], 1e-12)
    assert sum(sum(".linear_" in name for name in rank.weights) for rank in found) == sum(
        sum(".linear_" in name for name in rank.weights) for rank in plain
    )
