"""Flags that are incompatible with layer balancing: one line that names the value and the way out."""

import argparse

import pytest

from balancing.layers.config import LayerConfig
from megatron.balanced.trainer.checks.layers import check_layers
from tests.support.refusals import assert_refused
from tests.support.training import MOCK_DATA, MODEL

ON = LayerConfig(enabled=True)


def _args(**given: object) -> argparse.Namespace:
    usual = {
        "pipeline_model_parallel_size": 2,
        "num_layers": 4,
        "skip_train": False,
        "num_virtual_stages_per_pipeline_rank": None,
        "num_layers_per_virtual_pipeline_stage": None,
        "pipeline_model_parallel_layout": None,
        "hybrid_layer_pattern": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "save": None,
        "ckpt_format": "torch_dist",
        "optimizer": "adam",
        "use_distributed_optimizer": False,
        "dist_ckpt_optim_fully_reshardable": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "cuda_graph_impl": "none",
        "external_cuda_graph": False,
    }
    return argparse.Namespace(**(usual | given))


# what is given beside --balance-layers, and the words that the line must have: the value, and the way out
REFUSED = {
    "dropout in CUDA graphs": (
        {"cuda_graph_impl": "transformer_engine", "hidden_dropout": 0.1},
        "dropout",
        "use --attention-dropout 0 --hidden-dropout 0",
    ),
    "no iteration to measure": (
        {"cuda_graph_impl": "full_iteration", "cuda_graph_warmup_steps": 1},
        "--cuda-graph-warmup-steps 1",
        "use 3",
    ),
    "FSDP": ({"use_megatron_fsdp": True}, "--use-megatron-fsdp", "--use-distributed-optimizer"),
    "prediction on the first stage": (
        {"pipeline_model_parallel_layout": "Et|tt|ttm|L"},
        "--pipeline-model-parallel-layout Et|tt|ttm|L",
        "put m on another stage",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_incompatible_flags(case):
    given, *words = REFUSED[case]
    check_layers(_args(**given), LayerConfig())  # which is fine as long as layers stay
    with pytest.raises(ValueError) as refused:
        check_layers(_args(**given), ON)
    for word in ("--balance-layers", *words):
        assert word in str(refused.value)


@pytest.mark.parametrize(
    "given, layers, words",
    [
        ({"num_virtual_stages_per_pipeline_rank": 2}, LayerConfig(True, planner="diffusion"), "diffusion"),
        ({"pipeline_model_parallel_layout": "Et|t|t|tL"}, LayerConfig(True, planner="diffusion"), "diffusion"),
        ({"pipeline_model_parallel_layout": "Et*8m|L"}, LayerConfig(True, planner="diffusion"), "have none"),
    ],
)
def test_incompatible_settings(given, layers, words):
    with pytest.raises(ValueError, match=words):
        check_layers(_args(num_layers=8, **given), layers)


@pytest.mark.parametrize(
    "given, why",
    [
        ({"pipeline_model_parallel_size": 1}, "--pipeline-model-parallel-size 1"),
        ({"skip_train": True}, "--skip-train trains no step"),
        ({"num_virtual_stages_per_pipeline_rank": 2}, "each of the 4 pipeline stages has one layer"),
        ({"num_layers_per_virtual_pipeline_stage": 1}, "each of the 4 pipeline stages has one layer"),
    ],
)
def test_nothing_to_balance_is_said_and_switched_off(given, why):
    off, (note,) = check_layers(_args(**given), ON)
    assert not off.enabled
    assert why in note


def test_a_distributed_optimizer_is_saved_for_any_layout():
    args = _args(save="here", use_distributed_optimizer=True, hidden_dropout=0.1)
    on, notes = check_layers(args, ON)
    assert on.enabled
    assert args.dist_ckpt_optim_fully_reshardable
    assert any("--dist-ckpt-optim-fully-reshardable" in note for note in notes)
    assert any("dropout" in note for note in notes)


def test_decisions_are_seldom_where_iterations_are_captured():
    given = {"cuda_graph_impl": "full_iteration", "cuda_graph_warmup_steps": 3}
    on, (note,) = check_layers(_args(**given), ON)
    assert on.interval == 50 and "every 50 iterations" in note and "after a move 4 iterations run" in note
    on, (note,) = check_layers(_args(**given), LayerConfig(enabled=True, interval=4))  # which would replay none
    assert on.interval == 100 and "every 100 iterations" in note


def test_local_graphs_of_layers_that_move():
    args = _args(cuda_graph_impl="local", cuda_graph_modules=[], num_experts=None, transformer_impl="local")
    on, (note,) = check_layers(args, ON)
    assert on.enabled and args.cuda_graph_impl == "none" and "switches --cuda-graph-impl local off" in note


def test_values_out_of_range():
    for wrong in ({"interval": 0}, {"min_gain": 1.0}, {"min_gain": -0.1}):
        with pytest.raises(ValueError, match="must be at least"):
            LayerConfig(**wrong)
    for name, value in [("repack_throughput_floor", 0.0), ("repack_throughput_floor", 1.1), ("repack_min_stages", 0),
                        ("repack_memory_limit", -1.0), ("repack_throughput_floor", float("nan"))]:  # fmt: skip
        with pytest.raises(ValueError, match=f"{name} {value} must be"):
            LayerConfig(**{name: value})


# what is given beside --balance-layers and PP 2, what is asked of a release, and the words that the line must have
NOT_RELEASED = {
    "nothing to release": ({}, {"repack_throughput_floor": 0.9, "repack_min_stages": 2}, "nothing to release", "2"),
    "one stage": ({"pipeline_model_parallel_size": 1}, {"repack_memory_limit": 8.0}, "nothing to release", "use more"),
    "no reason to": ({}, {"repack_min_stages": 2}, "layers.repack_min_stages 2", "--repack-throughput-floor"),
    "settled": ({}, {"once": True, "repack_throughput_floor": 0.9}, "--balance-layers", "keep moving"),
    "interleaved": (
        {"num_virtual_stages_per_pipeline_rank": 2, "num_layers": 8},
        {"repack_throughput_floor": 0.9},
        "not of 2",
        "use one",
    ),
    "mapping": ({"use_tp_pp_dp_mapping": True}, {"repack_memory_limit": 8.0}, "--use-tp-pp-dp-mapping", "drop it"),
}


@pytest.mark.parametrize("case", NOT_RELEASED)
def test_ranks_that_cannot_leave(case):
    given, asked, *words = NOT_RELEASED[case]
    with pytest.raises(ValueError) as refused:
        check_layers(_args(**given), LayerConfig(**({"enabled": True} | asked)))
    for word in words:
        assert word in str(refused.value)


def test_one_layer_a_stage_can_still_be_released():
    on, _ = check_layers(_args(num_layers=2), LayerConfig(enabled=True, repack_throughput_floor=0.9))
    assert on.enabled and on.repacks


# flags, and the words that the line must have
FLAGS = {
    "release": ("--repack-throughput-floor 0.9", "--repack-throughput-floor 0.9 does nothing without --balance-layers"),
    "interval": ("--layer-balance-interval 50", "--layer-balance-interval 50 does nothing without --balance-layers"),
    "once": ("--balance-layers --balance-layers-once", "--balance-layers is incompatible with --balance-layers-once"),
}


def test_from_the_command_line(pool):
    assert_refused(pool, [*MODEL, *MOCK_DATA], FLAGS)
