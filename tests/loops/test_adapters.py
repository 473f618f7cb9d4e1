"""A mixture of experts with adapters of Megatron-Bridge 0.6.2 has replicas and trains the same model."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import plain_loop
from tests.support.changed_loop import RANKS, SAMPLES, SEQUENCE, Ended, build, compare, train
from tests.support.weights import assert_same_weights, named_weights

# name -> grouped experts, and how adapters lie on them
ADAPTERS: dict[str, tuple[bool, str, dict[str, Any]]] = {
    "LoRA": (False, "LoRA", {}),
    "LoRA on attention": (False, "LoRA", {"target_modules": ["linear_qkv", "linear_proj"]}),
    "grouped, one for all experts": (True, "LoRA", {}),
    "grouped, one an expert": (True, "LoRA", {"share_expert_adapters": False}),
    "grouped, on attention": (True, "LoRA", {"target_modules": ["linear_qkv", "linear_proj"]}),
}

STEPS = 6  # of the example, whose layers move after four


def _adapt(kind: str, options: dict[str, Any], model: Any) -> None:
    from megatron.bridge.peft.dora import DoRA
    from megatron.bridge.peft.lora import LoRA

    peft: Any = {"LoRA": LoRA, "DoRA": DoRA}[kind](dim=4, alpha=8, lora_B_init_method="normal", **options)
    (adapted,) = peft([model], training=True)
    peft.set_params_to_save([adapted])
    assert any("adapter" in name for name, parameter in model.named_parameters() if parameter.requires_grad)
    assert not any("adapter" not in name for name, parameter in model.named_parameters() if parameter.requires_grad)


def _train(name: str, balanced: bool, shared: bool) -> Ended:
    grouped, kind, options = ADAPTERS[name]
    return train(partial(_adapt, kind, options), balanced, shared, grouped)


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapted_experts_have_replicas_and_train_the_same(bridge, name):
    shared = "one" in name
    found, plain = (bridge.run(RANKS, _train, name, on, shared) for on in (True, False))
    compare(found, plain, 1e-12 if not ADAPTERS[name][0] else 2e-6)
    weights, gradients = (sum(sent[kind] for rank in found for sent in rank.sent) for kind in (0, 1))
    if name in ("grouped, one for all experts", *(other for other in ADAPTERS if "attention" in other)):
        assert gradients == 0 < weights, "gradients of experts that do not train were sent"
    else:
        assert 0 < gradients < weights / 2, "gradients of frozen weights were sent"


def _train_example(balancers: tuple[str, ...], folder: Path) -> tuple[list[float], dict[str, Any], str, list[dict]]:
    losses, model, layout, events = plain_loop.train(STEPS, folder, balancers, partial(_adapt, "LoRA", {}))
    return losses, named_weights([model.module]), layout, events


def test_balancers_together_leave_an_adapted_mixture_of_experts_as_it_is(bridge, tmp_path):
    runs = []
    for name, balancers in (("balanced", plain_loop.ALL), ("plain", ())):
        (folder := tmp_path / name).mkdir()
        runs.append(bridge.run(RANKS, _train_example, balancers, folder))
    found, plain = runs
    for (losses, *_), (expected, *_) in zip(found, plain, strict=True):
        np.testing.assert_allclose(losses, expected, rtol=1e-12)
    assert_same_weights([weights for _, weights, *_ in found], [weights for _, weights, *_ in plain])
    events = [event for *_, told in found for event in told]
    for name in plain_loop.ALL:
        own = [event for event in events if event["balancer"] == name]
        assert own and (name == "layers" or sum(e.get("replicas", 0) + e["moved_bytes"] for e in own)), name
    assert {layout for _, _, layout, _ in found} == {"Ettt|tttL"}


def _refused() -> str:
    from megatron.balanced.loop import ExpertBalancer
    from megatron.balanced.shared.job import Job

    model = build(partial(_adapt, "DoRA", {}), overlap=False)
    with pytest.raises(ValueError) as error:
        ExpertBalancer([model], job=Job(SEQUENCE, SAMPLES, 5))
    return str(error.value)


def test_adapters_that_need_a_token_are_refused(bridge):
    (told,) = {*bridge.run(2, _refused)}
    assert "decoder.layers.0.mlp.experts fail where one has all tokens" in told and "; use" in told
    assert "\n" not in told
