"""Flags that are incompatible with dynamic schemes: one line that names the value and the way out."""

import argparse

import pytest

from balancing.dynamics import DynamicsConfig
from megatron.balanced.dynamics.checks import check_dynamics
from tests.megatron.test_bad_input import _assert_refused
from tests.support.settings import settings
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
    "prediction": (FREEZE, UNTIED | {"mtp_num_layers": 1}, "--mtp-num-layers 1", "drop it"),
    "replicas": (PRUNE, {"balance_experts": True}, "--balance-experts", "dynamics.prune_sparsity 0.5", "drop it"),
    "optimizer": (
        PRUNE,
        {"optimizer": "sgd"},
        "--optimizer sgd",
        "dynamics.prune_sparsity 0.5",
        "use --optimizer adam",
    ),
    "exit at the end": ({"early_exit_layers": (2, 4)}, {}, "dynamics.early_exit_layers [2, 4]", "up to 3"),
    "exit and chunks": (
        EXIT,
        {"virtual_pipeline_model_parallel_size": 2},
        "--num-virtual-stages-per-pipeline-rank 2",
        "dynamics.early_exit_layers [1, 2]",
    ),
    "packed": (DEPTH, {"sft": True}, "--sft", "dynamics.mixture_of_depths 0.25", "drop it"),
    "sequence parallel": (DEPTH, {"sequence_parallel": True}, "--sequence-parallel", "drop it"),
    "no routed layer": (
        DEPTH | {"mixture_of_depths_every": 5},
        {},
        "dynamics.mixture_of_depths_every 5",
        "--num-layers 4",
    ),
    "context parallel": (
        SPARSE,
        {"context_parallel_size": 2},
        "--context-parallel-size 2",
        "use --context-parallel-size 1",
    ),
    "Transformer Engine": (SPARSE, {"transformer_impl": "transformer_engine"}, "use --transformer-impl local"),
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


VALUES = {
    "share": ({"prune_sparsity": 1.0}, "prune_sparsity 1.0", "below 1"),
    "backwards": ({"prune_sparsity": 0.5, "prune_start": 9, "prune_end": 3}, "prune_end 3", "prune_start 9"),
    "exit 0": ({"early_exit_layers": (0,)}, "early_exit_layers [0]", "from 1"),
    "two choosers": (EXIT | DEPTH, "mixture_of_depths 0.25", "early_exit_layers [1, 2]", "one of the two"),
    "threshold": ({"early_exit_threshold": 2.0}, "early_exit_threshold 2.0", "between -1 and 1"),
    "until": ({"freeze_layers_until": 1}, "freeze_layers_until 1", "freeze_layers_start 1"),
    "interval": ({"freeze_layers": 1, "freeze_layers_policy": "plasticity"}, "--freeze-layers-interval"),
    "block": ({"sparse_attention_block": 0}, "sparse_attention_block 0", "at least 1"),
}


@pytest.mark.parametrize("case", VALUES)
def test_value(case):
    values, *words = VALUES[case]
    with pytest.raises(ValueError) as refused:
        DynamicsConfig(**values)
    for word in words:
        assert word in str(refused.value)


def test_on_the_command_line(pool):
    flags = settings("dynamics", early_exit_layers=[2], mixture_of_depths=0.5)
    words = ("dynamics.mixture_of_depths 0.5", "use one of the two")
    _assert_refused(pool, [*MODEL, *MOCK_DATA, *flags.split()], *words)
