"""A checkpoint that cannot be loaded or written ends the job in one line: which one, why, and what to do."""

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.balanced.trainer.checks import checkpoints
from tests.support.command import run_command
from tests.support.refusals import assert_refused
from tests.support.sampled import sampled
from tests.support.training import MOCK_DATA, MODEL, MOE

BASE = [*MODEL, *MOCK_DATA]
ITERATION = "iter_0000004"


def _refusal(results: list[tuple[object, str]]) -> str:
    """The line that the ranks end with, once."""
    assert all(code == 2 for code, _ in results), results
    told = [line for _, text in results for line in text.splitlines() if "pretrain_gpt.py" in line]
    assert len(told) == 1, told
    assert any(text.rstrip().endswith(told[0]) for _, text in results), "it is last on the screen"
    return told[0].removeprefix("pretrain_gpt.py: error: ")


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory) -> Path:
    """A folder with checkpoints of iterations 2 and 4 of a pipeline."""
    folder = tmp_path_factory.mktemp("saved")
    flags = "--pipeline-model-parallel-size 2 --save-interval 2 --save"
    results = pool.run(2, run_command, [*BASE, *flags.split(), str(folder)])
    assert [code for code, _ in results] == [0, 0], results
    return folder


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "checkpoint")


def _shard(folder: Path) -> Path:
    return min((folder / ITERATION).glob("*.distcp"))


DAMAGE = {
    "tracker of letters": (lambda folder: (folder / "latest_checkpointed_iteration.txt").write_text("garbage"),
                           "should hold an iteration and holds 'garbage'; write one of [2, 4] into it"),
    "empty tracker": (lambda folder: (folder / "latest_checkpointed_iteration.txt").write_text(""),
                      "should hold an iteration and holds ''; write one of [2, 4] into it"),
    "tracker of another": (lambda folder: (folder / "latest_checkpointed_iteration.txt").write_text("99"),
                           "has no checkpoint of iteration 99 (iter_0000099); load another one with --ckpt-step: "),
    "metadata.json": (lambda folder: (folder / ITERATION / "metadata.json").write_text("{"),
                      "is damaged: its metadata.json or .metadata cannot be read ("),
    "no .metadata": (lambda folder: (folder / ITERATION / ".metadata").unlink(),
                     "is damaged: its metadata.json or .metadata cannot be read ("),
    "empty .metadata": (lambda folder: (folder / ITERATION / ".metadata").write_bytes(b""), "cannot be read (empty)"),
    "bytes in .metadata": (lambda folder: (folder / ITERATION / ".metadata").write_bytes(b"\x99" * 99),
                           "the checkpoint of iteration 4 in "),
    "cut shard": (lambda folder: os.truncate(_shard(folder), 1000), "the checkpoint of iteration 4 in "),
    "no shard": (lambda folder: _shard(folder).unlink(), "No such file or directory: '"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_damage(pool, checkpoint, case):
    damage, words = DAMAGE[case]
    damage(checkpoint)
    line = _refusal(pool.run(1, run_command, [*BASE, "--load", str(checkpoint)]))
    assert words in line and str(checkpoint) in line
    assert "[2, 4]" in line or "load another one with --ckpt-step: [2]" in line


def test_ranks_say_it_once(pool, checkpoint):
    """torch raises the error of one rank on all of them, as a BaseException."""
    os.truncate(_shard(checkpoint), 1000)
    argv = [*BASE, "--pipeline-model-parallel-size", "2", "--load", str(checkpoint)]
    line = _refusal(pool.run(2, run_command, argv))
    assert "the checkpoint of iteration 4 in " in line and "a file is damaged: restore it" in line


@pytest.mark.parametrize(
    "cause, way_out",
    [
        (KeyError("decoder.layers.mlp"), "load another one with --ckpt-step: [2]"),
        (AssertionError("of a kind nobody knows"), "load another one with --ckpt-step: [2]"),
        (PermissionError(errno.EACCES, "Permission denied", "shard"), "mend that, or load another one"),
        (FileNotFoundError(errno.ENOENT, "No such file", "optimizer/shard"), "restore the file, or load another one"),
        (EOFError(), "a file is damaged: restore it, or load another one"),
        (RuntimeError("PytorchStreamReader failed reading zip archive"), "a file is damaged: restore it"),
        (ValueError("optimizer/iter_0000004: odd"), "load another one with --ckpt-step: [2]"),
        (ValueError("shape mismatch of optimizer.state.exp_avg"), "its optimizer state is of another layout"),
    ],
)  # fmt: skip
def test_only_what_is_known_is_blamed_on_files(tmp_path, cause, way_out):
    """Also in a folder whose name is a word that causes are known by."""
    folder = tmp_path / "optimizer"
    (folder / "iter_0000002").mkdir(parents=True)
    cause.args = tuple(
        each.replace("optimizer/", f"{folder}/") if isinstance(each, str) else each for each in cause.args
    )
    found = checkpoints._way_out(cause, folder, "4")
    assert found.startswith(way_out)
    assert ("damaged" in found) == ("damaged" in way_out)


def _fails_to_load(argv: list[str]) -> tuple[object, str]:
    from megatron.core import dist_checkpointing

    def load(*unused: object, **also_unused: object) -> None:
        raise KeyError("of a kind\nnobody knows")

    dist_checkpointing.load = load
    return run_command(argv)


@pytest.mark.parametrize(
    "step, newest", [(None, "non_persistent"), (400, "non_persistent"), (730, "non_persistent"), (731, "")]
)
def test_the_record_is_of_the_checkpoint_that_megatron_loads(tmp_path, monkeypatch, step, newest):
    from megatron.core import dist_checkpointing

    monkeypatch.setattr(dist_checkpointing, "check_is_distributed_checkpoint", lambda checkpoint_dir: True)
    monkeypatch.setattr(dist_checkpointing, "load_common_state_dict", lambda checkpoint_dir: {"args": checkpoint_dir})
    for folder, iteration in ((tmp_path, 500), (tmp_path / "non_persistent", 730)):
        folder.mkdir(exist_ok=True)
        (folder / "latest_checkpointed_iteration.txt").write_text(f"{iteration}")
    args = SimpleNamespace(load=str(tmp_path), finetune=False, ckpt_step=step, non_persistent_ckpt_type="global",
                           non_persistent_global_ckpt_dir=None)  # fmt: skip
    found = Path(checkpoints.arguments_of_checkpoint(args))
    assert found == tmp_path / newest / f"iter_{730 if newest else step:07d}"


def test_megatrons_words_are_passed_on(pool, saved):
    line = _refusal(pool.run(1, _fails_to_load, [*BASE, "--load", str(saved)]))
    assert line.startswith(f"Megatron-LM could not load the checkpoint of iteration 4 in {saved}: KeyError: ")
    assert "nobody knows" in line and line.endswith("; load another one with --ckpt-step: [2]")


def _writes_in_a_process_that_fails(argv: list[str]) -> tuple[object, str]:
    """An asynchronous save whose process has failed, as Megatron-LM's loop finds it later."""
    from megatron.training import async_utils, training

    class Failed:
        def maybe_finalize_async_calls(self, *unused: object, **also_unused: object) -> None:
            raise OSError("the writer has ended")

    def finalize(*unused: object, **also_unused: object) -> None:
        async_utils._async_calls_queue = Failed()
        args = checkpoints.megatrons_arguments()
        args.async_save = True
        async_utils.maybe_finalize_async_save()

    training.maybe_finalize_async_save = finalize
    return run_command(argv)


def test_a_writer_that_failed_is_of_no_iteration(pool, tmp_path):
    line = _refusal(
        pool.run(1, _writes_in_a_process_that_fails, [*BASE, "--save", str(tmp_path), "--save-interval", "9"])
    )
    assert line == f"a checkpoint cannot be written to --save {tmp_path}: OSError: the writer has ended"


def test_tied_prediction_layers_in_a_pipeline_are_refused(pool, saved):
    """Megatron-LM cannot read, either, what it cannot write."""
    flags = "--mtp-num-layers 1 --pipeline-model-parallel-size 2 --load"
    assert_refused(pool, [*BASE, *flags.split()], {
        "read": ([str(saved)], f"--load {saved}", "--mtp-num-layers 1", "use --pipeline-model-parallel-size 1"),
    })  # fmt: skip


@pytest.mark.parametrize("other", ["--num-layers 6", "--hidden-size 64", " ".join(MOE)], ids=["layers", "width", "MoE"])
def test_another_model(pool, saved, other):
    line = _refusal(pool.run(1, run_command, [*BASE, *other.split(), "--load", str(saved)]))
    assert "the checkpoint of iteration 4 in " in line and "it is of another model: give the flags" in line


def test_nothing_to_load_is_said_before_the_first_step(pool, tmp_path):
    flags = ["--load", str(tmp_path), "--train-iters", "1"]
    ((code, _),) = pool.run(1, run_command, [*BASE, *flags])
    assert code == 0
    told = pool.output[0].splitlines()
    (note,) = [number for number, line in enumerate(told) if "has no checkpoint: training starts from" in line]
    (start,) = [number for number, line in enumerate(told) if line.startswith("[before the start of training step]")]
    assert note > start
    line = _refusal(pool.run(1, run_command, [*BASE, *flags, "--exit-on-missing-checkpoint"]))
    assert line.startswith(f"--load {tmp_path} has no checkpoint, and --exit-on-missing-checkpoint is given")


def test_an_end_that_cannot_save_says_so(pool):
    """Megatron-LM's rerun state machine saves before it ends for a wrong result, whether or not there is a folder."""
    line = _refusal(pool.run(1, _ends_early, BASE))
    assert line.startswith("Megatron-LM stops and would save a checkpoint, but --save is not given")


def _ends_early(argv: list[str]) -> tuple[object, str]:
    from megatron.core.rerun_state_machine import RerunStateMachine

    RerunStateMachine.should_checkpoint_and_exit = lambda machine: (True, True, 16)
    return run_command(argv)


@pytest.mark.parametrize("optimizer", ["", "--use-distributed-optimizer"])
@pytest.mark.parametrize("saved_with", sampled([1, 2], 2))
def test_experts_on_one_rank_and_on_two(pool, tmp_path, optimizer, saved_with):
    """Megatron-LM keeps the optimizer state of experts apart only if they are spread."""
    argv = [*BASE, *MOE, *optimizer.split(), "--train-iters", "2", "--expert-model-parallel-size"]
    load = [str(3 - saved_with), "--load", str(tmp_path), "--train-iters", "3"]
    saved = pool.run(2, run_command, [*argv, str(saved_with), "--save", str(tmp_path), "--save-interval", "2"])
    assert [code for code, _ in saved] == [0, 0]
    line = _refusal(pool.run(2, run_command, [*argv, *load]))
    assert "its optimizer state is of another layout" in line and "add --no-load-optim" in line
    results = pool.run(2, run_command, [*argv, *load, "--no-load-optim", "--no-load-rng"])
    assert [code for code, _ in results] == [0, 0], results
