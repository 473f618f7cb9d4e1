"""The acceptance itself: its parts are there, machines that cannot run it are told so, what came of it is kept."""

import ast
import contextlib
import os
import re
import shutil
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import __main__ as acceptance
from tests.gpu import mps
from tests.gpu.machine import notes, obstacle, problem
from tests.gpu.mps import private_mps
from tests.gpu.parts import IMPORT_SECONDS, MINUTES, PARTS, STREAMS, Part, choose, listed, predict
from tests.gpu.trial import FP32, TF32, Cut, Machine, Notes, Trial, sharing
from tests.gpu.verdicts import Verdict, details, note, read_results, table, title, write_section
from tests.support.patience import PATIENCE
from tests.support.pool import REPOSITORY, Hang, Pool
from tests.tools.test_doctor import _facts

FOLDER = Path(__file__).parent
ENGINES = {part.name for part in PARTS if part.needs == "engine"}


def test_the_parts_are_functions_that_take_what_they_are_given():
    """A part that takes a trial, or is the body of a rank; nothing of this folder that is either is left out."""
    found = {}
    for path in FOLDER.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith(("_", "test_")):
                taken = [ast.unparse(argument.annotation) for argument in node.args.args if argument.annotation]
                if taken in (["Trial"], ["str", "Notes"]) and len(taken) == len(node.args.args):
                    found[f"{path.stem}{'.' if taken == ['Trial'] else ':'}{node.name}"] = path
    assert found.keys() == {part.test for part in PARTS}
    assert len({part.name for part in PARTS}) == len(PARTS)
    assert all(part.after in ("", *(before.name for before in PARTS[:n])) for n, part in enumerate(PARTS))


def test_all_parts_fit_the_time_and_fewer_are_chosen_by_worth():
    assert predict(PARTS) <= 60 * MINUTES and MINUTES == 12 and IMPORT_SECONDS == 20
    assert choose(MINUTES) == list(PARTS)
    for minutes in (1, 3, 5, 8):
        chosen = choose(minutes)
        assert chosen and predict(chosen) <= 60 * minutes and set(chosen) < set(PARTS)
        for number, part in enumerate(PARTS):
            before = [other for other in chosen if PARTS.index(other) < number]
            fits = predict([*before, part]) <= 60 * minutes and part.after in ("", *(other.name for other in before))
            assert (part in chosen) == fits, f"{part.name}, of {minutes} minutes: what is worth more is there first"
    # What has run leaves its time to what is worth most of the rest.
    worth = [[*map(PARTS.index, chosen), len(PARTS)] for chosen in (choose(5, [PARTS[0].name]), choose(5))]
    assert 0 not in worth[0] and worth[0] <= worth[1][1:]
    beside = [part._replace(seconds=10, alone=False) for part in PARTS[: 2 * STREAMS]]
    assert predict(beside, 7) == 7 + 20 and predict([part._replace(alone=True) for part in beside[:3]], 7) == 37


def _script(*arguments: str, **more: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", "scripts/gpu_check.sh", *arguments],
        cwd=REPOSITORY, env=os.environ | {"PYTHON": sys.executable} | more,
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip


def test_a_dry_run_lists_the_parts_anywhere():
    done = _script("--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == listed()
    assert all(part.name in done.stdout and part.shows in done.stdout for part in PARTS)
    assert f"{len(PARTS)} of {len(PARTS)} parts in" in done.stdout
    few = _script("--dry-run", "--minutes", "3").stdout
    assert few.splitlines() == listed(3) and "(does not fit)" in few


def test_without_a_gpu_it_says_so_in_one_line():
    if Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists():
        pytest.skip("this machine has a GPU")
    done = _script()
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"gpu_check\.sh: no GPU: .*\n", done.stderr)


def test_a_library_of_nccl_that_is_not_there_is_named():
    done = _script("--rehearse", NCCL_LIBRARY="/no/libnccl.so.2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "gpu_check.sh: NCCL_LIBRARY=/no/libnccl.so.2 cannot be read; name a file libnccl.so.2\n"


@pytest.mark.parametrize("given", ["--fast", "no-such-part", "--minutes=0"])
def test_what_it_does_not_have_is_refused(given):
    done = _script("--dry-run", given)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and given.replace("=", " ") in done.stderr


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


def _not_run(facts: dict[str, Any], words: dict[str, str] | None = None, **machine: Any) -> dict[str, str]:
    on = Machine(**{"gpus": 1, "mps": {"CUDA_MPS_PIPE_DIRECTORY": "there"}} | machine)
    reasons = {part.name: obstacle(part, facts, words or {}, on) for part in PARTS}
    assert all("\n" not in why for why in reasons.values() if why)
    return {name: why for name, why in reasons.items() if why}


def test_what_is_missing_is_named_and_its_parts_do_not_run():
    assert problem(_machine()) is None and _not_run(_machine()) == {} and notes(_machine()) == []
    broken = _machine(flash_attn={"state": "broken", "error": "undefined symbol: _ZN3c10"}, compiler=None)
    flash, compiler = notes(broken)
    assert "broken (undefined symbol: _ZN3c10)" in flash and "C compiler" in compiler
    assert _not_run(broken).keys() == {"merges", "split", "rates-split"} and "gcc" in _not_run(broken)["split"]
    assert (
        _not_run(_machine(transformer_engine={"state": "missing"})).keys()
        == ENGINES
        == {"te-context", "te", "te-experts"}
    )
    assert _not_run(_machine(), {"nccl-2": "failed"}).keys() == {"nccl-4", "nccl-large"}
    quarters = {part.name for part in PARTS if part.name.startswith("quarters")}
    assert len(quarters) == 3 and _not_run(_machine(), mps={}).keys() == quarters | {"trial"}
    assert _not_run(_machine(), mps={}, gpus=4) == {}, "with as many GPUs as ranks nothing is shared"


def test_ranks_share_a_gpu_by_what_their_nccl_can():
    assert sharing(2, 2, (2, 30, 7)) == {}
    assert sharing(4, 1, (2, 30, 7))["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    older = sharing(2, 1, (2, 28, 9))
    assert older["NCCL_HOSTID"] == "rank{rank}" and older["NCCL_SOCKET_IFNAME"] == "lo"
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in older


def _environment_of_a_rank() -> dict[str, str]:
    return dict(os.environ)


def _fail() -> None:
    raise KeyError(os.environ["RANK"])


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


def test_ranks_on_gpus_are_told_how_to_share_them(tmp_path):
    """As far as that goes without one: ranks find each other staged through the host."""
    from tests.gpu.collectives import _talk

    pool = Pool("cuda")
    try:
        of = Trial(pool, Machine(1, (2, 28, 9), {"CUDA_MPS_PIPE_DIRECTORY": "pipe"}), Notes("part"), tmp_path)
        for number, told in enumerate(of.run(2, _environment_of_a_rank, environment={"NCCL_MAX_CTAS": "2"})):
            wanted = {"RANK": f"{number}", "LOCAL_RANK": "0", "NCCL_HOSTID": f"rank{number}", "NCCL_MAX_CTAS": "2"}
            wanted |= {"CUDA_MPS_PIPE_DIRECTORY": "pipe", **FP32}
            assert told.items() >= wanted.items()
        (told,) = of.run(1, _environment_of_a_rank, environment=TF32)
        assert not told.keys() & {*FP32, "NCCL_HOSTID", "CUDA_MPS_PIPE_DIRECTORY"}
        staged = Trial(pool, Machine(1, (2, 28, 9), staged=True), Notes("part"), tmp_path)
        assert staged.run(2, _backend) == ["hostgroup"] * 2
        assert len(staged.run(2, _talk, "cpu")[1]) == 8
        with pytest.raises(KeyError):
            of.run(2, _fail)
    finally:
        pool.stop()


class _Busy:
    """A pool whose first runs end with an error."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def run(self, *args: Any, **kwargs: Any) -> list[str]:
        if self.errors:
            raise self.errors.pop(0)
        return ["done"]


def test_a_gpu_that_is_busy_is_asked_again(tmp_path, monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    busy = RuntimeError("rank 0 of 4: SystemExit: 1")
    busy.add_note("CUDA error: CUDA-capable device(s) is/are busy or unavailable")
    results = tmp_path / "results.jsonl"

    def trial_with(*errors: Exception) -> Trial:
        return Trial(_Busy(*errors), Machine(1), Notes("quarters", results), tmp_path)

    assert trial_with(busy, busy).run(1, _backend) == ["done"] and slept == [2, 5]
    assert "busy or unavailable; once more after 5 s" in details(results)[1]
    with pytest.raises(RuntimeError, match="SystemExit"):
        trial_with(busy, busy, busy, busy).run(1, _backend)
    with pytest.raises(RuntimeError, match="another"):
        trial_with(RuntimeError("another")).run(1, _backend)


def test_a_part_that_is_cut_says_how_far_it_was(tmp_path):
    """And keeps its figures."""
    hang = Hang("ranks [0] did not end\n iteration        2/       4 | lm loss\n iteration        3/       4 | lm loss")
    results = tmp_path / "results.jsonl"
    of = Trial(_Busy(hang), Machine(1), Notes("experts", results), tmp_path, 3600)
    with pytest.raises(Cut, match=r"^a run did not end within 120 s, in run 1, fp32, shared, iteration 3 of 4 done$"):
        of.run(2, _backend, what="fp32, shared")
    with pytest.raises(Cut, match=r"^cut after 0 s, in run 1, bf16$"):
        Trial(_Busy(), Machine(1), Notes("experts", results), tmp_path, 0).run(2, _backend, what="bf16")
    of.figure("losses within 1e-7")
    (verdict,) = (verdict for verdict in read_results(results) if verdict.part.name == "experts")
    assert "losses within 1e-7" in verdict.said


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
    note(results, second.name, at="run 3, chunks")
    note(results, second.name, figure="5 of 9")
    note(results, second.name, detail="losses 5.1 5.0")
    results.open("a").write('{"part": "cut o')
    verdicts = read_results(results)
    assert [verdict.part for verdict in verdicts] == list(PARTS)
    assert verdicts[0] == Verdict(first, "passed", 12.3, "2e-3; 3e-3")
    assert verdicts[1] == Verdict(second, "stopped", 0.0, "it was stopped in run 3, chunks; 5 of 9")
    assert details(results) == [f"- {second.name}: losses 5.1 5.0"]
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


class _NoPool:
    """Of a runner whose parts are made up."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def branch(self) -> "_NoPool":
        return _NoPool()


@pytest.fixture
def runner(tmp_path, monkeypatch):
    """The runner on a machine with one GPU; parts pass, fail, are cut or killed as `fates` says: (call, fates, ran)."""
    page = tmp_path / "docs" / "support.md"
    page.parent.mkdir()
    shutil.copy(REPOSITORY / "docs" / "support.md", page)
    monkeypatch.setattr(acceptance, "REPOSITORY", tmp_path)
    monkeypatch.setattr(acceptance, "_imported", lambda out, rehearse: contextlib.nullcontext(_NoPool()))
    monkeypatch.setattr(mps, "private_mps", lambda: contextlib.nullcontext({"CUDA_MPS_PIPE_DIRECTORY": "there"}))
    monkeypatch.setattr("tests.gpu.machine.look", lambda: _machine(transformer_engine={"state": "missing"}))
    monkeypatch.setenv("PATH", str(tmp_path / "no git"))
    fates: dict[str, str] = {}
    ran: list[tuple[str, bool]] = []

    def part_runs(
        part: Part, pool: Any, machine: Machine, notes: Notes, seconds: float, staged: bool = False
    ) -> tuple[str, str, int, int]:
        ran.append((part.name, staged))
        notes.figure(f"figure of {part.name}")
        fate = fates.pop(part.name, "")
        if fate == "is killed":
            raise KeyboardInterrupt
        return {"fails": ("failed", "wrong", 1, 2), "is cut": ("stopped", "cut after 9 s", 2, 4)}.get(
            fate, ("passed", "", 1, 2)
        )

    monkeypatch.setattr(acceptance, "run_part", part_runs)
    return lambda *argv: acceptance.main([*argv, "--out", str(tmp_path / "out")]), fates, ran


def test_it_goes_on_with_what_has_not_run(runner, tmp_path):
    call, fates, ran = runner
    fates["cost"] = "is killed"  # after the streams, alone
    with pytest.raises(KeyboardInterrupt):
        call()
    beside = {part.name for part in PARTS if not part.alone} - ENGINES
    assert {name for name, _ in ran} == beside | {"cost"} and ran[0] == ("nccl-2", False)
    assert call() == 1, "one was stopped"
    assert {name for name, _ in ran} == {part.name for part in PARTS} - ENGINES and len(ran) == len(PARTS) - len(
        ENGINES
    )
    text = (tmp_path / "docs/support.md").read_text()
    assert "| stopped | 0 | it was stopped before it ended; figure of cost |" in text
    assert "Transformer Engine is missing" in text and "commit unknown" in text
    assert text.endswith((REPOSITORY / "docs/support.md").read_text()[-100:])
    assert call("cost") == 0, "the part that was named passed"
    assert call() == 3, "three parts cannot run here"
    assert "# Acceptance is incomplete on 1 x NVIDIA H200: " in (tmp_path / "out/acceptance.md").read_text()


def test_what_fails_beside_others_runs_once_more_alone(runner, tmp_path):
    """Others on the same GPU may have been the reason. What fails alone, or was cut, does not."""
    call, fates, ran = runner
    fates |= {"experts": "fails", "cost": "fails", "layers": "is cut"}
    assert call() == 1
    names = [name for name, _ in ran]
    assert names.count("experts") == 2 and names[-1] == "experts"
    assert names.count("cost") == names.count("layers") == 1
    verdicts = {verdict.part.name: verdict for verdict in read_results(tmp_path / "out/results.jsonl")}
    assert verdicts["experts"].word == "passed" and "failed beside others: wrong" in verdicts["experts"].said
    assert verdicts["layers"].said == "cut after 9 s; figure of layers"


def test_costs_run_alone_and_the_rest_side_by_side(runner, monkeypatch):
    call, _, _ = runner
    running, most, lock = set(), {True: 0, False: 0}, threading.Lock()
    meet = threading.Barrier(STREAMS, timeout=PATIENCE)
    together = {
        part.name for part in [part for part in PARTS if not part.alone and part.name not in ENGINES][1:][:STREAMS]
    }

    def part_runs(part: Part, *unused: Any, **named: Any) -> tuple[str, str, int, int]:
        with lock:
            running.add(part.name)
            most[part.alone] = max(most[part.alone], len(running))
        if part.name in together:
            meet.wait()  # or the streams do not run at the same time
        with lock:
            running.remove(part.name)
        return "passed", "", 1, 2

    monkeypatch.setattr(acceptance, "run_part", part_runs)
    assert call() == 3
    assert most == {True: 1, False: STREAMS}


def test_its_own_table_makes_no_other_commit(tmp_path, monkeypatch):
    """Else nothing would be resumed in a checkout."""
    monkeypatch.setattr(acceptance, "REPOSITORY", tmp_path)
    (tmp_path / "docs").mkdir()
    for name in ("docs/support.md", "code.py"):
        (tmp_path / name).write_text("before\n")
    who = "-c user.name=a -c user.email=a".split()
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    about = acceptance._about(_machine(), False)
    (tmp_path / "docs/support.md").write_text("a table\n")
    assert acceptance._about(_machine(), False) == about
    (tmp_path / "code.py").write_text("other code\n")
    assert acceptance._about(_machine(), False) == [*about[:-1], f"{about[-1]}-dirty"]


def test_where_nccl_does_not_talk_tensors_go_through_the_host(runner, tmp_path):
    call, fates, ran = runner
    fates["nccl-2"] = "fails"
    assert call() == 1
    staged = {part.name for part in PARTS if part.ranks > 1 and not part.name.startswith("nccl")} - ENGINES
    assert {name for name, through_host in ran if through_host} == staged
    assert "over gloo, tensors staged through the host" in (tmp_path / "out/acceptance.md").read_text()


def test_places_that_cannot_be_written_are_named(runner, tmp_path, monkeypatch, capsys):
    call, _, _ = runner

    def denied(*args: Any, **named: Any) -> None:
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
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: held["most"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device=None: 2 * held["most"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: held.update(most=7))
    with _kept_peak() as peaks:
        held["most"] = 1000
        torch.cuda.reset_peak_memory_stats()
    assert max(peaks) == (1000, 2000)
