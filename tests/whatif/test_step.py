"""The balanced step against published runs, and its parts against counts by hand."""

import numpy as np
import pytest

from balancing.cluster import Cluster
from balancing_tools.whatif.job import read_flags
from balancing_tools.whatif.step import FITTED_ERROR, StepModel
from benchmarks.whatif.published import read_published

# Deeper pipelines take seconds to simulate.
ROWS = [row for row in read_published() if row.job.pipeline_model_parallel_size <= 8]


def test_steps_of_published_runs():
    errors = {source: [] for source in ("simumax", "selene", "bridge")}
    for row in ROWS:
        errors[row.source].append(abs(row.error()))
    most = {source: (np.median(found), max(found)) for source, found in errors.items()}
    for source, median, worst in (("simumax", 0.09, 0.20), ("selene", 0.05, 0.09), ("bridge", 0.17, 0.52)):
        assert most[source][0] < median and most[source][1] < worst, (source, most[source])
    together = np.concatenate([*errors.values()])
    assert np.median(together) < 0.1 and f"by {100 * together.max():.0f} % at worst" in FITTED_ERROR


def test_memory_of_published_runs():
    errors = np.array([row.memory_error for row in ROWS if row.memory_error is not None])
    assert len(errors) == 43 and np.abs(errors).max() < 0.1


def model(more: str = "", gpus: int = 8) -> StepModel:
    small = "--num-layers 4 --hidden-size 512 --ffn-hidden-size 2048 --num-attention-heads 8 --seq-length 1024"
    job = read_flags(f"{small} --micro-batch-size 1 --global-batch-size 64 --vocab-size 1024 {more}".split()).on(gpus)
    return StepModel(job, Cluster.from_spec("h100-8x400g", gpus))


def test_parameters_by_hand():
    assert model().attention_parameters == 4 * 512 * 512
    assert model().dense_parameters("*-") == 4 * 512 * 512 + 2 * 512 * 2048
    grouped = model("--group-query-attention --num-query-groups 2")
    assert grouped.attention_parameters == 2 * 512 * 512 + 2 * 512 * 128
    latent = model("--multi-latent-attention --q-lora-rank 96 --kv-lora-rank 64 --qk-head-dim 32 "
                   "--qk-pos-emb-head-dim 16 --v-head-dim 24")  # fmt: skip
    assert latent.attention_parameters == 512 * 96 + 96 * 8 * 48 + 512 * 80 + 64 * 8 * 56 + 8 * 24 * 512
    experts = model("--num-experts 8 --moe-ffn-hidden-size 256 --swiglu --expert-model-parallel-size 4")
    assert experts.layer_parameters("*E") == experts.attention_parameters + 512 * 8 + 2 * 3 * 512 * 256


def test_layers_of_a_pattern_by_hand():
    mamba = "--mamba-num-heads 16 --mamba-head-dim 32 --mamba-num-groups 2 --mamba-state-dim 64"
    experts = "--num-experts 8 --moe-ffn-hidden-size 256 --moe-router-topk 2"
    hybrid = model(f"--hybrid-layer-pattern M-*E {mamba} {experts}")
    assert hybrid.dense_parameters("M") == 512 * (2 * 512 + 2 * 2 * 64 + 16) + 512 * 512
    assert hybrid.dense_parameters("-") == 2 * 512 * 2048 and hybrid.dense_parameters("*") == 4 * 512 * 512
    assert hybrid.dense_parameters("E") == 512 * 8 and hybrid.layer_parameters("E") == 512 * 8 + 8 * 2 * 512 * 256
    works = dict(zip("M-*E", hybrid.works(), strict=True))
    assert works["*"].attention > 0 == works["M"].attention == works["-"].attention
    assert works["E"].experts > 0 == works["*"].experts
    # A layer of a GPT model is one of attention and one of an MLP.
    apart = works["*"], works["-"]
    whole = model().layer("*-")
    assert sum(work.total for work in apart) == pytest.approx(whole.total)
    assert sum(hybrid._activation(kind) for kind in "*-") == pytest.approx(model()._activation("*-"))
    wider = model(f"--hybrid-layer-pattern M-*E {mamba.replace('64', '128')} {experts}").layer("M")
    assert wider.total > works["M"].total


def test_what_costs_more_takes_longer():
    even = model("--num-experts 8 --moe-token-dispatcher-type alltoall --expert-model-parallel-size 8")
    assert even.exchange_seconds() > 0
    overlapped = model("--num-experts 8 --moe-token-dispatcher-type alltoall --expert-model-parallel-size 8 "
                       "--overlap-moe-expert-parallel-comm")  # fmt: skip
    assert overlapped.exchange_seconds() < even.exchange_seconds()
    again = model("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    assert again.layer("*-").backward > model().layer("*-").backward
    assert again.memory(again.job.plan).max() < model().memory(model().job.plan).max()
    assert model("--fp8-format hybrid").layer("*-").rest < model().layer("*-").rest


@pytest.mark.parametrize("dispatcher", ["alltoall", "flex"])
def test_tokens_cross_to_another_node_once_with_flex(dispatcher):
    wide = "--num-experts 32 --moe-router-topk 8 --expert-model-parallel-size 16 --moe-token-dispatcher-type "
    one = model(wide + dispatcher, gpus=16)
    sent = 1024 * 512 * 2 * (8 / 2 if dispatcher == "alltoall" else 1 - 0.5**8)
    expected = sent / one.cluster.nic_bandwidth * one.efficiency.expert_exposed
    assert one.exchange_seconds() == pytest.approx(expected)
