"""Adapters of Megatron-Bridge around layers that move: LoRA and DoRA."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.two_stages import Case, train
from tests.support.weights import assert_same_weights


def bridge_lora(layer: Any) -> None:
    from megatron.bridge.peft.lora import LoRA

    LoRA(target_modules=["linear_qkv", "linear_proj"], dim=2, alpha=4, lora_B_init_method="xavier")(layer)


def bridge_dora(layer: Any) -> None:
    from megatron.bridge.peft.dora import DoRA

    DoRA(target_modules=["linear_qkv", "linear_proj"], dim=2, alpha=4, lora_B_init_method="xavier")(layer)


@pytest.mark.parametrize("change", [bridge_lora, bridge_dora], ids=lambda change: change.__name__)
@pytest.mark.parametrize("distributed", [False, True], ids=["", "distributed optimizer"])
def test_adapters_move_with_their_layers(bridge, change: Callable[[Any], None], distributed: bool):
    found, plain = (bridge.run(4 if distributed else 2, train, Case(change, distributed), moves) for moves in (1, 0))
    for rank, other in zip(found, plain, strict=True):
        np.testing.assert_allclose(rank.losses, other.losses, rtol=1e-12)
    assert_same_weights([rank.weights for rank in found], [rank.weights for rank in plain], 1e-12)
    assert sum(sum(".linear_" in name for name in rank.weights) for rank in found) == sum(
        sum(".linear_" in name for name in rank.weights) for rank in plain
    )
