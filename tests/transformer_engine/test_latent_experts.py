"""Replicas of experts in a latent space (`--moe-latent-size`), between Transformer Engine's projections."""

import pytest

from tests.support.events import events_in
from tests.support.sampled import sampled
from tests.support.settings import settings
from tests.support.transformer_engine.model import EXPERTS, assert_close

LATENT = EXPERTS.replace("--num-experts 4", "--num-experts 8 --moe-latent-size 16")
EXPERT_LAYERS = {"linear layers": "", "grouped": "--moe-grouped-gemm"}


@pytest.mark.parametrize("layers", sampled(EXPERT_LAYERS, "grouped"))
def test_replicas_of_latent_experts_change_no_number(model_of, tmp_path, layers):
    model, flags = model_of(LATENT), EXPERT_LAYERS[layers]
    balance = f"--balance-experts {settings('experts', min_gain=0)} --balance-report {tmp_path}"
    run = model.train(2, f"{flags} --expert-model-parallel-size 2 --train-iters 4 {balance}")
    assert len(events_in(tmp_path, action="replicate")) > 4, "hardly anything was replicated"
    assert any("latent_proj" in name for name in run.parameters)
    assert any("experts" in name and 16 in whole.shape[-2:] for name, whole in run.parameters.items())
    assert_close(run, model.alone(f"{flags} --train-iters 4"), 1e-5, 1e-4)
