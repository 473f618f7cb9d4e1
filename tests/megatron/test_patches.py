"""The patch table: each row fits the installed Megatron-LM, can be applied and removed, and is rejected where it does
not fit."""

import contextlib
import dataclasses
import inspect
import io
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.packages_apart import version
from tests.support.training import MOCK_DATA, MODEL, train_rank

# What needs the rows one by one. The row of the compiled helper depends on the machine, not on flags.
NEEDS = {
    "DistributedOptimizer": "--load nowhere --use-distributed-optimizer",
    "training:train_step": "--balance-report nowhere --balance-dry-run",
    "training:dummy_train_step": "--iterations-to-skip 2",
    "TransformerConfig.__post_init__": "--overlap-moe-expert-parallel-comm --num-experts 4 --swiglu "
    "--disable-bias-linear --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
    "token_dispatcher:gather_from_sequence_parallel_region": "--balance-experts --num-experts 4 --swiglu "
    "--disable-bias-linear --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
    "TopKRouter": "--bf16 --moe-router-load-balancing-type global_aux_loss --num-experts 4 --swiglu "
    "--disable-bias-linear",
    "gpt:mtp_block_spec": "--dataloader-inter-document-masking --mtp-num-layers 1",
    "training:get_forward_backward_func": "--dataloader-inter-document-masking --micro-batch-size 2",
}

# With these no other flags of the table work: graphs, which command lines have with Transformer Engine alone.
GRAPHS = "--balance-layers --pipeline-model-parallel-size 2"

# Not in bf16, which is in the table.
HALF = "--fp16 --num-experts 4 --swiglu --disable-bias-linear --expert-model-parallel-size 2"

# Not with messages of experts overlapped, which are in the table. Two rows, of whose targets this is a part.
PREDICTED = "--balance-sequences --dataloader-inter-document-masking --attention-dropout 0 --mtp-num-layers 1"

DEALT = (
    "--pipeline-model-parallel-size 2 --balance-sequences --sequence-micro-batches --dataloader-inter-document-masking "
    "--attention-dropout 0"
)


def _parsed(flags: str = "") -> tuple[Any, Any]:
    from megatron.balanced.trainer.arguments import parse_arguments

    return parse_arguments([*MODEL, *MOCK_DATA, *flags.split()])


def _contract() -> dict[str, str | None]:
    """Target -> what is wrong with it, None when nothing is."""
    from megatron.balanced.run import Run
    from megatron.balanced.trainer import patches

    found: dict[str, str | None] = {}
    for patch in patches.PATCHES:
        try:
            patches.check(patch)
            owner, name = patch.owner()
            original = inspect.getattr_static(owner, name)
            replaced = tuple(inspect.signature(patch.replace(original, Run())).parameters)
            assert callable(original), "not a function"
            assert replaced == patch.signature, f"the replacement takes {replaced}"
            assert len(patch.why) > 20, "no reason given"
            found[patch.target] = None
        except (ValueError, AssertionError) as error:
            found[patch.target] = str(error)
    return found


def test_every_row_fits_the_installed_megatron(pool):
    (found,) = pool.run(1, _contract)
    assert len(found) >= 3
    assert found == dict.fromkeys(found)


def test_the_versions_are_those_of_the_package():
    setup = (Path(__file__).resolve().parents[2] / "setup.py").read_text()
    from megatron.balanced.trainer.checks.megatron import MEGATRON_VERSIONS

    # Loops of one's own can have an older one.
    assert re.findall(r'"megatron-core>=([\d.]+),<0.20"', setup) == [version("megatron_core_0_18", "megatron_core")]
    assert MEGATRON_VERSIONS[0] == version("megatron_core")
    assert re.findall(r'"megatron-core==([\d.]+)"', setup) == [MEGATRON_VERSIONS[-1]]


def _installs(together: bool) -> list[str]:
    """Install what a job with nearly all features needs. together: whether messages of experts are overlapped, with
    which micro-batches stay whole, so that messages between stages need nothing."""
    from balancing.layers.config import LayerConfig
    from balancing.sequences.config import SequenceConfig
    from megatron.balanced.run import Run
    from megatron.balanced.trainer import patches

    # Overlapped messages are refused with multi-token prediction of packed documents, which other rows need.
    args, config = _parsed(" ".join(NEEDS.values()).replace("--overlap-moe-expert-parallel-comm", ""))
    args.overlap_moe_expert_parallel_comm = together
    args.bf16, args.fp16 = False, not together  # where counters are rounded, scales differ, and messages overlap anyway
    args.cuda_graph_impl = "transformer_engine"
    dealt = SequenceConfig(enabled=True, micro_batches=True)
    config = dataclasses.replace(config, layers=LayerConfig(enabled=True), sequences=dealt)
    config = dataclasses.replace(config, fill_with_weight_gradients=True)
    wanted = [patch for patch in patches.PATCHES if patch.is_needed(args, config, Run())]
    owners = [patch.owner() for patch in wanted]

    def state() -> list[Any]:
        return [inspect.getattr_static(owner, name) for owner, name in owners]

    originals = state()
    lines = patches.install(args, config, Run())
    replaced = state()
    assert all(new is not old for new, old in zip(replaced, originals, strict=True))
    assert patches.install(args, config, Run()) == []
    assert all(new is old for new, old in zip(state(), replaced, strict=True)), "installed twice"
    patches.uninstall()
    assert all(new is old for new, old in zip(state(), originals, strict=True)), "not put back"
    patches.uninstall()
    assert patches.install(args, config, Run()) == lines
    patches.uninstall()
    assert all(new is old for new, old in zip(state(), originals, strict=True)), "not put back the second time"
    assert [line.split(": ")[0] for line in lines] == [f"patched {patch.target}" for patch in wanted]
    left = {patch.target for patch in patches.PATCHES} - {patch.target for patch in wanted}
    others = ("Communicator", "TopKRouter", "ChainedOptimizer") if together else ("TransformerConfig",)
    assert all(any(name in target for name in others) for target in left), left
    return lines


@pytest.mark.parametrize("together", [True, False])
def test_rows_go_on_once_and_come_off(pool, together):
    pool.run(2, _installs, together)


def _needed(flags: str) -> list[str]:
    from megatron.balanced.run import Run
    from megatron.balanced.trainer import patches

    args, config = _parsed(flags)
    if flags == GRAPHS:
        args.cuda_graph_impl = "transformer_engine"
    return [patch.target for patch in patches.PATCHES if patch.is_needed(args, config, Run())]


def test_only_what_is_needed_is_patched(pool):
    without, _ = pool.run(2, _needed, "")
    assert without in (["megatron.core.datasets.utils:compile_helpers"], [])
    for row, flags in (
        NEEDS
        | {"training:TECudaGraphHelper": GRAPHS, "P2PCommunicator": DEALT, "mtp": PREDICTED, "ChainedOptimizer": HALF}
    ).items():
        needed, _ = pool.run(2, _needed, flags)
        more = set(needed) - set(without)
        assert any(row in target for target in more), row
        assert all(row in target or "train_step" in target for target in more), needed  # which every balancer needs


@pytest.mark.parametrize(
    "flags, is_needed",
    [
        ("", False),
        ("--mtp-use-repeated-layer", False),
        ("--tensor-model-parallel-size 2 --sequence-parallel", True),
        ("--dataloader-inter-document-masking", True),
        ("--dataloader-inter-document-masking --mtp-use-repeated-layer", True),
    ],
)
def test_layers_of_prediction_are_patched_where_their_modules_differ(pool, flags, is_needed):
    needed, _ = pool.run(2, _needed, f"--mtp-num-layers 2 {flags}")
    assert ("megatron.training.models.gpt:mtp_block_spec" in needed) is is_needed


def _refusal(fault: str) -> str:
    """Install a table whose last row has a fault. Returns what is said of it; nothing may be installed then."""
    from megatron.balanced.run import Run
    from megatron.balanced.trainer import patches

    args, config = _parsed()
    good = dataclasses.replace(patches.PATCHES[-1], needed=lambda args, config: True)
    changes = {
        "module": {"target": "megatron.core.nowhere:step"},
        "attribute": {"target": "megatron.training.training:no_such_function"},
        "method": {"target": "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.no_such_method"},
        "signature": {"signature": (*good.signature[:-1], "another")},
    }
    bad = dataclasses.replace(good, **changes[fault])
    patches.PATCHES = (good, bad)
    owner, name = good.owner()
    original = inspect.getattr_static(owner, name)
    (_, shown) = patches.rows(args, config, Run())
    with pytest.raises(ValueError) as refused:
        patches.install(args, config, Run())
    assert str(refused.value) in shown, "the dry run keeps it to itself"
    assert inspect.getattr_static(owner, name) is original
    assert patches._installed == []
    return str(refused.value)


@pytest.mark.parametrize(
    "fault, words",
    [
        ("module", ["megatron.core.nowhere:step", "does not exist", "install megatron-core 0."]),
        ("attribute", ["no_such_function", "does not exist", "install megatron-core 0."]),
        ("method", ["no_such_method", "does not exist", "install megatron-core 0."]),
        ("signature", ["train_step", "another", "p2p_communicator", "install megatron-core 0."]),
    ],
)
def test_a_row_that_does_not_fit_stops_the_run(pool, fault, words):
    (said,) = pool.run(1, _refusal, fault)
    for word in words:
        assert word in said, said


def _wrong_signature_at_start() -> None:
    from megatron.balanced.trainer import patches

    patches.PATCHES = (
        dataclasses.replace(patches.PATCHES[-1], needed=lambda args, config: True, signature=("something",)),
    )
    with pytest.raises(SystemExit) as stopped:
        _parsed()
    assert stopped.value.code == 2


def test_it_is_found_before_anything_is_built(pool):
    pool.run(1, _wrong_signature_at_start)
    assert "pretrain_gpt.py: error: megatron.training.training:train_step takes" in pool.output[0]


def _trains_and_leaves_nothing() -> None:
    from megatron.balanced.trainer import patches

    originals = [inspect.getattr_static(*patch.owner()) for patch in patches.PATCHES[:-1]]
    train_rank([*MODEL, *MOCK_DATA, "--train-iters", "1"], False)
    assert [inspect.getattr_static(*patch.owner()) for patch in patches.PATCHES[:-1]] == originals
    assert patches._installed == []


def test_training_leaves_nothing_patched(pool):
    pool.run(1, _trains_and_leaves_nothing)


def test_dry_run_shows_the_rows_and_trains_nothing(pool, tmp_path):
    folders = {name: tmp_path / name for name in ("save", "report", "tensorboard")}
    flags = (
        f"--balance-dry-run --save {folders['save']} --save-interval 1 --balance-report {folders['report']} "
        "--load nowhere --use-distributed-optimizer"
    )
    runs = pool.run(2, train_rank, [*MODEL, *MOCK_DATA, *flags.split()], False)
    assert all(run.losses == [] and run.grad_norms == [] for run in runs)
    first, second = pool.run(2, _dry_run_output, [*MODEL, *MOCK_DATA, *flags.split()])
    for target in pool.run(1, _contract)[0]:
        assert len(re.findall(rf"^(patch|no   )  {re.escape(target)}: ", first, re.M)) == 1
        assert target not in second, "each rank says it"
    assert re.search(r"^patch  megatron\.training\.training:train_step: ", first, re.M)
    assert not any(folder.exists() for folder in folders.values())


def _dry_run_output(argv: list[str]) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        train_rank(argv, False)
    return said.getvalue()
