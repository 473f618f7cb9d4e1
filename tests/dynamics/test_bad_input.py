"""Flags that are incompatible with dynamic schemes: one line that names the value and the way out."""

import argparse
import os
import subprocess
import sys

import pytest

from examples.dynamic_models.checks import check_dynamics
from examples.dynamic_models.config import DynamicsConfig, add_flags, config_of
from tests.support.patience import PATIENCE
from tests.support.program import script
from tests.support.settings import scheme_flags
from tests.support.training import MOCK_DATA, MODEL

UNTIED = {"untie_embeddings_and_output_weights": True}
FREEZE, PRUNE = {"freeze_layers": 2}, {"prune_sparsity": 0.5, "prune_end": 5}
EXIT, DEPTH = {"early_exit_layers": (1, 2)}, {"mixture_of_depths": 0.25}
SPARSE = {"sparse_attention": "hash"}

# scheme, other flags, and the words that the line must have
COMBINATIONS = {
    "all frozen": ({"freeze_layers": 4}, UNTIED, "--freeze-layers 4", "--num-layers 4", "at most 3"),
    "tied": (FREEZE, {}, "--freeze-layers 2", "add --untie-embeddings-and-output-weights"),
    "recompute": (FREEZE, UNTIED | {"recompute_granularity": "full"}, "--recompute-granularity full", "selective"),
    "exit at the end": ({"early_exit_layers": (2, 4)}, {}, "--early-exit-layers 2 4", "up to 3"),
    "exit and chunks": (
        EXIT,
        {"virtual_pipeline_model_parallel_size": 2},
        "--num-virtual-stages-per-pipeline-rank 2",
        "--early-exit-layers 1 2",
    ),
    "no routed layer": (
        DEPTH | {"mixture_of_depths_every": 5},
        {},
        "--mixture-of-depths-every 5",
        "--num-layers 4",
    ),
    "FSDP": (DEPTH, {"use_megatron_fsdp": True}, "--use-megatron-fsdp", "use --use-distributed-optimizer"),
}


@pytest.mark.parametrize("case", COMBINATIONS)
def test_combination(case):
    scheme, given, *words = COMBINATIONS[case]
    fine = {"num_layers": 4, "optimizer": "adam", "transformer_impl": "local", "num_experts": None}
    args = argparse.Namespace(**(fine | {"untie_embeddings_and_output_weights": False} | given))
    with pytest.raises(ValueError) as refused:
        check_dynamics(args, DynamicsConfig(**scheme))
    for word in words:
        assert word in str(refused.value)


# values, and the words that the line must have
VALUES = {
    "share": ({"prune_sparsity": 1.0}, "--prune-sparsity 1.0", "below 1"),
    "backwards": (PRUNE | {"prune_start": 9, "prune_end": 3}, "--prune-end 3", "--prune-start 9"),
    "exit 0": ({"early_exit_layers": [0]}, "--early-exit-layers 0", "from 1"),
    "two choosers": (EXIT | DEPTH, "--mixture-of-depths 0.25", "--early-exit-layers 1 2", "one of the two"),
    "threshold": (EXIT | {"early_exit_threshold": 2.0}, "--early-exit-threshold 2.0", "between -1 and 1"),
    "until": (FREEZE | {"freeze_layers_until": 1}, "--freeze-layers-until 1", "--freeze-layers-start 1"),
    "interval": ({"freeze_layers": 1, "freeze_layers_policy": "plasticity"}, "--freeze-layers-interval"),
    "block": (SPARSE | {"sparse_attention_block": 0}, "--sparse-attention-block 0", "at least 1"),
    "freezing nothing": ({"freeze_layers_start": 1}, "--freeze-layers-start 1 does nothing without --freeze-layers;"),
    "pruning nothing": ({"prune_start": 1}, "--prune-start 1 does nothing without --prune-sparsity;"),
    "exiting nowhere": ({"early_exit_start": 2}, "--early-exit-start 2 does nothing without --early-exit-layers;"),
    "no attention": ({"sparse_attention_keep": 4}, "does nothing without --sparse-attention; add that, or drop it"),
}


@pytest.mark.parametrize("case", VALUES)
def test_value(case):
    values, *words = VALUES[case]
    with pytest.raises(ValueError) as refused:
        config_of(argparse.Namespace(**values))
    for word in words:
        assert word in str(refused.value)


def test_flags_give_the_config():
    parser = argparse.ArgumentParser()
    add_flags(parser)
    assert config_of(parser.parse_args([])) == DynamicsConfig()
    args = parser.parse_args("--early-exit-layers 8 4 --early-exit-threshold 0.5 --sparse-attention hash".split())
    assert config_of(args) == DynamicsConfig(
        early_exit_layers=(4, 8), early_exit_threshold=0.5, sparse_attention="hash"
    )


def test_on_the_command_line(tmp_path):
    """Of a script that stands in no package, from any folder."""
    flags = scheme_flags(early_exit_layers=[2], mixture_of_depths=0.5)
    command = [sys.executable, script(flags.split()), *MODEL, *MOCK_DATA, *flags.split()]
    done = subprocess.run(command, cwd=tmp_path, env=_environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "error:" in line or "Traceback" in line]
    assert line == (
        "pretrain.py: error: --mixture-of-depths 0.5 is incompatible with --early-exit-layers 2: both choose the "
        "tokens of a layer; use one of the two"
    )


def _environment() -> dict[str, str]:
    """Without a launcher, and without the checkout on the path of modules."""
    left_out = ("PYTHONPATH", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in left_out}
