"""The flags that a forecast reads, and what it makes of them."""

import json
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from balancing.pipeline import MEGATRON_DEFAULTS, Schedule
from balancing.sequences.config import SequenceConfig
from balancing_tools.whatif.job import flag_table, read_flags, read_recipe_flags
from examples.dynamic_models.config import DynamicsConfig
from tests.support.command import run_python
from tests.support.recipe_files import read_recipes

# Flags of this project, and their defaults.
OURS = {field.metadata["flag"]: field.default for field in fields(SequenceConfig) if field.metadata["flag"]}
OURS["--freeze-layers"] = DynamicsConfig.freeze_layers  # of examples/dynamic_models
SMALL = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 1"
RECIPES = Path(__file__).parents[2] / "benchmarks/recipes/moe_recipes.json"

DUMP = """
import argparse, json
from megatron.balanced.cpu.device import use_cpu
use_cpu()
from megatron.training.arguments import add_megatron_arguments
parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
found = {option: (getattr(action.default, "name", action.default), action.nargs)
         for action in parser._actions for option in action.option_strings}
print("TABLE" + json.dumps(found, default=str))
"""


def job(more: str = "", gpus: int = 8):
    return read_flags(shlex.split(f"{SMALL} {more}")).on(gpus)


def test_flags_and_defaults_are_those_of_megatron():
    done = run_python("-c", DUMP)
    theirs = json.loads(done.stdout.partition("TABLE")[2])
    for action in flag_table()._actions:
        option = action.option_strings[0]
        if option in OURS:
            assert action.default == OURS[option]
            continue
        assert option in theirs, option
        default, nargs = theirs[option]
        assert str(default) == str(action.default), option
        assert (nargs == 0) == (action.nargs == 0), option


def test_sizes():
    one = job("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --global-batch-size 16 --swiglu")
    assert (one.data_parallel, one.micro_batches, one.ffn) == (2, 8, 128)
    assert one.on(16).micro_batches == 4
    assert one.plan.counts == ((4,), (4,))
    assert job("--train-samples 100 --global-batch-size 16").iterations == 7
    assert job().iterations is None


def test_experts_and_layouts():
    one = job("--num-experts 8 --moe-layer-freq ([0]*2+[1]*3)*1+[1]*3 --expert-model-parallel-size 2")
    assert one.is_moe.tolist() == [False] * 2 + [True] * 6
    assert job("--num-experts 8 --moe-layer-freq 2").is_moe.tolist() == [True, False] * 4
    layout = job("--pipeline-model-parallel-layout Ettt|tttttL --pipeline-model-parallel-size 2 --global-batch-size 8")
    assert layout.plan.counts == ((3,), (5,))
    ends = "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3 --pipeline-model-parallel-size 4"
    assert job(ends).plan.counts == ((1,), (2,), (2,), (3,))
    chunks = "--num-layers-per-virtual-pipeline-stage 2 --pipeline-model-parallel-size 2 --global-batch-size 16"
    assert job(chunks).chunks == 2
    assert job(chunks).schedule == MEGATRON_DEFAULTS
    grouped = job(f"{chunks} --microbatch-group-size-per-virtual-pipeline-stage 4 --overlap-moe-expert-parallel-comm")
    assert grouped.schedule == Schedule(group=4, in_parts=True)


def test_patterns():
    one = job("--hybrid-layer-pattern M-M*|E*-M --num-experts 8 --pipeline-model-parallel-size 2 --global-batch-size 8")
    assert one.kinds == ("M", "-", "M", "*", "E", "*", "-", "M") and one.num_layers == 8
    assert one.is_moe.tolist() == [symbol == "E" for symbol in "M-M*E*-M"]
    assert one.plan.counts == ((4,), (4,)) and one.chunks == 1
    chunks = job("--hybrid-layer-pattern M-|M*-|+ --pipeline-model-parallel-size 1 --num-layers 1".replace("*", "+"))
    assert chunks.chunks == 3 and chunks.multi_latent_attention and chunks.num_layers == 6
    assert job("--num-experts 8 --moe-layer-freq 2").kinds == ("*E", "*-") * 4


@pytest.mark.parametrize(
    "more, says",
    [
        ("--pipeline-model-parallel-size 3", "8 GPUs do not divide"),
        ("--global-batch-size 12", "--global-batch-size 12 does not divide by 8"),
        ("--pipeline-model-parallel-size 4 --num-layers 6", "6 layers do not divide into 4"),
        ("--num-experts 6 --expert-model-parallel-size 4", "--num-experts 6 do not divide by 4"),
        ("--num-experts 6 --moe-layer-freq 2**9**9", "--moe-layer-freq"),
        ("--num-experts 6 --moe-layer-freq [1]*3", "has 3 entries for 8 layers"),
        ("--hybrid-layer-pattern M*G-", "G (gated delta net), a kind of layer that the forecast does not know"),
        ("--hybrid-layer-pattern M*M-/*", "prediction after /"),
        ("--hybrid-layer-pattern M*ME", "--num-experts None do not go together"),
        ("--hybrid-layer-pattern M*M|-|M* --pipeline-model-parallel-size 2", "has 3 segments"),
        # Models that cannot exist, of which there is nothing to forecast.
        ("--hidden-size 63", "--hidden-size 63 must be a multiple of --num-attention-heads 4"),
        ("--group-query-attention --num-query-groups 3", "must be a multiple of --num-query-groups 3"),
        ("--num-attention-heads 2 --tensor-model-parallel-size 4", "must be a multiple of --tensor-model-parallel"),
        ("--ffn-hidden-size 129 --tensor-model-parallel-size 2", "--ffn-hidden-size 129 must be a multiple"),
        ("--num-experts 8 --moe-ffn-hidden-size 9 --expert-tensor-parallel-size 2", "--moe-ffn-hidden-size 9 must"),
        ("--num-experts 8 --moe-ffn-hidden-size 9 --tensor-model-parallel-size 2", "--moe-ffn-hidden-size 9 must"),
        ("--num-experts 8 --moe-router-topk 9", "--moe-router-topk 9 is above --num-experts 8"),
        ("--num-experts 8 --moe-layer-freq [0]*8", "--moe-layer-freq [0]*8 leaves no layer"),
        ("--num-experts 8 --moe-layer-freq 9", None),  # the first layer has experts
        ("--num-experts 8 --moe-layer-freq 0", "--moe-layer-freq '0'"),
        ("--num-experts 8 --moe-layer-freq [2]*8", "--moe-layer-freq '[2]*8'"),
        ("--expert-model-parallel-size 2", "--expert-model-parallel-size 2 needs --num-experts"),
        ("--bf16 --fp16", "--bf16 contradicts --fp16"),
        ("--seq-length 126 --context-parallel-size 2", "multiple of 2 x --context-parallel-size 2"),
        ("--heterogeneous-layers-config-path nowhere.json", "a model that the forecast does not know"),
        ("--kv-channels 16 --hidden-size 63", None),
        ("--num-query-groups 3", None),  # without --group-query-attention it has no effect
        ("--spec some model", "a model that the forecast does not know"),
        ("--hidden-size wide", "invalid int value"),
        ("--num-layers-per-virtual-pipeline-stage 2 --pipeline-model-parallel-size 2 --global-batch-size 4",
         "1 micro-batches a step are not a multiple of the 2 pipeline stages"),
        ("--num-layers-per-virtual-pipeline-stage 2 --pipeline-model-parallel-size 2 --global-batch-size 20 "
         "--microbatch-group-size-per-virtual-pipeline-stage 4",
         "--microbatch-group-size-per-virtual-pipeline-stage 4 does not go with 5 micro-batches"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(more, says):
    if says is None:
        assert job(more).kinds
        return
    with pytest.raises(ValueError) as caught:
        _ = job(more).is_moe
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_flag_is_named():
    with pytest.raises(ValueError, match="--num-layers, --seq-length"):
        read_flags("--hidden-size 64 --num-attention-heads 4 --micro-batch-size 1".split())


def test_published_recipes_are_read():
    read = {}
    for recipe in read_recipes(RECIPES):
        try:
            read[recipe.name] = read_recipe_flags(recipe.flags).on(recipe.ranks)
        except ValueError as error:
            assert "layers do not divide" in str(error) or "does not know" in str(error), recipe.name
    assert len(read) >= 12
    one = read["qwen3_235b/h100/bf16_256GPU_TP2PP8EP32"]
    assert (one.chunks, one.micro_batches, one.recompute_modules) == (4, 128, ("moe_act", "layernorm"))
