"""The acceptance itself: its parts are there, machines that cannot run it are told so, what came of it is kept."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from balancing.process import is_alive, start_time
from tests.gpu import __main__ as acceptance
from tests.gpu import mps
from tests.gpu.__main__ import run_part
from tests.gpu.machine import notes, obstacle, problem
from tests.gpu.mps import private_mps
from tests.gpu.parts import MOST_SECONDS, PARTS, Part, listed
from tests.gpu.ranks import OnGpus, sharing
from tests.gpu.verdicts import Verdict, note, read_report, read_results, table, title, write_section
from tests.support.patience import PATIENCE
from tests.support.pool import REPOSITORY
from tests.tools.test_doctor import _facts

FOLDER = Path(__file__).parent
ENGINES = {"te-context", "te", "te-experts"}  # parts that need Transformer Engine


def test_the_parts_are_tests_of_both_devices_and_fit_the_time():
    for part in PARTS:
        file, _, function = part.test.partition("::")
        assert re.search(rf"^def {function}\(ranks, .*figure\):$", (FOLDER / file).read_text(), re.M), part
        assert part.after in ("", *(before.name for before in PARTS[: PARTS.index(part)]))
        assert part.limit() <= MOST_SECONDS and part.limit(10_000) == MOST_SECONDS
        assert part.limit(30) > 2 * part.limit(12), "limits follow from the start of a process"
    assert sum(part.limit() for part in PARTS) <= 40 * 60
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
    assert done.stdout.splitlines() == listed()
    assert all(part.name in done.stdout and part.shows in done.stdout for part in PARTS)
    assert re.search(r"^ 1\. attention +1\.\d min", done.stdout) and "minutes in all" in done.stdout


def test_without_a_gpu_it_says_so_in_one_line():
    if Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists():
        pytest.skip("this machine has a GPU")
    done = _script()
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"gpu_check\.sh: no GPU: .*\n", done.stderr)


@pytest.mark.parametrize("given", ["--fast", "no-such-part"])
def test_what_it_does_not_have_is_refused(given):
    done = _script("--dry-run", given)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and given in done.stderr


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


def _not_run(facts: dict[str, Any], words: dict[str, str] | None = None) -> dict[str, str]:
    reasons = {part.name: obstacle(part, facts, words or {}) for part in PARTS}
    assert all("\n" not in why for why in reasons.values() if why)
    return {name: why for name, why in reasons.items() if why}


def test_what_is_missing_is_named_and_its_parts_do_not_run():
    assert problem(_machine()) is None and _not_run(_machine()) == {} and notes(_machine()) == []
    broken = _machine(flash_attn={"state": "broken", "error": "undefined symbol: _ZN3c10"}, compiler=None)
    flash, compiler = notes(broken)
    assert "broken (undefined symbol: _ZN3c10)" in flash and "C compiler" in compiler
    assert _not_run(broken).keys() == {"merges", "split", "cost"} and "gcc" in _not_run(broken)["split"]
    assert _not_run(_machine(transformer_engine={"state": "missing"})).keys() == ENGINES
    assert _not_run(_machine(), {"nccl-2": "failed"}).keys() == {"nccl-4", "nccl-large"}


def test_ranks_share_a_gpu_by_what_their_nccl_can():
    assert sharing(2, 2, (2, 30, 7)) == {}
    assert sharing(4, 1, (2, 30, 7))["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    older = sharing(2, 1, (2, 28, 9))
    assert older["NCCL_HOSTID"] == "rank{rank}" and older["NCCL_SOCKET_IFNAME"] == "lo"
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in older


def _rank_and_place(more: str) -> tuple[str, str, str]:
    return os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ[more]


def _backend() -> str:
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    rank = dist.get_rank()
    averaged, pieces = torch.tensor([2.0 + rank]), [torch.zeros(1), torch.zeros(2)]
    dist.all_reduce(averaged, op=dist.ReduceOp.AVG)
    dist.all_gather(pieces, torch.full((1 + rank,), 5.0))  # of uneven length, as NCCL does and gloo does not
    assert averaged.item() == 2.5 and torch.cat(pieces).tolist() == [5.0] * 3
    return dist.get_backend()


def test_ranks_on_gpus_are_processes_that_share_them(monkeypatch):
    """As far as that goes without one: ranks find each other over gloo, or staged through the host."""
    from tests.gpu.test_collectives import _talk

    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/nowhere")  # no daemon of our own
    ranks = OnGpus(1, (2, 28, 9))
    try:
        assert ranks.run(2, _rank_and_place, "NCCL_MAX_CTAS", environment={"NCCL_MAX_CTAS": "2"}) == [
            ("0", "0", "2"), ("1", "0", "2"),
        ]  # fmt: skip
        assert [host for *_, host in ranks.run(2, _rank_and_place, "NCCL_HOSTID")] == ["rank0", "rank1"]
        monkeypatch.setenv("GPU_CHECK_STAGED", "1")
        assert ranks.run(2, _backend) == ["hostgroup"] * 2
        assert len(ranks.run(2, _talk, "cpu")[1]) == 8
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
    monkeypatch.setattr(mps, "_SECONDS", PATIENCE)
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
def test_a_part_is_run_timed_and_keeps_its_figures(tmp_path):
    part = Part("two talk", "test_collectives.py::test_two_ranks_talk", 60, 1, 2, "")
    assert run_part(part, tmp_path, {}, PATIENCE, "cpu") is None
    assert read_report(tmp_path / "two talk.xml") == ("passed", ""), (tmp_path / "two talk.log").read_text()
    figures = [json.loads(line)["figure"] for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(figures) == 1 and figures[0].startswith("slowest: ")
    over = run_part(part, tmp_path, {}, 1, "cpu")
    assert over is not None and over.startswith("it did not end within 1 s")


@pytest.mark.parametrize("when", ["starts", "runs"])
def test_a_part_ends_with_a_runner_that_is_killed(tmp_path, when):
    """Else it would hold the GPU beside the next one. It does not end by itself."""
    test, begun = tmp_path / "test_endless.py", tmp_path / "begun"
    (tmp_path / "conftest.py").write_text(
        "pytest_addoption = lambda parser: parser.addoption('--exhaustive', action='store_true')"
    )
    test.write_text(f"""if True:
        import pathlib, time
        import pytest

        @pytest.mark.parametrize("device", ["cpu"])
        def test_endless(device):
            pathlib.Path({str(begun)!r}).touch()
            time.sleep(3600)
    """)
    code = f"""if True:
        from pathlib import Path
        from tests.gpu.__main__ import Part, run_part
        part = Part("endless", "{test}::test_endless", 60, 1, 2, "")
        run_part(part, Path({str(tmp_path)!r}), {{}}, 3600, "cpu")
    """
    with subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY) as runner:
        children = Path(f"/proc/{runner.pid}/task/{runner.pid}/children")
        deadline = time.monotonic() + PATIENCE
        while not (started := children.read_text().split()) or (when == "runs" and not begun.exists()):
            assert runner.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        began = start_time(started[0])
        runner.kill()
    while is_alive(started[0], began):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not (tmp_path / "endless.xml").exists()


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        ("", ("passed", "")),
        ('<failure message="assert 1\n == | 2"/>', ("failed", "assert 1 == / 2")),
        ('<error message="no room"/>', ("failed", "no room")),
        ('<skipped message="not installed"/>', ("not run", "not installed")),
        ("</testcase><testcase>", ("failed", "pytest reported 2 tests instead of one")),
    ],
)
def test_what_pytest_reports_becomes_a_verdict(tmp_path, inside, expected):
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite><testcase>{inside}</testcase></testsuite></testsuites>")
    assert read_report(report) == expected


def test_results_are_kept_as_they_come(tmp_path):
    """A part that was killed has its figures; one that ran twice has those of the last time."""
    results = tmp_path / "results.jsonl"
    first, second, third, *_ = PARTS
    note(results, first.name, began="today")
    note(results, first.name, figure="an old one")
    note(results, first.name, began="today")
    note(results, first.name, figure="2e-3")
    note(results, first.name, figure="3e-3")
    note(results, first.name, word="passed", said="", seconds=12.3)
    note(results, second.name, began="today")
    note(results, second.name, figure="5 of 9")
    results.open("a").write('{"part": "cut o')
    verdicts = read_results(results)
    assert [verdict.part for verdict in verdicts] == list(PARTS)
    assert verdicts[0] == Verdict(first, "passed", 12.3, "2e-3; 3e-3")
    assert verdicts[1] == Verdict(second, "stopped", 0.0, "it was stopped before it ended; 5 of 9")
    assert verdicts[2] == Verdict(third, "not run", 0.0, "")
    assert f"| {first.name} | {first.shows} | passed | 12 | 2e-3; 3e-3 |" in table(verdicts)


def test_a_title_reads_like_success_only_where_every_part_passed():
    passed = [Verdict(part, "passed", 1.0, "") for part in PARTS]
    assert title(passed, "1 x H200") == f"Acceptance passed on 1 x H200: all {len(PARTS)} parts"
    rest = [Verdict(part, "not run", 0.0, "") for part in PARTS[2:]]
    some = title([*passed[:2], *rest], "1 x H200")
    assert some.startswith(f"Acceptance is incomplete on 1 x H200: 2 of {len(PARTS)} parts passed; not run: ")
    for word in ("failed", "stopped"):
        worse = title([*passed[:1], Verdict(PARTS[1], word, 1.0, ""), *rest], "1 x H200")
        assert worse.startswith(f"Acceptance failed on 1 x H200: 1 of {len(PARTS)} parts passed; ")


@pytest.fixture
def runner(tmp_path, monkeypatch):
    """The runner on a machine with one GPU; parts pass, fail or are killed as `fates` says: (call, fates, ran)."""
    page = tmp_path / "docs" / "support.md"
    page.parent.mkdir()
    shutil.copy(REPOSITORY / "docs" / "support.md", page)
    monkeypatch.setattr(acceptance, "REPOSITORY", tmp_path)
    monkeypatch.setattr(acceptance, "_START", "pass")
    monkeypatch.setattr("tests.gpu.machine.look", lambda: _machine(transformer_engine={"state": "missing"}))
    monkeypatch.setenv("PATH", str(tmp_path / "no git"))
    fates: dict[str, str] = {}
    ran: list[tuple[str, bool]] = []

    def part_runs(part: Part, out: Path, environment: dict[str, str], limit: float) -> str | None:
        ran.append((part.name, "GPU_CHECK_STAGED" in environment))
        note(out / "results.jsonl", part.name, figure=f"figure of {part.name}")
        fate = fates.get(part.name, "")
        if fate == "killed":
            raise KeyboardInterrupt
        inside = '<failure message="wrong"/>' if fate == "fails" else ""
        (out / f"{part.name}.xml").write_text(f"<a><testcase>{inside}</testcase></a>")
        return None

    monkeypatch.setattr(acceptance, "run_part", part_runs)
    return lambda *argv: acceptance.main([*argv, "--out", str(tmp_path / "out")]), fates, ran


def test_it_goes_on_with_the_next_part(runner, tmp_path):
    call, fates, ran = runner
    fates["split"] = "killed"
    with pytest.raises(KeyboardInterrupt):
        call()
    assert [name for name, _ in ran] == [part.name for part in PARTS[:3]]
    assert call() == 1, "one was stopped"
    assert [name for name, _ in ran] == [part.name for part in PARTS if part.name not in ENGINES]
    text = (tmp_path / "docs/support.md").read_text()
    assert "| stopped | 0 | it was stopped before it ended; figure of split |" in text
    assert "Transformer Engine is missing" in text and "commit unknown" in text
    assert text.endswith((REPOSITORY / "docs/support.md").read_text()[-100:])
    fates.clear()
    assert call("split") == 0, "the part that was named passed"
    assert call() == 3, "three parts cannot run here"
    assert "# Acceptance is incomplete on 1 x NVIDIA H200: " in (tmp_path / "out/acceptance.md").read_text()


def test_its_own_table_makes_no_other_commit(tmp_path, monkeypatch):
    """Else nothing would be resumed in a checkout."""
    monkeypatch.setattr(acceptance, "REPOSITORY", tmp_path)
    (tmp_path / "docs").mkdir()
    for name in ("docs/support.md", "code.py"):
        (tmp_path / name).write_text("before\n")
    who = "-c user.name=a -c user.email=a".split()
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    about = acceptance._about(_machine())
    (tmp_path / "docs/support.md").write_text("a table\n")
    assert acceptance._about(_machine()) == about
    (tmp_path / "code.py").write_text("other code\n")
    assert acceptance._about(_machine()) == [*about[:-1], f"{about[-1]}-dirty"]


def test_where_nccl_does_not_talk_tensors_go_through_the_host(runner, tmp_path):
    call, fates, ran = runner
    fates["nccl-2"] = "fails"
    assert call() == 1
    staged = {part.name for part in PARTS if part.ranks > 1 and not part.name.startswith("nccl")} - ENGINES
    assert {name for name, through_host in ran if through_host} == staged
    assert "over gloo, tensors staged through the host" in (tmp_path / "out/acceptance.md").read_text()


def test_places_that_cannot_be_written_are_named(runner, tmp_path, monkeypatch, capsys):
    call, _, _ = runner

    def denied(*args: Any) -> None:
        raise ValueError("docs/support.md cannot be written: it is read-only")

    monkeypatch.setattr("tests.gpu.verdicts.write_section", denied)
    assert call("attention") == 0
    assert "docs/support.md cannot be written: it is read-only" in capsys.readouterr().out
    (tmp_path / "out/results.jsonl").unlink()
    (tmp_path / "out/results.jsonl").mkdir()
    assert call() == 2
    assert re.fullmatch(r"gpu_check\.sh: cannot write to .*; name a folder with --out DIR\n", capsys.readouterr().err)


def test_the_section_of_a_page_is_replaced(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{acceptance_marks()}\nafter\n")
    for text in ("first", "second"):
        write_section(page, text)
    assert page.read_text().split() == ["before", *acceptance_marks("second").split(), "after"]


def acceptance_marks(text: str = "") -> str:
    from tests.gpu.verdicts import BEGIN, END

    return f"{BEGIN}\n\n{text}\n\n{END}"


def test_a_move_that_takes_more_is_seen_although_it_resets_the_maximum(monkeypatch):
    """As on a GPU, where the move itself resets the device's maximum at its end."""
    import torch

    from tests.gpu.training import _kept_peak

    held = {"most": 0}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: held["most"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 2 * held["most"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: held.update(most=7))
    with _kept_peak() as peaks:
        held["most"] = 1000
        torch.cuda.reset_peak_memory_stats()
    assert max(peaks) == (1000, 2000)
