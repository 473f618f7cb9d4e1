"""The acceptance itself: its parts are there, machines that cannot run it are told so, what came of it is kept."""

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.__main__ import _listed, run_part
from tests.gpu.machine import notes, obstacle, problem
from tests.gpu.mps import private_mps
from tests.gpu.parts import PARTS, Part
from tests.gpu.ranks import OnGpus, sharing
from tests.gpu.verdicts import Verdict, read_report, write_entry
from tests.support.patience import PATIENCE
from tests.support.pool import REPOSITORY
from tests.tools.test_doctor import _facts

FOLDER = Path(__file__).parent


def test_the_parts_are_tests_of_both_devices_and_fit_the_time():
    for part in PARTS:
        file, _, function = part.test.partition("::")
        assert re.search(rf"^def {function}\(ranks, .*figure\):$", (FOLDER / file).read_text(), re.M), part
        assert part.after in ("", *(before.name for before in PARTS[: PARTS.index(part)]))
    assert sum(part.seconds for part in PARTS) <= 25 * 60
    named = {part.test.partition("::")[2] for part in PARTS}
    both = {
        name
        for path in FOLDER.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(ranks", path.read_text(), re.M)
    }
    assert both == named, "a test of a device that no part runs, or the other way round"


def _script(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", "scripts/gpu_check.sh", *arguments],
        cwd=REPOSITORY, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip


def test_a_dry_run_lists_the_parts_anywhere():
    done = _script("--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == _listed()
    assert all(part.name in done.stdout and f"{part.seconds} s" in done.stdout for part in PARTS)


def test_without_a_gpu_it_says_so_in_one_line():
    if Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists():
        pytest.skip("this machine has a GPU")
    done = _script()
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"gpu_check\.sh: no GPU: .*\n", done.stderr)


def test_flags_that_it_does_not_have_are_refused():
    done = _script("--fast")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "--fast" in done.stderr


def _machine(gpus: int = 1, torch: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A machine with so many GPUs and every package, with changes."""
    facts = _facts(driver={"gpus": ["NVIDIA H100"] * gpus, "version": "580.95.05"}, visible=None)
    cards = {"gpus": facts["torch"]["gpus"][:gpus]}
    return {**facts, "torch": {**facts["torch"], **cards, **(torch or {})}, **changes}


NO_DRIVER = {"gpus": [], "version": None}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (_machine(0, driver=NO_DRIVER), "no GPU: neither torch nor nvidia-smi"),
        (
            _machine(2, torch={"gpus": []}),
            r"lists 2 GPU\(s\), but torch .* driver 580.95.05 is too old for its CUDA 13.2",
        ),
        (_machine(1, torch={"gpus": [], "cuda": None}), "built for the CPU only"),
        (_machine(1, torch={"gpus": []}, visible="-1"), "CUDA_VISIBLE_DEVICES='-1' hides them"),
        (_machine(1, transformer_engine={"state": "broken", "error": "undefined symbol"}), "undefined symbol"),
    ],
    ids=["no GPU", "driver too old", "torch for CPUs", "hidden", "broken Transformer Engine"],
)
def test_where_nothing_can_run_one_line_says_why(facts, words):
    reason = problem(facts)
    assert reason is not None and re.search(words, reason) and "\n" not in reason


def test_a_machine_with_everything_runs_every_part():
    facts = _machine()
    assert problem(facts) is None and notes(facts) == []
    assert [obstacle(part, facts, set()) for part in PARTS] == [None] * len(PARTS)


def _not_run(facts: dict[str, Any], failed: set[str] = frozenset()) -> dict[str, str]:
    reasons = {part.name: obstacle(part, facts, failed) for part in PARTS}
    assert all("\n" not in why for why in reasons.values() if why)
    return {name: why for name, why in reasons.items() if why}


def test_more_ranks_than_gpus_need_the_mode_of_nccl():
    old = _machine(1, torch={"nccl": "2.27.5"})
    reasons = _not_run(old)
    assert reasons.keys() == {part.name for part in PARTS if part.ranks > 1}
    assert "2 ranks on 1 GPU(s) need the multi-rank mode of NCCL 2.30; NCCL is 2.27.5" in reasons["experts"]
    assert _not_run(_machine(2, torch={"nccl": "2.27.5"})).keys() == {part.name for part in PARTS if part.ranks > 2}
    assert _not_run(_machine(4, torch={"nccl": "2.27.5"})) == {}
    assert sharing(2, 2, (2, 30, 7)) == {}
    assert sharing(4, 1, (2, 30, 7))["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"


def test_what_is_missing_is_named_and_its_parts_do_not_run():
    broken = _machine(flash_attn={"state": "broken", "error": "undefined symbol: _ZN3c10"}, compiler=None)
    flash, compiler = notes(broken)
    assert "broken (undefined symbol: _ZN3c10)" in flash and "C compiler" in compiler
    assert _not_run(broken).keys() == {"split kernels"} and "gcc" in _not_run(broken)["split kernels"]
    assert _not_run(_machine(transformer_engine={"state": "missing"})).keys() == {"Transformer Engine"}


def test_ranks_that_do_not_talk_keep_no_part_waiting():
    reasons = _not_run(_machine(), {"NCCL, 2 ranks"})
    assert reasons.keys() == {part.name for part in PARTS if part.after == "NCCL, 2 ranks"}
    assert len(reasons) > 8


def _rank_and_place(more: str) -> tuple[str, str, str]:
    return os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ[more]


def test_ranks_on_gpus_are_processes_that_share_them(monkeypatch):
    """As far as that goes without one: ranks find each other over gloo."""
    from tests.gpu.test_collectives import _talk

    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/nowhere")  # no daemon of our own
    ranks = OnGpus(1, (2, 30, 7))
    try:
        assert ranks.run(2, _rank_and_place, "NCCL_MAX_CTAS", environment={"NCCL_MAX_CTAS": "2"}) == [
            ("0", "0", "2"), ("1", "0", "2"),
        ]  # fmt: skip
        assert len(ranks.run(2, _talk, "cpu")[1]) == 7
        with pytest.raises(KeyError):
            ranks.run(2, _rank_and_place, "NOT_SET")
    finally:
        ranks.stop()


DAEMON = """#!{bash}
echo "$* in $CUDA_MPS_PIPE_DIRECTORY" >>{log}
if [ "${{1:-}}" = -f ]; then
    [ -z "{works}" ] && exit 1
    : >"$CUDA_MPS_PIPE_DIRECTORY/up"
    while [ ! -e "$CUDA_MPS_PIPE_DIRECTORY/quit" ]; do {sleep} 0.05; done
    echo ended >>{log}
else
    read -r words
    [ -e "$CUDA_MPS_PIPE_DIRECTORY/up" ] || exit 1
    [ "${{words%% *}}" != quit ] || : >"$CUDA_MPS_PIPE_DIRECTORY/quit"
fi
"""


@pytest.mark.parametrize("works", ["yes", ""])
def test_the_daemon_is_private_and_always_stopped(tmp_path, monkeypatch, works):
    control, log = tmp_path / "nvidia-cuda-mps-control", tmp_path / "log"
    control.write_text(DAEMON.format(bash=shutil.which("bash"), sleep=shutil.which("sleep"), log=log, works=works))
    control.chmod(control.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    with pytest.raises(ZeroDivisionError), private_mps() as environment:
        if works:
            assert environment.keys() == {"CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"}
            assert all(Path(folder).is_dir() for folder in environment.values())
        else:
            assert environment == {}, "a daemon that does not start is done without"
        raise ZeroDivisionError
    assert ("ended" in log.read_text().split()) == bool(works)
    folders = re.findall(r"in (\S+)", log.read_text())
    assert len(set(folders)) == 1 and not Path(folders[0]).exists()


def test_without_a_daemon_kernels_take_turns(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with private_mps() as environment:
        assert environment == {}


@pytest.mark.exhaustive
def test_a_part_is_run_timed_and_reported(tmp_path):
    part = Part("two talk", "test_collectives.py::test_two_ranks_talk", int(PATIENCE), 2, "")
    verdict = run_part(part, tmp_path, {}, "cpu")
    assert verdict.word == "passed" and verdict.said.startswith("slowest: "), (tmp_path / "two_talk.log").read_text()
    quick = run_part(part._replace(seconds=1), tmp_path, {}, "cpu")
    assert quick.word == "failed" and "did not end within 1 s" in quick.said and quick.seconds < PATIENCE


def test_what_pytest_reports_becomes_a_verdict(tmp_path):
    report = tmp_path / "report.xml"

    def verdict(inside: str) -> tuple[str, str]:
        report.write_text(f"<testsuites><testsuite><testcase>{inside}</testcase></testsuite></testsuites>")
        found = read_report(PARTS[0], report, 1.0)
        return found.word, found.said

    assert verdict('<properties><property name="figure" value="3 us"/></properties>') == ("passed", "3 us")
    assert verdict('<failure message="assert 1\n == | 2"/>') == ("failed", "assert 1 == / 2")
    assert verdict('<error message="no room"/>') == ("failed", "no room")
    assert verdict('<skipped message="not installed"/>') == ("not run", "not installed")
    report.unlink()
    assert read_report(PARTS[0], report, 1.0).word == "failed"


def test_entries_of_the_log_are_new_files_and_listed_newest_first(tmp_path):
    (tmp_path / "README.md").write_text("# Log\n\nText.\n\n## 2026-11-20\n\n- [Old](2026-11-20-old.md)\n")
    verdicts = [
        Verdict(PARTS[0], "passed", 12.3, "2e-3"),
        Verdict(PARTS[1], "not run", 0.0, "no C compiler"),
        Verdict(PARTS[2], "failed", 1.0, "timeout"),
    ]
    about = ["- Commit: abc"]
    first, second = (write_entry(verdicts, tmp_path, "2026-11-22", "1 x NVIDIA H100", about) for _ in range(2))
    assert (first.name, second.name) == ("2026-11-22-gpu.md", "2026-11-22-gpu-2.md")
    title = (
        "Acceptance on 1 x NVIDIA H100: 1 of the 2 parts that ran pass, failed: NCCL, 2 ranks; not run: split kernels"
    )
    text = first.read_text()
    assert text.startswith(f"# {title}\n\n- Commit: abc\n\n| part | verdict |")
    assert (
        "| attention kernels | passed | 12 | 2e-3 |" in text
        and "| split kernels | not run | 0 | no C compiler |" in text
    )
    assert (tmp_path / "README.md").read_text() == (
        f"# Log\n\nText.\n\n## 2026-11-22\n\n- [{title}](2026-11-22-gpu-2.md)\n- [{title}](2026-11-22-gpu.md)\n\n"
        "## 2026-11-20\n\n- [Old](2026-11-20-old.md)\n"
    )
