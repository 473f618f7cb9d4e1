"""A failed job reports once, last on the screen: a rank that dies or stops is named, an error of all is told once."""

import contextlib
import functools
import io
import itertools
import os
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks.emulated.ports import reserved_ports
from tests.support.command import run_command, run_python
from tests.support.patience import PATIENCE, PATIENT_LAUNCHER
from tests.support.training import MOCK_DATA, MODEL


def _signalled(port: int, victim: int, how: int, stopped: Path, argv: list[str]) -> tuple[object, str]:
    """Run the command on this rank of a job without a launcher, so that the store is rank 0's. Before the third step
    the victim signals itself. It is a process of its own: of a rank that ended badly, the pool would not wait for what
    the others have to say. Returns the exit code, and what was said.

    The other rank waits for `stopped`, which the victim's parent makes, and only then for the victim, not for long.
    """
    from megatron.training import training

    from megatron.balanced.trainer.watchdog import failure

    if victim == 0:
        failure._MOST_SECONDS = 10.0  # which a rank waits for a store that is gone
    rank, step, steps = int(os.environ["RANK"]), training.train_step, itertools.count(1)
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(port)}
    if rank == victim and (process := os.fork()):
        ended = os.waitpid(process, os.WUNTRACED)[1]
        stopped.touch()
        return ("stopped" if os.WIFSTOPPED(ended) else os.waitstatus_to_exitcode(ended)), ""
    # Linux hangs up on a stopped process whose parent has ended, and continues it: under nohup it would go on training.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

    @functools.wraps(step)
    def train_step(*args: object, **kwargs: object) -> object:
        if next(steps) == 3:
            if rank == victim:
                os.kill(os.getpid(), how)
            while not stopped.exists():
                time.sleep(0.05)
            for group in dist.distributed_c10d._world.pg_names:
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), group)
        return step(*args, **kwargs)

    training.train_step = train_step
    said = run_command(argv)
    if rank == victim:
        os._exit(1)
    return said


SIGNALS = [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGSTOP, id="stopped")]


@pytest.mark.parametrize("how", SIGNALS)
@pytest.mark.parametrize("victim", range(2))
def test_the_rank_that_died_is_named(pool, tmp_path, how: signal.Signals, victim: int) -> None:
    """Rank 0 has the store with it: without it each of the others says so for itself."""
    with reserved_ports(1) as (port,):
        ended = pool.run(2, _signalled, port, victim, how, tmp_path / "stopped", [*MODEL, *MOCK_DATA])
    code, report = ended[1 - victim]
    assert ended[victim][0] == ("stopped" if how == signal.SIGSTOP else -how)
    assert code not in (0, None), f"exit code {code} of a rank that could not go on"
    assert report.count("pretrain_gpt.py: error:") == 1
    who = f"rank {victim}" if victim else "rank 0, which has the job's store,"
    assert f"pretrain_gpt.py: error: {who} died or stopped answering; " in report


def _interrupted(argv: list[str]) -> tuple[object, str]:
    """Ctrl-C reaches both ranks in their second step."""
    from megatron.training import training

    step, steps = training.train_step, itertools.count(1)

    @functools.wraps(step)
    def train_step(*args: object, **kwargs: object) -> object:
        if next(steps) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return step(*args, **kwargs)

    training.train_step = train_step
    return run_command(argv)


def test_ctrl_c_ends_in_one_line(pool) -> None:
    (code, said), (other, other_said) = pool.run(2, _interrupted, [*MODEL, *MOCK_DATA])
    assert code == 130 and other not in (0, None)
    assert said.splitlines()[-1] == "pretrain_gpt.py: interrupted"
    assert "Traceback" not in said + other_said


def test_torchruns_table_ends_with_the_error() -> None:
    run = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", PATIENT_LAUNCHER]
    flags = [*MODEL, *MOCK_DATA, "--balance", "nothing"]
    done = run_python(*run, "--rdzv-endpoint", "127.0.0.1:0", "pretrain_gpt.py", *flags)
    assert done.returncode
    *_, last, _ = [line for line in done.stderr.splitlines() if line.strip()]
    assert "traceback : ValueError: pretrain_gpt.py: error: " in last and "--balance nothing" in last


ENVIRONMENTS = {
    "RANK beyond WORLD_SIZE": ({"RANK": "7"}, "RANK='7' must be a whole number from 0 to 3 of WORLD_SIZE 4"),
    "RANK no number": ({"RANK": "x"}, "RANK='x' must be a whole number from 0 to 3 of WORLD_SIZE 4"),
    "WORLD_SIZE no number": ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' must be a whole number of at least 1"),
    "port too high": ({"MASTER_PORT": "99999999"}, "MASTER_PORT='99999999' must be a whole number from 1 to 65535"),
    "port no number": ({"MASTER_PORT": "http"}, "MASTER_PORT='http' must be a whole number from 1 to 65535"),
    "port in use": ({"MASTER_PORT": "USED"}, "the port is in use; choose another"),
    "half of it": (
        {"RANK": None, "MASTER_ADDR": None, "MASTER_PORT": None, "WORLD_SIZE": "2"},
        "WORLD_SIZE is 2, but RANK and MASTER_ADDR and MASTER_PORT not set; start with torchrun, or with scripts/slurm "
        "under SLURM",
    ),
}


@pytest.mark.parametrize("case", ENVIRONMENTS)
def test_a_launch_that_cannot_work_is_one_line(pool, case: str) -> None:
    ((code, said),) = pool.run(1, _launch, *ENVIRONMENTS[case])
    assert code == 2
    (line,) = said.splitlines()
    assert line.startswith("pretrain_gpt.py: error: ")


def _launch(change: dict[str, str | None], words: str) -> tuple[object, str]:
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    with socket.socket() as used:
        used.bind(("0.0.0.0", 0))
        used.listen()
        port = str(used.getsockname()[1])
        given = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_PORT": "29500"} | change
        for name, value in given.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = port if value == "USED" else value
        code, said = run_command([*MODEL, *MOCK_DATA])
    assert words in said, said
    return code, said


def _fail(argv: list[str], fault: str) -> tuple[object, str]:
    """Run the command on this rank with a fault planted. Returns its exit code and stderr."""
    from megatron.training import training

    from megatron.balanced.trainer.watchdog import failure

    if fault == "one builds":  # a rank that fails alone waits in vain for others to fail, too
        failure._START_SECONDS = 5.0
    rank = int(os.environ["RANK"])
    build, step = training.setup_model_and_optimizer, training.train_step

    def build_with_fault(*args: object, **kwargs: object) -> object:
        if fault == "all build":
            raise KeyError(f"a part of rank {rank}")
        if fault == "each builds":
            raise (KeyError if rank else LookupError)("a part")
        if fault == "one builds" and rank == 1:
            raise KeyError("a part")
        return build(*args, **kwargs)

    def step_with_fault(*args: object, **kwargs: object) -> object:
        if fault == "all step":
            raise ValueError(f"a step of rank {rank}")
        return step(*args, **kwargs)

    training.setup_model_and_optimizer = build_with_fault
    training.train_step = step_with_fault
    return run_command(argv)


def _reports(pool, world_size: int, fault: str, *flags: str) -> tuple[list[object], list[str]]:
    """Exit codes, and what was said of failures on all ranks together."""
    results = pool.run(world_size, _fail, [*MODEL, *MOCK_DATA, *flags], fault)
    return [code for code, _ in results], [text for _, text in results]


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_megatron_refuses_on_all_ranks_is_one_line(pool, world_size):
    """It is found when the optimizer is built."""
    codes, said = _reports(pool, world_size, "none", "--optimizer", "muon", "--global-batch-size", str(world_size))
    assert codes == [2] * world_size
    everything = "".join(said)
    assert "Traceback" not in everything
    (line,) = [line for line in everything.splitlines() if "error:" in line]
    assert line.startswith("pretrain_gpt.py: error: emerging-optimizers package is required")
    assert "pip install emerging-optimizers" in line


REFUSED = {
    "by the schedule of the first step": (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 1",
        "contiguous micro-batches in a virtual pipeline stage",
    ),
    "file": ("--nccl-communicator-config-path nowhere.yaml", "No such file or directory: 'nowhere.yaml'"),
    "model": ("--apply-layernorm-1p", "zero_centered_gamma not supported by torch LayerNorm"),
    "without a word": (
        "--swiglu --quick-geglu",
        "Megatron-LM demands: not args.swiglu (training/argument_utils.py, line",
    ),
    "by accident": ("--config-logger-dir FOLDER", "Megatron-LM fails with TypeError: cannot pickle"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_after_the_command_line_is_one_line(pool, tmp_path, case):
    flags, error = REFUSED[case]
    codes, said = _reports(pool, 2, "none", *flags.replace("FOLDER", str(tmp_path)).split())
    assert codes == [2, 2]
    everything = "".join(said)
    assert "Traceback" not in everything
    told = [line for line in everything.splitlines() if "error:" in line]
    assert len(told) == 1 and error in told[0], told


@pytest.mark.parametrize("fault, error", [("all build", "KeyError: 'a part of rank"), ("all step", "a step of rank")])
def test_any_other_error_keeps_its_traceback_once(pool, fault, error):
    """Although each rank's message has its own number."""
    codes, said = _reports(pool, 2, fault)
    assert codes == [1, 1]
    everything = "".join(said)
    assert everything.count("Traceback") == 1
    assert "pretrain_gpt.py: ranks 0-1 of 2 failed:\n" in everything
    assert everything.count(error) >= 1


def test_each_kind_of_error_keeps_its_traceback(pool):
    codes, said = _reports(pool, 2, "each builds")
    assert codes == [1, 1]
    everything = "".join(said)
    assert everything.count("Traceback") == 2
    assert everything.count("pretrain_gpt.py: rank 0 of 2 failed:\n") == 1
    assert everything.count("pretrain_gpt.py: rank 1 of 2 failed:\n") == 1


def test_what_fails_on_one_rank_alone(pool):
    """The other rank waits for it in a collective, and says no more than one line."""
    codes, (other, said) = _reports(pool, 2, "one builds")
    assert codes[1] == 1
    assert "pretrain_gpt.py: rank 1 of 2 failed:\n" in said
    assert said.count("Traceback") == 1 and "KeyError: 'a part'" in said
    assert "Traceback" not in other


def _with_store(fault: str) -> tuple[str, bool]:
    """Fail on this rank where the store cannot be asked. Returns what was said, and whether it ended in time."""
    from megatron.balanced.trainer.watchdog import failure

    def open_store(name: str, *, anew: bool = False) -> object:
        if fault == "frozen":
            time.sleep(3600)
        raise RuntimeError("the store is gone")

    failure.open_store = open_store  # type: ignore[assignment]
    failure._MOST_SECONDS = 0.5 if fault == "frozen" else PATIENCE
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), pytest.raises(SystemExit) as stopped, failure.report_failures_once():
        raise KeyError("a part")
    return stderr.getvalue(), stopped.value.code == 1


@pytest.mark.parametrize("fault", ["frozen", "gone"])
def test_without_a_store_each_rank_speaks_for_itself(pool, fault):
    for rank, (said, ended) in enumerate(pool.run(2, _with_store, fault)):
        assert ended
        assert said.startswith(f"pretrain_gpt.py: rank {rank} of 2 failed:\nTraceback")


def _late_report() -> tuple[str, object]:
    """Fail on rank 0, whose report is printed and then takes longer than a rank waits for it."""
    if int(os.environ["RANK"]):
        return "", None
    from megatron.balanced.trainer.watchdog import failure

    failure._START_SECONDS, failure._MOST_SECONDS = 0.0, 5.0
    # The thread that reports takes longer; the rank itself, if a busy machine was slow to start that thread, does not.
    failure._give_to_torchrun = lambda report: time.sleep(
        3600 * (threading.current_thread() is not threading.main_thread())
    )
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), pytest.raises(SystemExit) as stopped, failure.report_failures_once():
        raise KeyError("a part")
    return stderr.getvalue(), stopped.value.code


def test_a_report_that_is_late_is_not_told_twice(pool):
    (said, code), _ = pool.run(2, _late_report)
    assert code == 1 and said.count("Traceback") == 1 and said.count("pretrain_gpt.py: rank 0 of 2 failed:") == 1, said


def _asked_twice() -> list[int]:
    """Two ranks ask at once where all are. Which of the questions this rank's thread answers."""
    from megatron.balanced.trainer.rendezvous import open_store
    from megatron.balanced.trainer.watchdog import stall

    watch, store = object.__new__(stall.Watch), open_store("stall")
    watch._answered, watch._main = 0, threading.main_thread().ident
    for _ in range(2):
        store.add("asked", 1)
    watch._look(store)
    return [number for number in (1, 2) if store.check([f"{number}/0"])]


def test_each_question_is_answered(pool):
    assert pool.run(1, _asked_twice) == [[1, 2]]
