"""Imports go one way, in both packages and between them.

    megatron.balanced:  loops  ->  trainer, loop  ->  experts, sequences, layers  ->  observe  ->  cpu  ->  shared
    balancing:          whatif  ->  experts, sequences, layers  ->  kernels  ->  pipeline, cluster, report  ->  files

No balancer imports another one, in neither package. Only the trainer imports `megatron.training` and reads a namespace
of arguments. `balancing` imports nothing of Megatron.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BALANCERS = {"experts", "sequences", "layers"}
FLOORS = {
    "megatron.balanced": {
        "loops": 5,
        "trainer": 4, "loop": 4,
        "experts": 3, "sequences": 3, "layers": 3,
        "observe": 2,
        "cpu": 1,
        "shared": 0, "local": 0,
    },
    "balancing": {
        "whatif": 5,
        "experts": 4, "sequences": 4, "layers": 4,
        "kernels": 3,
        "cluster": 2, "doctor": 2, "pipeline": 2, "report": 2, "run_lock": 2,
        "files": 1, "messages": 1, "trials": 1, "worker": 1,
        "clock": 0, "command_line": 0, "launch": 0, "model_sizes": 0, "process": 0, "ranges": 0, "settings": 0,
        "threads": 0, "upload": 0,
    },
}  # fmt: skip


def _imports(path: Path) -> Iterator[str]:
    """The modules and names that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _room(module: str) -> tuple[str, str] | None:
    """(package, room) of a module or of a name in one; None outside of both packages."""
    for package in FLOORS:
        if module.startswith(f"{package}."):
            return package, module.removeprefix(f"{package}.").split(".")[0]
    return None


@cache
def _arrows() -> list[tuple[str, tuple[str, str], str]]:
    """(file, its room, what it imports) of each import in a room."""
    found = []
    for package in FLOORS:
        for path in sorted((REPOSITORY / package.replace(".", "/")).rglob("*.py")):
            name = path.relative_to(REPOSITORY)
            room = _room(".".join(name.with_suffix("").parts))
            if room is not None and not room[1].startswith("__"):
                found += [(str(name), room, module) for module in _imports(path)]
    return found


def test_imports_go_one_way():
    wrong = set()
    for file, (package, room), module in _arrows():
        other = _room(module)
        if other is not None and other[0] == package and other[1] != room:
            floors = FLOORS[package]
            if other[1] in floors and floors[other[1]] >= floors[room]:
                wrong.add((file, module))
    assert not wrong


def test_no_balancer_imports_another():
    pairs = {(room, other[1], file) for file, (_, room), module in _arrows() if (other := _room(module))}
    assert not {pair for pair in pairs if {*pair[:2]} <= BALANCERS and pair[0] != pair[1]}


def test_every_room_has_its_floor():
    for package, floors in FLOORS.items():
        rooms = {path.stem for path in (REPOSITORY / package.replace(".", "/")).iterdir() if path.suffix in ("", ".py")}
        assert {room for room in rooms if not room.startswith("__")} == set(floors)


def test_every_balancer_is_defined_once():
    """All loops have the same class."""
    names = ["ExpertBalancer", "SequenceBalancer", "LayerBalancer"]
    trees = [ast.parse(path.read_text()) for path in REPOSITORY.glob("megatron/**/*.py")]
    defined = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert sorted(name for name in defined if name in names) == sorted(names)


def test_only_the_trainer_reads_arguments_and_megatrons_training():
    for file, (package, room), module in _arrows():
        if (package, room) != ("megatron.balanced", "trainer"):
            assert not module.startswith("megatron.training"), file
            if package == "megatron.balanced":
                assert module.split(".")[0] != "argparse", file


def test_the_planners_know_nothing_of_megatron():
    assert not {file for file, (package, _), module in _arrows() if package == "balancing" and _is_megatron(module)}


def _is_megatron(module: str) -> bool:
    return module.split(".")[0] == "megatron"
