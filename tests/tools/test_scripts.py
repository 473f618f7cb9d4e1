"""Scripts and package: a Python is found or asked for, .venv is made once, and our half of the namespace is found.

Interpreters are stubs here, so that every kind of machine can be had. `environment.sh` asks an interpreter for four
things: whether it is a certain version, what it lacks, to make a virtual environment, and to run pip.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import megatron.core
import pytest

import balancing
from tests.support.command import run_python
from tests.support.patience import PATIENCE

REPOSITORY = Path(__file__).parents[2]
TOOLS = ("bash", "basename", "cat", "cksum", "cp", "dirname", "grep", "mkdir", "rm", "tee", "touch")

STUB = """#!{bash}
case $1 in
-c) [ "${{3:-{version}}}" = {version} ] && {works} ;;
--version) echo Python {version}.0 ;;
-m)
    case $2 in
    venv) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    balancing.doctor)
        [[ "$0" -ef {has} || "$0" == */.venv/* ]] && echo "$0" && echo "${{MEGATRON_CORE:-}}" && exit
        echo "python -m balancing.doctor: error: $0 lacks torch for $4" >&2
        exit 2
        ;;
    pip) echo "$*" >>"$PIP_LOG"; exit "${{PIP_STATUS:-0}}" ;;
    tests.gpu) echo "parts by $0" ;;
    esac
    ;;
esac
"""


class Machine:
    """A clone of the repository's scripts on a machine that has the basic tools and the interpreters given to it."""

    def __init__(self, folder: Path) -> None:
        self.clone, self.bin, self.home = folder / "clone", folder / "bin", folder / "home"
        for made in (self.clone / "balancing", self.bin, self.home):
            made.mkdir(parents=True)
        shutil.copytree(REPOSITORY / "scripts", self.clone / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("setup.py", "pyproject.toml", "balancing/__init__.py"):
            shutil.copy(REPOSITORY / name, self.clone / name)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.pip_log = folder / "pip.log"
        self.environment = {"PATH": str(self.bin), "HOME": str(self.home), "PIP_LOG": str(self.pip_log)}

    def add_python(self, version: str, path: Path, works: bool = True, complete: bool = False) -> Path:
        """works: whether it can make environments. complete: whether the doctor finds all that is needed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        has = path if complete else "-"
        path.write_text(STUB.format(bash=shutil.which("bash"), version=version, works=str(works).lower(), has=has))
        path.chmod(0o755)
        return path

    def run(self, command: str, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["bash", "-c", f"set -euo pipefail; cd {self.clone}; {command}"],
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

    def find_python(self, **environment: str) -> subprocess.CompletedProcess:
        return self.run("source scripts/environment.sh; find_python", **environment)

    def prepare(self, extra: str = "", *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        command = f"set -- {' '.join(arguments)}; source scripts/environment.sh; prepare_environment train '{extra}'"
        command += "; echo using $python; echo with $PYTHONPATH $*"
        return self.run(command, **environment)

    def installations(self) -> list[str]:
        return self.pip_log.read_text().splitlines() if self.pip_log.exists() else []


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.mark.parametrize("script", ["test.sh", "quickstart.sh"])
def test_a_machine_with_only_an_old_python_is_told_what_to_install(machine, script):
    for name in ("python3", "python3.11", "python"):
        machine.add_python("3.11", machine.bin / name)
    done = machine.run(f"scripts/{script}")
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.fullmatch(rf"{script}: no Python 3\.12 or 3\.13 .*install one.*python3\.12-venv'\n", done.stderr)
    assert not (machine.clone / ".venv").exists()


def test_any_python_lists_the_parts_of_the_acceptance(machine):
    old = machine.add_python("3.11", machine.bin / "python3", works=True)
    done = machine.run("scripts/gpu_check.sh --dry-run")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"parts by {old}\n", "")


def test_a_python_newer_than_the_wheels_is_not_taken(machine):
    machine.add_python("3.14", machine.bin / "python3")
    assert machine.find_python().returncode == 1


def test_a_python_that_cannot_make_environments_is_not_taken(machine):
    machine.add_python("3.12", machine.bin / "python3.12", works=False)
    assert machine.find_python().returncode == 1


@pytest.mark.parametrize("name", ["python3.12", "python3", "python"])
def test_python_on_path(machine, name):
    expected = machine.add_python("3.12", machine.bin / name)
    assert machine.find_python().stdout.strip() == str(expected)


def test_python_of_pyenv_behind_a_shim_that_does_not_run(machine):
    machine.add_python("3.12", machine.bin / "python3.12", works=False)
    machine.add_python("3.11", machine.home / ".pyenv/versions/3.11.7/bin/python")
    expected = machine.add_python("3.12", machine.home / ".pyenv/versions/3.12.1/bin/python")
    assert machine.find_python().stdout.strip() == str(expected)
    elsewhere = machine.add_python("3.12", machine.home / "elsewhere/versions/3.12.4/bin/python")
    assert machine.find_python(PYENV_ROOT=str(machine.home / "elsewhere")).stdout.strip() == str(elsewhere)


def test_python_of_uv(machine):
    expected = machine.add_python("3.13", machine.home / "uv/python3.13")
    uv = machine.bin / "uv"
    uv.write_text(f'#!{shutil.which("bash")}\n[ "${{@: -1}}" = 3.13 ] && echo {expected}\n')
    uv.chmod(0o755)
    assert machine.find_python().stdout.strip() == str(expected)


def test_the_best_version_wins_wherever_it_is(machine):
    machine.add_python("3.13", machine.bin / "python3")
    expected = machine.add_python("3.12", machine.home / ".pyenv/versions/3.12.1/bin/python")
    assert machine.find_python().stdout.strip() == str(expected)


def test_the_user_can_name_a_python(machine):
    machine.add_python("3.12", machine.bin / "python3.12")
    expected = machine.add_python("3.13", machine.home / "mine")
    assert machine.find_python(PYTHON=str(expected)).stdout.strip() == str(expected)
    old = machine.add_python("3.11", machine.home / "old")
    done = machine.find_python(PYTHON=str(old))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and f"PYTHON={old} is not" in done.stderr


def test_the_second_time_nothing_is_installed(machine):
    machine.add_python("3.12", machine.bin / "python3")
    first = machine.prepare()
    assert first.returncode == 0, first.stderr
    assert first.stdout.splitlines()[0] == f"{machine.bin}/python3 lacks torch for train"
    assert first.stdout.splitlines()[-2] == f"using {machine.clone}/.venv/bin/python"
    assert len(machine.installations()) == 1
    assert machine.installations()[0].endswith(f"--editable {machine.clone}")
    again = machine.prepare()
    assert again.stdout == f"using {machine.clone}/.venv/bin/python\nwith {machine.clone}\n"
    assert len(machine.installations()) == 1


def test_a_python_that_has_everything_is_taken_and_nothing_is_made(machine):
    machine.add_python("3.13", machine.bin / "python3.13", complete=True)
    machine.add_python("3.12", machine.bin / "python3.12", works=False)
    wheel = machine.home / "megatron_core.whl"
    done = machine.prepare("dev", MEGATRON_CORE=str(wheel), PYTHONPATH="/theirs")
    first, *rest = done.stdout.splitlines()
    assert first == f"Python: {machine.bin}/python3.13 has what is needed"
    assert rest == [f"using {machine.bin}/python3.13", f"with {wheel}:{machine.clone}:/theirs"]
    assert not (machine.clone / ".venv").exists() and machine.installations() == []


def test_the_order_of_pythons_at_hand(machine):
    active = machine.add_python("3.12", machine.home / "active/bin/python", complete=True)
    machine.add_python("3.12", machine.bin / "python3.12", complete=True)
    named = machine.add_python("3.13", machine.home / "named", complete=True)
    activated = {"VIRTUAL_ENV": str(active.parents[1])}
    assert f"using {named}\n" in machine.prepare(PYTHON=str(named), **activated).stdout
    relative = machine.prepare(PYTHON="../home/named", **activated)
    assert f"using {machine.clone}/../home/named\n" in relative.stdout
    assert f"using {active}\n" in machine.prepare(**activated).stdout
    done = machine.prepare("", "--again", "--venv", **activated)
    assert f"using {machine.clone}/.venv/bin/python\nwith {machine.clone} --again\n" in done.stdout
    assert f"using {machine.clone}/.venv/bin/python\n" in machine.prepare().stdout, "what was made is not left aside"


def test_an_extra_is_installed_once_and_covers_the_plain_package(machine):
    machine.add_python("3.12", machine.bin / "python3")
    for extra in ("dev", "dev", ""):  # the last has .venv at hand
        assert machine.prepare(extra).returncode == 0
    assert len(machine.installations()) == 1
    assert machine.installations()[0].endswith(f"--editable {machine.clone}[dev]")


@pytest.mark.parametrize("name", ["setup.py", "pyproject.toml"])
def test_changed_dependencies_are_installed_again(machine, name):
    machine.add_python("3.12", machine.bin / "python3")
    assert machine.prepare().returncode == 0
    with (machine.clone / name).open("a") as file:
        file.write("# changed\n")
    assert machine.prepare().returncode == 0
    assert len(machine.installations()) == 2


def test_a_failed_installation_says_so_and_is_tried_again(machine):
    machine.add_python("3.12", machine.bin / "python3")
    failed = machine.prepare(PIP_STATUS="1")
    assert failed.returncode == 1
    assert "installing into .venv failed" in failed.stderr
    assert machine.prepare().returncode == 0
    assert len(machine.installations()) == 2


def test_an_interrupted_installation_starts_from_nothing(machine):
    machine.add_python("3.12", machine.bin / "python3")
    # pip is killed together with the script, as by a closed terminal.
    stub = machine.bin / "python3"
    stub.write_text(stub.read_text().replace("exit ", '[ -z "${INTERRUPT:-}" ] || kill -KILL $PPID; exit '))
    assert machine.prepare(INTERRUPT="yes").returncode != 0
    (machine.clone / ".venv" / "half-written").touch()
    done = machine.prepare()
    assert done.returncode == 0
    assert "did not finish" in done.stdout
    assert not (machine.clone / ".venv" / "half-written").exists()
    assert machine.prepare().stdout.startswith(f"using {machine.clone}/.venv")


def test_an_environment_whose_python_is_gone_is_made_again(machine):
    machine.add_python("3.12", machine.bin / "python3")
    assert machine.prepare().returncode == 0
    (machine.clone / ".venv/bin/python").unlink()
    done = machine.prepare()
    assert done.returncode == 0
    assert "is gone" in done.stdout
    assert len(machine.installations()) == 2


def test_an_environment_of_another_python_is_left_alone(machine):
    machine.add_python("3.12", machine.bin / "python3")
    theirs = machine.add_python("3.10", machine.clone / ".venv/bin/python")
    done = machine.prepare()
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and ".venv holds Python 3.10" in done.stderr
    assert theirs.exists() and machine.installations() == []


def test_the_quickstart_refuses_flags_it_does_not_have(machine):
    done = machine.run("scripts/quickstart.sh --agian")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "--agian" in done.stderr


def test_paced_training_refuses_what_is_no_time():
    done = run_python("scripts/pretrain_paced.py", LAYER_MS="slow")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "LAYER_MS=slow" in done.stderr


def test_shell_scripts_pass_shellcheck():
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    scripts = [".ci/run", "scripts/slurm/pretrain_gpt.sbatch", *sorted((REPOSITORY / "scripts").rglob("*.sh"))]
    done = subprocess.run(
        [shellcheck, "--external-sources", *scripts], cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def metadata(tmp_path_factory):
    """What setup.py tells pip: the files of the egg_info folder, by name."""
    folder = tmp_path_factory.mktemp("metadata")
    done = run_python("setup.py", "--quiet", "egg_info", "--egg-base", folder)
    assert done.returncode == 0, done.stderr
    return {path.name: path.read_text() for path in (folder / "megatron_balance.egg-info").iterdir()}


def test_the_package_has_the_version_of_the_code(metadata):
    assert f"\nName: megatron-balance\nVersion: {balancing.__version__}\n" in metadata["PKG-INFO"]
    assert "\nRequires-Python: >=3.12\n" in metadata["PKG-INFO"]


def test_the_pinned_megatron_is_the_one_tested(metadata):
    assert f"megatron-core=={megatron.core.__version__.partition('+')[0]}\n" in metadata["requires.txt"]


def test_the_package_leaves_the_namespace_to_be_shared(metadata):
    assert metadata["top_level.txt"].split() == ["balancing", "balancing_tools", "megatron", "pretrain_gpt"]
    sources = {os.path.normpath(name) for name in metadata["SOURCES.txt"].splitlines()}
    assert "megatron/balanced/__init__.py" in sources
    assert "megatron/__init__.py" not in sources and not (REPOSITORY / "megatron/__init__.py").exists()


def test_the_package_has_the_page_of_the_report(metadata):
    sources = {os.path.normpath(name) for name in metadata["SOURCES.txt"].splitlines()}
    assert "balancing_tools/report/page.html.jinja" in sources
    assert "jinja2\n" in metadata["requires.txt"]


@pytest.mark.parametrize("first", ["wheel", "checkout"])
def test_megatron_is_found_in_the_wheel_and_in_a_checkout(tmp_path, first):
    """Our folder extends whatever `megatron` comes first on the path, from any working directory."""
    path = [str(REPOSITORY)]
    expected = str(Path(megatron.core.__file__).parent)
    if first == "checkout":
        (tmp_path / "megatron/core").mkdir(parents=True)
        (tmp_path / "megatron/core/__init__.py").touch()
        path.insert(0, str(tmp_path))
        expected = str(tmp_path / "megatron/core")
    code = (
        "from importlib.util import find_spec as find\n"
        "for name in ('megatron.core', 'megatron.balanced', 'megatron.training'):\n"
        "    print(*find(name).submodule_search_locations)"
    )
    done = run_python("-c", code, cwd=tmp_path.parent, PYTHONPATH=os.pathsep.join(path))
    core, ours, training = done.stdout.splitlines()
    assert core == expected
    assert ours == str(REPOSITORY / "megatron/balanced")
    assert training == str(Path(megatron.core.__file__).parent.parent / "training")


def test_balancing_never_imports_megatron():
    """Imports go pretrain_gpt.py -> megatron.balanced -> balancing, so that planners can be used without Megatron."""
    files = sorted((REPOSITORY / "balancing").rglob("*.py"))
    assert files
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "megatron" for name in names), f"{file}, line {node.lineno}"
