"""Refused settings of balanced sequences: one line that names the value and what to use instead, on all ranks."""

import argparse
from typing import Any

import pytest

from balancing.sequences.config import SequenceConfig
from megatron.balanced.trainer.checks.sequences import check_sequences
from tests.support.refusals import assert_accepted, assert_refused
from tests.support.settings import settings
from tests.support.training import MOCK_DATA, MODEL

PACKED = "--dataloader-inter-document-masking --attention-dropout 0".split()
BASE = [*MODEL, *MOCK_DATA, *PACKED, "--context-parallel-size", "2"]
BALANCE = "--balance-sequences"

# flags, and the words that the line must have: the value, and what to use instead
REFUSED = {
    "window of later tokens": (f"{BALANCE} --window-size 8,2", "--window-size 8,2", "use --window-size 8,0"),
    "attention backend": (f"{BALANCE} --attention-backend unfused", "unfused", "use auto, flash or fused"),
    "two kernels": (
        f"{BALANCE} --attention-backend flash {settings('sequences', kernel='cudnn')}",
        "sequences.kernel cudnn contradicts --attention-backend flash",
        "drop one of the two",
    ),
    "kernel": (f"{BALANCE} {settings('sequences', kernel='fa5')}", "sequences.kernel fa5", "is none of auto, flash"),
    "FSDP": (f"{BALANCE} --use-megatron-fsdp", "--use-megatron-fsdp", "--use-distributed-optimizer"),
    "planner": (f"{BALANCE} {settings('sequences', planner='best')}", "sequences.planner best", "zones"),
    "chunk": (f"{BALANCE} {settings('sequences', chunk=-1)}", "sequences.chunk -1", "at least 0"),
    "chunk of more than a rank": (f"{BALANCE} {settings('sequences', chunk=17)}", "sequences.chunk 17", "at most 16"),
    "capacity": (f"{BALANCE} {settings('sequences', token_capacity=-1)}", "token_capacity -1", "at least 0"),
    "capacity below the mean": (
        f"{BALANCE} {settings('sequences', token_capacity=31)} --micro-batch-size 2",
        "sequences.token_capacity 31",
        "--micro-batch-size 2",
        "takes 32",
    ),
    "routing": (f"{BALANCE} {settings('sequences', routing=-1)}", "sequences.routing -1", "at least 0"),
    "planner alone": (settings("sequences", planner="zones"), "sequences.planner zones", "add that"),
    "heads of Mamba": (
        f"{BALANCE} --hybrid-layer-pattern M-M* --mamba-head-dim 64 --mamba-num-groups 1",
        "--hybrid-layer-pattern M-M*",
        "its 2 Mamba layers (M) take documents whole, and 2 ranks cannot share 1 heads",
        "among fewer ranks",
    ),
    "domain alone": ("--sequence-domain data", "--sequence-domain data does nothing", "--balance-sequences"),
}


def test_refused(pool):
    assert_refused(pool, BASE, REFUSED)


def test_the_same_flags_without_the_fault_are_accepted(pool):
    flags = settings("sequences", planner="zones", chunk=4, token_capacity=16, routing=2)
    assert_accepted(pool, BASE, [f"{BALANCE} {flags}"])


# flags, and the words that the line must have: the value, and what to use instead
OF_DATA = {
    "shuffled samples": ("--dataloader-type cyclic", "--dataloader-type cyclic", "use --dataloader-type single"),
}
OF_ONE_RANK = [*MODEL, *MOCK_DATA, *PACKED, BALANCE]


def test_refused_of_data_parallel_ranks(pool):
    cases = {case: (*row, "--sequence-domain data") for case, row in OF_DATA.items()}
    assert_refused(pool, OF_ONE_RANK, cases)


def _told(argv: list[str]) -> tuple[Any, list[str]]:
    """The settings of sequences in force, and what start-up says."""
    import contextlib
    import io

    from megatron.balanced.trainer.arguments import parse_arguments

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        _, config = parse_arguments(argv)
    return config.sequences, said.getvalue().splitlines()


# flags, and the domain or words of why there is none
DOMAINS = {
    "DP 2": ("", "data"),
    "CP 2": ("--context-parallel-size 2", "context"),
    "CP 2, asked for": ("--context-parallel-size 2 --sequence-domain data", "data"),
    "DP 2, asked for": ("--sequence-domain context", "use --sequence-domain data"),
    "PP 2": ("--pipeline-model-parallel-size 2", "one data-parallel rank"),
    "whole samples": ("", "without --dataloader-inter-document-masking"),
}


@pytest.mark.parametrize("case", DOMAINS)
def test_domains(pool, case):
    """Chosen by the layout, and off where no rank can have more to do than another."""
    flags, expected = DOMAINS[case]
    argv = [flag for flag in OF_ONE_RANK if case != "whole samples" or flag != "--dataloader-inter-document-masking"]
    (sequences, said), _ = pool.run(2, _told, [*argv, *flags.split()])
    if expected in ("data", "context"):
        assert sequences.enabled and sequences.domain == expected
    else:
        assert not sequences.enabled
        assert any("nothing to balance" in line and expected in line for line in said)


@pytest.mark.parametrize(("workers", "held"), [(0, 0), (1, 2), (2, None)])
def test_loaders_that_are_not_ahead_of_a_step_are_named(pool, workers, held):
    """A step of four micro-batches; a worker holds two."""
    flags = f"--pipeline-model-parallel-size 2 --sequence-micro-batches --num-workers {workers}"
    (_, said), _ = pool.run(2, _told, [*OF_ONE_RANK, *flags.split()])
    found = [line for line in said if "reads all" in line]
    assert len(found) == (held is not None)
    if found:
        assert f"all 4 micro-batches of a step before it begins, and data loaders hold {held}" in found[0]
        assert "with --num-workers 2" in found[0]


def test_rows_over_tensor_parallel_ranks():
    """With sequence parallelism each context-parallel rank's part is cut once more."""
    args = argparse.Namespace(
        world_size=16,
        context_parallel_size=2,
        pipeline_model_parallel_size=1,
        tensor_model_parallel_size=8,
        sequence_parallel=True,
        seq_length=40,
        micro_batch_size=1,
        attention_dropout=0,
        transformer_impl="local",
        num_experts=None,
        hybrid_layer_pattern=None,
    )
    with pytest.raises(ValueError, match="use 48"):
        check_sequences(args, SequenceConfig(enabled=True))


@pytest.mark.parametrize("domain", ["context", "data"])
def test_routers_that_see_padding_are_refused(domain):
    """Parsed without --sft, which needs packages that need not be here."""
    args = argparse.Namespace(
        context_parallel_size=2,
        sft=True,
        hybrid_layer_pattern=None,
        num_experts=4,
        moe_z_loss_coeff=None,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-2,
        moe_router_enable_expert_bias=True,
    )
    also = "also incompatible: --moe-router-enable-expert-bias"
    with pytest.raises(ValueError, match=f"--moe-aux-loss-coeff 0.01: with --sft routers see padding.*{also}"):
        check_sequences(args, SequenceConfig(enabled=True, domain=domain))
