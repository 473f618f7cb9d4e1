"""Transformer Engine's Python is installed where only its tests find it, and can be done without."""

import importlib.util

import pytest

from tests.support.packages_apart import folder, version
from tests.support.training import MOCK_DATA, MODEL
from tests.tools.test_scripts import Machine

PREPARE = (
    "source scripts/environment.sh; prepare_environment train ''; install_apart transformer_engine; echo using $python"
)


@pytest.fixture
def machine(tmp_path):
    machine = Machine(tmp_path)
    machine.add_python("3.12", machine.bin / "python3")
    return machine


def test_installed_once_without_what_it_asks_for(machine):
    assert machine.run(PREPARE).returncode == 0
    _, installed = machine.installations()
    assert "--no-deps" in installed and f"--target {machine.clone}/.venv/transformer_engine" in installed
    assert machine.run(PREPARE).stdout.startswith("using ")
    assert len(machine.installations()) == 2
    with (machine.clone / "scripts/transformer_engine.txt").open("a") as added:
        added.write("einops==0.8.2\n")
    assert machine.run(PREPARE).returncode == 0
    assert len(machine.installations()) == 3


def test_tests_go_on_where_it_cannot_be_installed(machine):
    assert machine.prepare().returncode == 0
    done = machine.run(PREPARE, PIP_STATUS="1")
    assert done.returncode == 0 and "using " in done.stdout
    assert done.stderr.count("\n") == 1 and "skipped" in done.stderr
    assert not (machine.clone / ".venv/transformer_engine").exists()
    assert machine.run(PREPARE).returncode == 0
    assert len(machine.installations()) == 3


def test_other_tests_do_not_find_it():
    found = importlib.util.find_spec("transformer_engine")
    assert found is None or not (found.origin or "").startswith(str(folder("transformer_engine")))


def _seen(argv: list[str]) -> tuple[str, str, bool]:
    import transformer_engine
    from megatron.core.utils import is_te_min_version

    from megatron.balanced.trainer.arguments import parse_arguments

    implementation = parse_arguments(argv)[0].transformer_impl
    return transformer_engine.__version__, implementation, is_te_min_version("2.0")


def test_megatron_finds_it_and_a_cpu_takes_the_local_implementation_nevertheless(engine):
    assert engine.run(1, _seen, [*MODEL, *MOCK_DATA]) == [(version("transformer_engine"), "local", True)]
