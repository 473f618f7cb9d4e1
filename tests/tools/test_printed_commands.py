"""Every command that a page prints has a short form that the suite runs: programs break with the code under them.

A short form is a command, run here, or tests that run the program. It has each flag that pages print of the program,
except those that only name what is read and written (`_NAMES`). Commands that start ranks take a minute each, so CI
runs a few of them, and all of them within twelve days.
"""

import importlib
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from tests.support.command import REPOSITORY, run_python
from tests.support.patience import PATIENCE

PAGES = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "benchmarks/README.md")),
    *sorted(REPOSITORY.glob("docs/**/*.md")),
]
_PROGRAM = re.compile(
    r"(?:python3? +(?:-W +ignore +)?-m +(?P<module>(?:balancing|benchmarks|tests)[\w.]*)"
    r"|(?:python3?|torchrun)(?: +(?!-m\b)\S+)*? +(?P<python>[\w/]*\w\.py)\b"
    r"|(?<![\w./])(?P<shell>scripts/[\w/]+\.sh))(?P<rest>[^|&;]*)"
)
_NAMES = {"--page", "--json", "--from-report"}


@dataclass(frozen=True)
class Printed:
    """program: a module, or the path of a script. flags: that are printed with it."""

    program: str
    flags: frozenset[str]
    page: str = field(compare=False)


@dataclass(frozen=True)
class Form:
    """arguments: of the short form. {lengths} and {loads} are small files, {folder} is empty. codes: of its exit; 1 is
    a target that is missed. tests: that run it in its place."""

    arguments: str = ""
    codes: tuple[int, ...] = (0,)
    tests: tuple[str, ...] = ()

    @property
    def flags(self) -> set[str]:
        return {word.partition("=")[0] for word in self.arguments.split(" -- ")[0].split() if word.startswith("--")}


def _tested(arguments: str, *tests: str) -> Form:
    return Form(arguments, tests=tests)


_MISSED = (0, 1)
# In the process of the tests, a few seconds together.
QUICK: dict[str, list[Form]] = {
    "benchmarks.whatif": [Form("--gains"), Form("--emulated")],
    "benchmarks.layers.plans": [Form("--quick --layers 8 --trace benchmarks/traces/early_exit.npz", _MISSED)],
    "benchmarks.layers.overlap": [Form("--quick", _MISSED)],
    "benchmarks.sequences.data_parallel": [Form("--quick")],
    "benchmarks.headlines": [Form("--only layers")],
}
# In processes of their own, most with ranks. --quick is as short as it is printed.
LONG: dict[str, list[Form]] = {
    "benchmarks.costs": [Form("", _MISSED), Form("--plans")],
    "benchmarks.whatif": [Form()],
    "benchmarks.host": [Form("--quick", _MISSED)],
    "benchmarks.idle": [Form("--quick")],
    "benchmarks.observation": [Form("--quick")],
    "benchmarks.experts.taot": [Form("--draws 1")],
    "benchmarks.experts.plans": [Form("--quick --trace {loads}", _MISSED)],
    "benchmarks.experts.regimes": [Form("--cells 1x1", _MISSED), Form("--modelled --cells 1x1", _MISSED)],
    "benchmarks.experts.training": [Form("--quick")],
    "benchmarks.experts.emulated": [Form("--quick --ranks 8")],
    "benchmarks.sequences.plans": [Form("--quick --ranks 8 --lengths {lengths}", _MISSED)],
    "benchmarks.sequences.training": [Form("--quick")],
    "benchmarks.sequences.emulated": [Form("--quick --samples", _MISSED)],
    "benchmarks.sequences.micro_batches": [Form("--quick --emulated --sources lognormal", _MISSED)],
    "benchmarks.layers.dynamics": [Form("--quick --schemes freez")],
    "benchmarks.layers.training": [Form("--quick", _MISSED)],
    "benchmarks.layers.emulated": [Form("--quick --cases 'early exit'", _MISSED)],
    "benchmarks.layers.hybrid": [Form("--emulated", _MISSED)],
    "benchmarks.emulated.calibration": [Form("--quick", _MISSED)],
    "tests.gpu.references": [Form("--check")],
}
_SCRIPTS, _COMMANDS = "tests/tools/test_scripts.py", "tests/tools/test_commands.py"
TESTED: dict[str, list[Form]] = {
    "benchmarks.emulated": [_tested("--nodes --ranks-per-node --nics-per-node --nic", "tests/tools/test_emulated.py")],
    "benchmarks.together": [_tested("--quick --pace", "tests/tools/test_together.py")],
    "benchmarks.trials": [_tested("--real", "tests/together/test_trials.py", "tests/together/test_trials_training.py")],
    "benchmarks.since": [_tested("", "tests/tools/test_since.py")],
    "benchmarks.published": [_tested("--quick --only", "tests/tools/test_published.py")],
    "benchmarks.headlines": [_tested("--emulated", "tests/tools/test_headlines.py")],
    "benchmarks.sequences.micro_batches": [_tested("--quick --lengths", "tests/sequences/test_micro_batches.py")],
    "tests.support.bridge_recipes": [_tested("", "tests/tools/test_bridge_recipes.py")],
    "tests.support.recipes": [_tested("", "tests/tools/test_recipe.py")],
    "tests.support.limits": [_tested("", "tests/tools/test_support.py")],
    "balancing.doctor": [_tested("", "tests/tools/test_doctor.py")],
    "balancing.report": [_tested("--html --no-html", _COMMANDS, "tests/report/test_summary.py")],
    "balancing.cluster": [_tested("--measure --preset --nodes", "tests/tools/test_cluster.py")],
    "balancing.experts": [
        _tested("--save --cluster --hidden-size --moe-ffn-hidden-size", "tests/experts/test_cli.py", _COMMANDS)
    ],
    "balancing.layers": [_tested("--repack --virtual", "tests/layers/test_cli.py", _COMMANDS)],
    "balancing.whatif": [_tested("--cluster --gpus --lengths", "tests/whatif/test_forecast.py", _COMMANDS)],
    "scripts/prepare_data.py": [
        _tested("--stdlib --append-eod --output-prefix --input", "tests/tools/test_prepare_data.py")
    ],
    "scripts/demo.sh": [_tested("", "tests/tools/test_together.py")],
    "scripts/quickstart.sh": [_tested("", _SCRIPTS, _COMMANDS)],
    "scripts/docs.sh": [_tested("", ".ci/run")],
    "scripts/test.sh": [
        _tested("--all --sample --minutes --fuzz --seed --venv", ".ci/run"),
        _tested("--exhaustive -k", "tests/conftest.py"),
        _tested("--soak", "tests/support/soak.py"),
    ],
    "scripts/gpu_check.sh": [_tested("--dry-run --minutes --rehearse", "tests/gpu/test_acceptance.py")],
    "scripts/mutants.sh": [_tested("", "tests/tools/test_mutants.py", _COMMANDS)],
    "scripts/rehearse.sh": [_tested("", _SCRIPTS)],
    "examples/plain_loop.py": [_tested("", "tests/loops/test_example.py")],
    "examples/bridge_recipe.py": [_tested("", "tests/loops/test_bridge.py")],
}
FORMS = {name: [*QUICK.get(name, []), *LONG.get(name, []), *TESTED.get(name, [])] for name in QUICK | LONG | TESTED}
# Flags of Megatron-LM and of balancers: test_docs checks them, and all tests of training run them.
_TRAIN = {"pretrain_gpt.py", "examples/dynamic_models/pretrain.py"}
_FOREIGN = {"train.py", "script.py"}  # of slime, and of a reader


def printed(text: str, page: str) -> Iterator[Printed]:
    """The commands in a page's blocks and in its `code`."""
    blocks = re.findall(r"^```(?:bash|sh)\n(.*?)^```", text, re.M | re.S)
    lines = [re.sub(r"(^|\s)#.*", "", line) for block in blocks
             for line in re.sub(r"\\\n\s*", " ", block).splitlines()]  # fmt: skip
    inline = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    for line in [*lines, *(" ".join(code.split()) for code in inline)]:
        for found in _PROGRAM.finditer(line):
            program = found["module"] or found["python"] or found["shell"]
            flags = re.findall(r"(?<!\S)--[a-z][\w-]*", found["rest"].split(" -- ")[0])
            yield Printed(program.rstrip("."), frozenset(flags), page)


COMMANDS = list(dict.fromkeys(
    each for page in PAGES for each in printed(page.read_text(), str(page.relative_to(REPOSITORY)))
))  # fmt: skip


def _lacks(command: Printed) -> str:
    """What of a printed command has no short form, empty if nothing."""
    if command.program in _TRAIN | _FOREIGN:
        return ""
    if command.program not in FORMS:
        return f"{command.page}: {command.program} has no short form"
    runs = set().union(*(form.flags for form in FORMS[command.program]))
    flags = sorted(command.flags - runs - _NAMES)
    return f"{command.page}: no short form of {command.program} has {' '.join(flags)}" if flags else ""


def test_every_printed_command_has_a_short_form():
    assert len(COMMANDS) > 70
    assert not [lacks for command in COMMANDS if (lacks := _lacks(command))]


def test_every_short_form_is_of_a_printed_command():
    assert not FORMS.keys() - {command.program for command in COMMANDS}


def test_commands_are_found_in_blocks_and_in_text():
    text = (
        "See `python -m benchmarks.host --quick` and `scripts/demo.sh`:\n\n"
        "```bash\nA=1 torchrun --nproc-per-node 4 \\\n    pretrain_gpt.py --balance all | tee log  # --no\n"
        "python -m benchmarks.emulated --nic 1 -- -m x --y\n```\n"
    )
    found = {(each.program, *sorted(each.flags)) for each in printed(text, "page")}
    assert found == {
        ("benchmarks.host", "--quick"),
        ("scripts/demo.sh",),
        ("pretrain_gpt.py", "--balance"),
        ("benchmarks.emulated", "--nic"),
    }
    unknown = [
        _lacks(each) for each in printed("`python -m benchmarks.new --fast` `python -m benchmarks.host --fast`", "p")
    ]
    assert unknown == ["p: benchmarks.new has no short form", "p: no short form of benchmarks.host has --fast"]


@pytest.mark.parametrize("program", TESTED)
def test_the_tests_of_a_program_name_it(program):
    """By its module, by a file of it or by its flags."""
    names = {program, program.removesuffix(".sh").rpartition("/")[2], program.removesuffix(".py").replace("/", ".")}
    names |= {name.rpartition(".")[2] for name in names}
    for form in TESTED[program]:
        texts = [(REPOSITORY / name).read_text() for name in form.tests]
        assert all(any(name in text for name in names) for text in texts), form.tests
        for flag in form.flags:
            assert any(flag in text or flag[2:].replace("-", "_") in text for text in texts), flag


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """What short forms read, by the name that stands for it, and an empty folder."""
    from balancing_tools.load_trace import LoadTrace, write_load_trace

    folder, random = tmp_path_factory.mktemp("read"), np.random.default_rng(0)
    np.savez(folder / "lengths.npz", lengths=random.lognormal(6, 1, 400).astype(np.int64) + 1)
    counts = random.multinomial(4096, random.dirichlet(np.ones(32)), size=(4, 8, 4, 2))
    write_load_trace(LoadTrace(counts, np.arange(4), np.arange(4)), folder / "loads.npz")
    return {"lengths": folder / "lengths.npz", "loads": folder / "loads.npz"}


def _cases(forms: dict[str, list[Form]], takes_turns: bool = False) -> list:
    cases = [(name, form) for name in forms for form in forms[name]]
    marks = [[pytest.mark.exhaustive(turn=turn)] if takes_turns else [] for turn in range(len(cases))]
    return [pytest.param(name, form, id=f"{name} {form.arguments}", marks=own)
            for (name, form), own in zip(cases, marks, strict=True)]  # fmt: skip


@pytest.mark.parametrize(("program", "form"), _cases(QUICK))
def test_a_short_form_runs(program, form, files, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [program, *shlex.split(form.arguments.format(**files))])
    importlib.import_module(program)  # before it runs as a program, whose pickles name it
    monkeypatch.delitem(sys.modules, program)
    monkeypatch.chdir(REPOSITORY)
    code = 0
    try:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code or 0
    said = capsys.readouterr()
    assert code in form.codes and said.out, said.err


def test_the_training_that_the_readme_prints_trains_and_is_reported(tmp_path):
    """Two steps on a corpus of this repository's own source."""
    block = re.search(
        r"^```bash\n(python scripts/prepare_data.*?)^```", (REPOSITORY / "README.md").read_text(), re.M | re.S
    )
    assert block is not None
    shown = (
        block[1].split("#")[0].replace("--stdlib", f"--input {REPOSITORY / 'balancing'} --glob '*.py'")
        + block[1].partition("\n")[2]
    )
    shown = shown.replace("runs/", f"{tmp_path}/").replace(
        "--balance all", "--train-iters 2 --log-interval 1 --balance all"
    )
    assert "pretrain_gpt.py" in shown and "balancing.report" in shown
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", shown], cwd=REPOSITORY, env={**os.environ, "PATH": path}, capture_output=True, text=True,
        timeout=2 * PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert "iteration        2/       2" in done.stdout and "experts" in done.stdout


@pytest.mark.parametrize(("program", "form"), _cases(LONG, takes_turns=True))
def test_a_long_short_form_runs(program, form, files):
    words = shlex.split(form.arguments.format(**files))
    done = run_python("-m", program, *words, timeout=2.5 * PATIENCE)
    assert done.returncode in form.codes and done.stdout, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert "Traceback" not in done.stderr
